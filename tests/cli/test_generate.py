"""`phalanx generate`: text from a run that has been trained for a few steps."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import FinishedRuns, Workshop, escaped

import phalanx as px
from phalanx.cli.main import main

Generate = Callable[..., str]


@pytest.fixture
def generate(finished: FinishedRuns, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Generate:
    """The command in this process, in the folder of a finished run; what it wrote."""
    monkeypatch.chdir(finished(2).workshop.path)

    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["phalanx", "generate", *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            main()
        out, err = capfd.readouterr()
        assert leaving.value.code == 0 and re.fullmatch(r"using step \d+ \(\S+\)\n", err), err
        return out

    return run


def test_generate_command(finished: FinishedRuns) -> None:
    ended = finished(2).workshop.run("generate", "ranks-2", "def ", "--tokens", "20")
    assert (ended.code, ended.err) == (0, "using step 8 (ranks-2/checkpoints/step-00000008)\n"), ended
    assert ended.out.startswith("def ") and ended.out.endswith("\n")
    assert len(ended.out.strip()) > len("def "), "nothing was generated"


def test_generate_json(generate: Generate) -> None:
    plain = generate("ranks-2", "def ", "--tokens", 20, "--seed", 3)
    answer = json.loads(generate("ranks-2", "def ", "--tokens", 20, "--seed", 3, "--json"))
    assert answer["prompt"] == "def " and 1 <= answer["tokens"] <= 20
    assert (answer["step"], answer["damaged"]) == (8, [])
    assert answer["checkpoint"] == "ranks-2/checkpoints/step-00000008"
    assert plain == f"def {escaped(answer['text'])}\n"


def test_the_command_writes_what_px_generate_returns(generate: Generate) -> None:
    """The same tokens; the command shows them as they come."""
    sampling = px.Sampling(temperature=0.9, top_k=40, seed=5)
    returned = px.generate("ranks-2", "a rank", tokens=30, sampling=sampling, device="cpu")
    options = ("ranks-2", "a rank", "--tokens", 30, "--temperature", 0.9, "--top-k", 40, "--seed", 5)
    assert generate(*options) == f"{escaped(str(returned))}\n"
    answer = json.loads(generate(*options, "--json"))
    assert (answer["text"], answer["tokens"]) == (returned.text, len(returned.tokens))


def test_generate_is_reproducible_by_seed(generate: Generate) -> None:
    first = generate("ranks-2", "the ", "--tokens", 40, "--seed", 1)
    assert generate("ranks-2", "the ", "--tokens", 40, "--seed", 1) == first
    assert generate("ranks-2", "the ", "--tokens", 40, "--seed", 2) != first


def test_generate_with_temperature_zero_is_independent_of_the_seed(generate: Generate) -> None:
    first = generate("ranks-2", "the ", "--tokens", 30, "--temperature", 0, "--seed", 1)
    assert generate("ranks-2", "the ", "--tokens", 30, "--temperature", 0, "--seed", 2) == first
    assert generate("ranks-2", "the ", "--tokens", 30, "--top-k", 1, "--seed", 5) == first
    assert generate("ranks-2", "the ", "--tokens", 30, "--top-p", 0, "--seed", 5) == first


def test_generate_from_a_named_checkpoint(generate: Generate) -> None:
    arguments = ("the ", "--tokens", 30, "--temperature", 0, "--json")
    newest, run, older = (
        json.loads(generate(path, *arguments))
        for path in ("ranks-2/checkpoints/step-00000008", "ranks-2", "ranks-2/checkpoints/step-00000004")
    )
    assert newest == run
    assert older["checkpoint"] == "ranks-2/checkpoints/step-00000004"


def test_generate_is_independent_of_the_training_ranks(generate: Generate, finished: FinishedRuns) -> None:
    finished(1)
    one, two = (generate(run, "the ", "--tokens", 30) for run in ("ranks-1", "ranks-2"))
    assert one == two


def test_generate_prompts(generate: Generate) -> None:
    assert json.loads(generate("ranks-2", "--tokens", 5, "--json"))["prompt"] == ""
    assert generate("ranks-2", "naïve → 日本", "--tokens", 5).startswith("naïve → 日本")
    assert generate("ranks-2", "raw \udcff byte", "--tokens", 5).startswith("raw \ufffd byte")


def test_generate_number_of_tokens(generate: Generate) -> None:
    few, many = (json.loads(generate("ranks-2", "the", "--tokens", n, "--json", "--seed", 4)) for n in (3, 12))
    assert few["tokens"] == 3 and many["tokens"] <= 12
    assert len(few["text"].encode()) <= len(many["text"].encode())


def test_generate_tokens_that_are_not_utf8(workshop: Workshop, generate: Generate) -> None:
    """A vocabulary padded beyond the tokenizer's: its extra tokens are drawn, early in training, but stand for nothing."""
    workshop.train("model.vocab=2048", "train.steps=1", "--run-dir", "padded")
    run = workshop.path / "padded"
    plain = generate(run, "x", "--tokens", 60, "--temperature", 3)
    answer = json.loads(generate(run, "x", "--tokens", 60, "--temperature", 3, "--json"))
    assert answer["tokens"] > len(answer["text"]), "no token beyond the bytes was drawn, so nothing was shown"
    assert plain.startswith("x")


def test_generate_refuses_a_changed_run_file(
    finished: FinishedRuns, workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(finished(2).path, workshop.path / "run")
    file = workshop.path / "run" / "run.toml"
    text = file.read_text()
    monkeypatch.chdir(workshop.path)
    monkeypatch.setattr(sys, "argv", ["phalanx", "generate", "run"])
    for old, new in (("dim = 32", "dim = 64"), ("layers = 1", "layers = 2")):
        assert old in text
        Path(file).write_text(text.replace(old, new))
        with pytest.raises(SystemExit) as leaving:
            main()
        _, err = capfd.readouterr()
        assert leaving.value.code == 2
        assert "Traceback" not in err and "step-00000008" in err and "run/run.toml" in err
