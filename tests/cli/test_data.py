"""`phalanx data`: what a step will see is what it saw, and what a source holds is told in full. Without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import FinishedRuns, StepLosses
from corpora import write_token_files

from phalanx.cli.main import main
from phalanx.data.tokenizer import ByteTokenizer

Command = Callable[..., tuple[dict[str, Any], str]]
MIXED = """\
[model]
dim = 32
layers = 1
heads = 2

[data]
packing = "best-fit"
eval_fraction = 0
cache = "cache"

[data.mix.lines]
paths = ["lines.jsonl"]
weight = 3

[data.mix.ids]
paths = ["ids"]
weight = 1

[train]
batch = 8
sequence_length = 64
steps = 30
"""


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command in this process, in a folder of its own; its object and what it printed, or what it complains about."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*arguments: object, code: int = 0) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr(sys, "argv", ["phalanx", "data", *map(str, arguments), "--json"])
        with pytest.raises(SystemExit) as leaving:
            main()
        out, err = capfd.readouterr()
        assert leaving.value.code == code, out + err
        assert "Traceback" not in err
        if code:
            return {}, err
        return json.loads(out), err

    return run


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A run of two sources, one of which has masks and duplicates."""
    lines = [json.dumps({"text": f"record {i} says " + "something " * (i % 7)}) for i in range(200)]
    (tmp_path / "lines.jsonl").write_text("\n".join([*lines, "broken"]))
    question, answer = list(b"ask: "), list(b"say [it]")
    mask = [False] * len(question) + [True] * len(answer)
    write_token_files(tmp_path / "ids", ByteTokenizer(), [question + answer] * 40, [mask] * 40)
    (tmp_path / "run.toml").write_text(MIXED)
    return tmp_path / "run.toml"


