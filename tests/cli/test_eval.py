"""`phalanx eval`: what training printed, on any source, and on questions."""

from __future__ import annotations

import gzip
import json
import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import FinishedRuns
from corpora import write_token_files

from phalanx.cli.main import main
from phalanx.data.tokenizer import ByteTokenizer
from phalanx.evaluation.open_model import open_model
from phalanx.events.log import read_events
from phalanx.events.records import Evaluated

Command = Callable[..., Any]


@pytest.fixture
def command(
    finished: FinishedRuns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Command:
    """The command in this process, in the folder of a finished run; its object, or what it complains about."""
    monkeypatch.chdir(finished(1).workshop.path)
    monkeypatch.setenv("HOME", str(tmp_path))  # where text that has to be tokenised is kept

    def run(*arguments: object, code: int = 0) -> Any:
        monkeypatch.setattr(sys, "argv", ["phalanx", "eval", *map(str, arguments), "--json"])
        with pytest.raises(SystemExit) as leaving:
            main()
        out, err = capfd.readouterr()
        assert leaving.value.code == code, out + err
        assert "Traceback" not in err
        return json.loads(out) if code == 0 else err

    return run


def evaluated(finished: FinishedRuns, step: int) -> Evaluated:
    events = read_events(finished(1).path / "events.jsonl")
    return next(event for event in events if isinstance(event, Evaluated) and event.step == step)


def test_eval_equals_the_evaluation_of_training(command: Command, finished: FinishedRuns) -> None:
    for path, step in (("ranks-1", 8), ("ranks-1/checkpoints/step-00000004", 4)):
        told, got = evaluated(finished, step), command(path)
        assert (got["loss"], got["tokens"]) == (told.loss, told.tokens)
        assert got["perplexity"] == pytest.approx(math.exp(told.loss))
        assert got["sources"]["text"]["loss"] == told.loss
        assert got["checkpoint"].endswith(f"step-{step:08d}")
        # All text is bytes: a token is a byte, unless it ends a document.
        assert got["bits_per_byte"] >= told.loss / math.log(2)


def test_eval_is_independent_of_the_batch(command: Command) -> None:
    usual = command("ranks-1")
    other = command("ranks-1", "--batch", 5)
    assert other["loss"] == pytest.approx(usual["loss"], rel=1e-6) and other["tokens"] == usual["tokens"]
    assert command("ranks-1", "--sequences", 2)["tokens"] < usual["tokens"] < command("ranks-1", "--sequences", 20)["tokens"]


def test_eval_is_the_same_for_any_kind_of_source(command: Command, tmp_path: Path) -> None:
    texts = ["A first text of some length, read in windows.", "A second one.", "Third: naïve text."]
    (tmp_path / "folder").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "folder" / f"{number}.txt").write_text(text)
    lines = "".join(json.dumps({"body": {"text": text}}) + "\n" for text in texts)
    (tmp_path / "lines.jsonl").write_text(lines)
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    write_token_files(tmp_path / "ids", ByteTokenizer(), [list(text.encode()) for text in texts])
    field = ("--field", "body.text")
    found = [
        command("ranks-1", "--source", "text", "--path", tmp_path / "folder"),
        command("ranks-1", "--path", tmp_path / "folder" / "*.txt"),
        command("ranks-1", "--source", "jsonl", "--path", tmp_path / "lines.jsonl", *field),
        command("ranks-1", "--path", tmp_path / "lines.jsonl.gz", *field),
        command("ranks-1", "--source", "tokens", "--path", tmp_path / "ids"),
    ]
    # Every byte but the first of each text, and every end.
    assert {result["tokens"] for result in found} == {sum(len(text.encode()) for text in texts)}
    assert len({result["loss"] for result in found}) == 1
    assert [next(iter(result["sources"])) for result in found] == ["text", "text", "jsonl", "jsonl", "tokens"]


