"""The example of docs/python.md, run as it is written, and the names that it lists."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import pytest
from commands import FinishedRuns, Workshop

import phalanx as px

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
EXAMPLE, SWEEP = re.findall(r"```python\n(.*?)```", PAGE, re.S)


def test_the_example_runs_as_written(workshop: Workshop) -> None:
    (workshop.path / "run.toml").write_text(workshop.run_file.read_text())
    ended = workshop.run("-c", EXAMPLE, program=[sys.executable, "-W", "error"])
    assert ended.code == 0, ended
    lines = ended.out.splitlines()
    by_workers, by_hand = lines[:6], lines[-6:]
    assert [line.partition(":")[0] for line in by_workers] == [f"step {number}" for number in range(1, 7)]
    assert by_workers == by_hand, "the two ways to train differ"
    held_out = next(line for line in lines if line.startswith("held-out loss")).rpartition(" ")[2]
    assert f"step 6: loss {held_out}, perplexity" in ended.out, "px.evaluate differs from the evaluation of the run"
    assert "runs/first finished 6" in ended.out
    assert any(line.startswith("the ") for line in lines)
    assert (workshop.path / "first-hf" / "config.json").is_file() and "parameters in first-hf" in ended.out
    assert (workshop.path / "runs/by-hand/checkpoints/step-00000006/commit.json").is_file()


@pytest.mark.slow
def test_the_sweep_runs_as_written(workshop: Workshop) -> None:
    prelude = 'import phalanx as px\nrun = px.load("tiny.toml", ["train.steps=2"])\n'
    ended = workshop.run("-c", prelude + SWEEP, program=[sys.executable, "-W", "error"])
    assert ended.code == 0, ended
    listed = {Path(run.path).name: run for run in px.runs(workshop.path / "runs")}
    assert set(listed) == {"learning_rate=0.0001", "learning_rate=0.0003"}
    best = min(listed, key=lambda name: listed[name].eval_loss or float("inf"))
    assert ended.out.splitlines()[-1] == f"{best} {listed[best].eval_loss}"
    assert ended.out.count(": finished\n") == 2, "the lines of `show`"


def test_the_page_lists_every_verb_and_each_is_documented() -> None:
    listed = set(re.findall(r"`px\.(\w+)", PAGE))
    assert set(px.__all__) - {"__version__"} <= listed, "a public name is not on the page"
    assert set(dir(px)) == set(px.__all__)
    for name in listed & set(px.__all__):
        assert name in (px.__doc__ or ""), f"help(phalanx) does not name {name}"
        assert inspect.getdoc(getattr(px, name)), name


def test_the_page_lists_the_public_names_of_a_trainer() -> None:
    from phalanx.training.trainer import Trainer

    table = PAGE.partition("## Trainer")[2].partition("`dir(trainer)`")[0]
    cells = re.findall(r"^\|([^|]*)\|", table, re.M)
    listed = {name for cell in cells for name in re.findall(r"`(\w+)", cell)}
    assert listed == set(dir(Trainer.__new__(Trainer)))


def test_generate_evaluate_and_export_say_what_the_commands_say(
    finished: FinishedRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop, path = finished(1).workshop, finished(1).path
    monkeypatch.chdir(workshop.path)  # where its text is
    sampling = px.Sampling(temperature=0.7, top_k=5, seed=3)
    written = px.generate(path, "the ", tokens=12, sampling=sampling, device="cpu")
    options = ("--tokens", 12, "--temperature", 0.7, "--top-k", 5, "--seed", 3, "--device", "cpu", "--json")
    told = workshop.run("generate", path, "the ", *options).json
    assert (written.text, len(written.tokens), written.step) == (told["text"], told["tokens"], told["step"])
    assert str(written) == "the " + told["text"] and written.checkpoint == told["checkpoint"]
    evaluation = px.evaluate(path, device="cpu")
    assert evaluation.loss == finished(1).ended.json["eval_loss"] and evaluation.step == 8
    other = px.evaluate(path, paths=[workshop.path / "text" / "0.txt"], sequences=4, device="cpu")
    assert set(other.sources) == {"text"} and 0 < other.total.tokens <= 4 * 32 and other.loss != evaluation.loss
    exported = px.export(path, workshop.path / "hf-by-python", dtype="bf16")
    assert (exported.path / "model.safetensors").is_file() and exported.dtype == "bf16"