def test_data_preview_equals_what_training_read(
    command: Command, finished: FinishedRuns, losses: StepLosses, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = finished(1)
    monkeypatch.chdir(done.workshop.path)
    for step, _, digest in losses(done.workshop.events("ranks-1")):
        if step not in (1, 2, 8):
            continue
        found, _ = command("preview", "ranks-1/run.toml", "--step", step, "--samples", 100)
        assert (found["step"], found["batch"], found["batch_digest"]) == (step, 8, digest)
        assert [sample["sample"] for sample in found["samples"]] == list(range((step - 1) * 8, step * 8))
        for sample in found["samples"]:
            assert all(len(sample[name]) == 32 for name in ("tokens", "targets", "positions", "documents"))


def test_preview_of_a_mixture(command: Command, mixed: Path) -> None:
    found, printed = command("preview", mixed, "--step", 2, "--samples", 8)
    samples = found["samples"]
    assert sorted(sample["source"] for sample in samples) == ["ids"] * 2 + ["lines"] * 6
    assert f"batch digest {found['batch_digest']}" in printed
    for sample in samples:
        assert (
            f"sample {sample['sample']} · {sample['source']} · epoch {sample['epoch']} · window {sample['window']}" in printed
        )
        assert sample["trained"] == sum(target >= 0 for target in sample["targets"])
        assert sample["trained"] + sample["masked"] + sample["padding"] == 64
        for piece in sample["pieces"]:
            assert f"document {piece['document']} · tokens {piece['start']}–{piece['stop']}" in printed
    assert "⟦ask: ⟧say [it]<end>" in printed, "what is only read stands in brackets; text is no markup"
    assert "tokens of padding" in printed


def test_preview_takes_overrides_and_limits(command: Command, mixed: Path) -> None:
    some, printed = command("preview", mixed, "train.batch=4", "train.seed=5", "--samples", 1, "--width", 10)
    assert (some["step"], some["batch"], len(some["samples"])) == (1, 4, 1)
    assert "3 more in this batch" in printed and " …" in printed
    whole, _ = command("preview", mixed, "train.batch=4", "train.seed=5", "--samples", 4)
    other, _ = command("preview", mixed, "train.batch=4", "--samples", 4)
    assert whole["batch_digest"] == some["batch_digest"] != other["batch_digest"]


def test_data_preview_refuses_steps_beyond_the_end(command: Command, mixed: Path) -> None:
    assert "--step 31 is beyond the end" in command("preview", mixed, "--step", 31, code=2)[1]
    limits = ("data.mix.lines.epochs=1", "data.mix.ids.epochs=1")
    assert "within their epochs" in command("preview", mixed, *limits, "--step", 30, code=2)[1]


def test_inspect_a_run_file(command: Command, mixed: Path) -> None:
    found, printed = command("inspect", mixed)
    lines, ids = found["sources"]["lines"], found["sources"]["ids"]
    assert (lines["documents"], lines["skipped"], lines["duplicates"]) == (200, {"broken JSON": 1}, 0)
    assert (ids["documents"], ids["duplicates"], ids["duplicate_share"]) == (40, 39, 39 / 40)
    assert ids["masked_tokens"] == 40 * 5 and ids["lengths"]["max"] == ids["lengths"]["min"] == 13
    assert 0 < ids["padding"] < 1 and ids["sequence_length"] == 64
    assert (ids["dtype"], ids["vocab"], ids["end"], ids["tokenizer"]) == ("uint16", 257, 256, "byte")
    assert "skipped 1 records: broken JSON" in printed and "exact duplicates: 39 documents (97.5%)" in printed
    assert "ask: say [it]" in printed


def test_inspect_token_files_and_texts(command: Command, mixed: Path) -> None:
    ids, _ = command("inspect", "ids", "--sequence-length", 32)
    assert ids["sources"]["tokens"]["documents"] == 40 and ids["sources"]["tokens"]["padding"] > 0
    assert ids["sources"]["tokens"]["sample"][0]["text"] == "ask: say [it]"
    lines, _ = command("inspect", "lines.jsonl", "--samples", 2, "--width", 6)
    assert lines["sources"]["jsonl"]["documents"] == 200
    assert [sample["text"] for sample in lines["sources"]["jsonl"]["sample"]] == ["record", "record"]
    raw, _ = command("inspect", "lines.jsonl", "--source", "text")
    assert raw["sources"]["text"]["documents"] == 1


def test_inspect_token_files_of_a_tokenizer_that_is_gone(command: Command, tmp_path: Path) -> None:
    class Gone(ByteTokenizer):
        name, sha256 = "gone/tokenizer.json", "0"

    write_token_files(tmp_path / "ids", Gone(), [[7, 8, 9]])
    found, printed = command("inspect", "ids")
    assert found["sources"]["tokens"]["bytes"] is None and found["sources"]["tokens"]["tokenizer"] == "gone/tokenizer.json"
    assert "7 8 9 256" in printed


BAD = {
    "no such text": (("inspect", "nothing"), "nothing"),
    "no such run file": (("inspect", "nothing.toml"), "nothing.toml"),
    "an unknown kind": (("inspect", "lines.jsonl", "--source", "csv"), "--source csv is not known"),
    "a run file says it itself": (("inspect", "run.toml", "--field", "x"), "--field: run.toml is a run file"),
    "a field that is missing": (("inspect", "lines.jsonl", "--field", "body"), "body"),
    "too many bad records": (("inspect", "lines.jsonl", "--max-bad-records", 0), "line 201"),
    "no such tokenizer": (("inspect", "lines.jsonl", "--tokenizer", "nothing.json"), "nothing.json"),
}


@pytest.mark.parametrize("name", BAD)
def test_data_verbs_refuse_mistakes(command: Command, mixed: Path, name: str) -> None:
    arguments, sentence = BAD[name]
    assert sentence in command(*arguments, code=2)[1]


def test_data_verbs_do_not_import_torch(mixed: Path) -> None:
    code = (
        "import sys\nfrom phalanx.cli.data_cmd import app\n"
        "app(['preview', 'run.toml', '--step', '2'], standalone_mode=False)\n"
        "app(['inspect', 'run.toml'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=mixed.parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
