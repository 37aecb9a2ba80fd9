"""`phalanx train --sweep`, `phalanx runs` and `phalanx lr-find`, as commands."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from commands import InProcess, Workshop

from phalanx.events.log import read_events
from phalanx.events.records import Evaluated, Restored, RunStarted

SHORT = ("train.steps=2", "train.eval_every=2", "data.cache=cache")


def test_a_sweep_trains_all_ranks_them_and_survives_a_failing_one(workshop: Workshop) -> None:
    grid = ("--sweep", 'data.paths=["missing"],["text"]', "--sweep", "optimizer.learning_rate=1e-6,1e-2")
    command = ("train", "tiny.toml", *SHORT, *grid, "--json")
    ended = workshop.run(*command)
    assert ended.code == 1, ended
    result = ended.json
    folder = workshop.path / result["folder"]
    assert folder == workshop.path / "runs" / "tiny-sweep"
    assert [run["state"] for run in result["runs"]] == ["finished", "finished", "refused", "refused"]
    assert all("missing" in run["error"] for run in result["runs"][2:])
    # The order is that of the held-out losses in the records of each run.
    losses = {}
    for run in result["runs"][:2]:
        (evaluated,) = [e for e in read_events(workshop.path / run["run_dir"] / "events.jsonl") if isinstance(e, Evaluated)]
        assert run["eval_loss"] == evaluated.loss and run["step"] == 2
        losses[run["values"]["optimizer.learning_rate"]] = evaluated.loss
    assert losses["1e-2"] < losses["1e-6"] and result["best"] == result["runs"][0]["name"]
    assert result["runs"][0]["values"] == {"data.paths": '["text"]', "optimizer.learning_rate": "1e-2"}
    # The same command repeats nothing that is finished.
    (folder.parent.parent / "missing").symlink_to("text")
    again = workshop.run("train", "tiny.toml", *SHORT, "--sweep", 'data.paths=["text"]', *grid[2:], "--json")
    assert again.code == 0 and again.shown.count("finished before") == 2, again
    assert [run["eval_loss"] for run in again.json["runs"]] == sorted(losses.values())
    for run in again.json["runs"]:
        events = read_events(workshop.path / run["run_dir"] / "events.jsonl")
        assert len([event for event in events if isinstance(event, RunStarted)]) == 1

    listed = workshop.run("runs", "--sort", "held-out", "--json")
    assert [run["path"] for run in listed.json["runs"]] == [run["run_dir"] for run in again.json["runs"]]
    assert {run["state"] for run in listed.json["runs"]} == {"finished"}
    assert "2/2" in listed.shown and "finished" in listed.shown


@pytest.mark.slow
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="two runs side by side need two cores")
def test_a_stopped_sweep_saves_and_the_same_command_resumes_it(workshop: Workshop) -> None:
    command = ("train", "tiny.toml", "--sweep", "train.seed=1,2,3", "--parallel", "2", "--run-dir", "grid", "--json")
    started = workshop.start(*command, "train.steps=5000")
    for seed in (1, 2):
        started.until(workshop.reached(f"grid/seed={seed}", 3), f"step 3 of seed {seed}")
    started.process.send_signal(signal.SIGINT)
    ended = started.wait()
    assert ended.code == 75 and "run the same command again" in ended.shown, ended
    states = {run["name"]: run["state"] for run in ended.json["runs"]}
    assert states == {"seed=1": "stopped", "seed=2": "stopped", "seed=3": "not started"}
    reached = {run["name"]: run["step"] for run in ended.json["runs"] if run["state"] == "stopped"}
    listed = workshop.run("runs", "grid", "--json").json["runs"]
    assert {Path(run["path"]).name: (run["state"], run["step"]) for run in listed} == {
        name: ("stopped", step) for name, step in reached.items()
    }
    steps = max(reached.values()) + 2
    again = workshop.run(*command[:3], "train.seed=1,2", *command[4:], f"train.steps={steps}")
    assert again.code == 0 and {run["state"] for run in again.json["runs"]} == {"finished"}, again
    for name, step in reached.items():
        assert [event.step for event in workshop.events(f"grid/{name}") if isinstance(event, Restored)] == [step]


def test_options_that_a_sweep_cannot_have(workshop: Workshop, here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop.path)
    for option, named in (
        (("--fresh",), "--fresh"),
        (("--change",), "--change"),
        (("--chaos", "kill rank=0 step=1"), "--chaos"),
        (("--on", "ssh"), "--on"),
    ):
        refused = here("train", "tiny.toml", "--sweep", "train.seed=1,2", *option)
        assert refused.code == 2 and named in refused.err, refused
    refused = here("train", "tiny.toml", "--parallel", "2")
    assert refused.code == 2 and "--sweep" in refused.err
    refused = here("train", "tiny.toml", "--sweep", "train.seed=1,2", "--parallel", "5000")
    assert refused.code == 2 and "--parallel 5000: this machine has" in refused.err
    refused = here("train", "tiny.toml", "--sweep", "train.sed=1,2")
    assert refused.code == 2 and "train.sed" in refused.err
    assert not Path("runs").exists(), "nothing was started"


def test_a_learning_rate_is_found(workshop: Workshop, here: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop.path)
    before = {path.name for path in workshop.path.iterdir()}
    found = here("lr-find", "tiny.toml", "data.cache=cache", "--steps", "40", "--low", "1e-5", "--high", "10", "--json")
    assert found.code == 0, found
    result = found.json
    assert 1e-5 < result["suggestion"] < result["lowest"] <= 10 and f"{result['suggestion']:.1e}" in found.shown
    assert {path.name for path in workshop.path.iterdir()} - before <= {"tiny-lr-find.png", "tiny-lr-find.json", "cache"}
    assert Path("tiny-lr-find.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(Path("tiny-lr-find.json").read_text())["rates"] == result["rates"]
    refused = here("lr-find", "tiny.toml", "--low", "1", "--high", "0.1")
    assert refused.code == 2 and "low = 1, high = 0.1" in refused.err
    refused = here("lr-find", "tiny.toml", "--out", "nowhere/x")
    assert refused.code == 2 and "there is no folder nowhere" in refused.err