def test_eval_sequence_length(command: Command, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("words and words " * 20)
    each = [command("ranks-1", "--path", tmp_path / "a.txt", "--sequence-length", n) for n in (4, 32, 500)]
    assert len({result["tokens"] for result in each}) == 1 and len({result["loss"] for result in each}) == 3
    some = command("ranks-1", "--path", tmp_path / "a.txt", "--sequence-length", 32, "--sequences", 2)
    assert some["tokens"] == 64


def test_eval_equals_the_model_itself(command: Command, tmp_path: Path, finished: FinishedRuns) -> None:
    (tmp_path / "a.txt").write_text("the rank learns and then waits")
    got = command("ranks-1", "--path", tmp_path / "a.txt", "--sequence-length", 100)
    opened = open_model(finished(1).path, "cpu")
    ids = torch.tensor([[*b"the rank learns and then waits", 256]])
    with torch.no_grad():
        logits = opened.model(ids[:, :-1], torch.arange(ids.shape[1] - 1)[None])
    expected = torch.nn.functional.cross_entropy(logits[0], ids[0, 1:])
    assert got["loss"] == pytest.approx(float(expected), rel=1e-5)
    assert got["bits_per_byte"] == pytest.approx(float(expected) * 30 / 29 / math.log(2), rel=1e-5)


def test_eval_choices(command: Command, tmp_path: Path) -> None:
    good = {"question": "the rank", "choices": ["learns", "xyzzy~~~~"], "answer": "learns"}
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(good) + "\nbroken\n" + json.dumps(good | {"answer": "B"}) + "\n")
    got = command("ranks-1", "--choices", path)
    assert (got["questions"], got["skipped"], got["truncated"]) == (2, {"broken JSON": 1}, 0)
    assert got["accuracy"] == got["accuracy_normalized"] == 0.5
    assert command("ranks-1", "--choices", path, "--sequences", 1)["questions"] == 1
    told = command("ranks-1", "--choices", path, "--max-bad-records", 0, code=2)
    assert "--max-bad-records = 0" in told and "line 2" in told


BAD: dict[str, tuple[tuple[object, ...], str]] = {
    "an unknown kind": (("--source", "csv", "--path", "x"), "--source csv is not known"),
    "a field without a source": (("--field", "x"), "--field describes a source: add --path"),
    "both": (("--choices", "q.jsonl", "--path", "x"), "exclude each other"),
    "no such text": (("--path", "nothing/here.txt"), "nothing/here.txt"),
    "no such questions": (("--choices", "nothing.jsonl"), "nothing.jsonl is not a file"),
    "too long": (("--sequence-length", 100000), "longer than the model's context"),
    "an unknown device": (("--device", "tpu"), "choose cpu or cuda"),
}


@pytest.mark.parametrize("name", BAD)
def test_eval_refuses_mistakes(command: Command, name: str) -> None:
    arguments, sentence = BAD[name]
    assert sentence in command("ranks-1", *arguments, code=2)


def test_eval_refuses_paths_without_a_model(command: Command, tmp_path: Path) -> None:
    assert "not a directory" in command(tmp_path / "nothing", code=2)
    assert "no checkpoint" in command(tmp_path, code=2)


def test_eval_without_held_out_text_is_refused(command: Command, finished: FinishedRuns, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished(1).path, run)
    text = (run / "run.toml").read_text()
    assert "eval_fraction = 0.1" in text and "eval_every = 4" in text
    (run / "run.toml").write_text(text.replace("eval_fraction = 0.1", "eval_fraction = 0").replace("eval_every = 4", ""))
    assert "data.eval_fraction = 0" in command(run, code=2)


def test_eval_of_a_hugging_face_folder(command: Command, finished: FinishedRuns, tmp_path: Path) -> None:
    from phalanx.evaluation.convert import export_checkpoint

    export_checkpoint(finished(1).path, tmp_path / "hf")
    assert "has no held-out text" in command(tmp_path / "hf", code=2)
    (tmp_path / "a.txt").write_text("the rank learns and then waits")
    theirs, ours = (
        command(path, "--path", tmp_path / "a.txt", "--sequence-length", 16) for path in (tmp_path / "hf", "ranks-1")
    )
    assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-6)
    assert theirs["bits_per_byte"] == pytest.approx(ours["bits_per_byte"], rel=1e-6)
