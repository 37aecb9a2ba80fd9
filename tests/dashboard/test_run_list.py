"""The list of the runs in a folder, from their directories."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from phalanx.dashboard.run_list import list_runs
from phalanx.events.records import Evaluated, Event, Finished, RunStarted, Step, Stopped, WorkerFailed, encode
from phalanx.events.rundir import RunDir
from phalanx.spec.errors import RunError


def started(steps: int) -> RunStarted:
    return RunStarted(
        version="1",
        ranks=1,
        device="cpu",
        steps=steps,
        parameters=1,
        micro_batch=1,
        accumulation=1,
        layout={},
        compute="fp32",
        time=1.0,
    )


def step(number: int, loss: float, speed: float, time: float) -> Step:
    return Step(
        step=number,
        loss=loss,
        tokens=1,
        samples=number,
        batch_digest="",
        learning_rate=1e-3,
        grad_norm=1.0,
        seconds=1.0,
        tokens_per_second=speed,
        flops_per_second=1.0,
        mfu=None,
        memory=1,
        time=time,
    )


def write(path: Path, *events: Event) -> RunDir:
    rundir = RunDir(path)
    rundir.create()
    rundir.events_file.write_text("".join(f"{encode(event)}\n" for event in events))
    return rundir


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(
        tmp_path / "done",
        started(2),
        step(2, 3.0, 10.0, 5.0),
        Evaluated(step=2, loss=3.5, tokens=1, seconds=1.0),
        Finished(step=2, time=6.0),
    )
    write(tmp_path / "halted", started(9), step(3, 2.0, 30.0, 7.0), Stopped(step=3, reason="SIGTERM", time=8.0))
    write(
        tmp_path / "grid" / "broken", started(9), step(1, math.nan, 20.0, 2.0), WorkerFailed(rank=0, reason="no luck", time=3.0)
    )
    write(tmp_path / "cut", started(9), step(1, 4.0, 5.0, 4.0))
    (tmp_path / "not a run").mkdir()
    return tmp_path


def names(folder: Path, order: str) -> list[str]:
    return [Path(run.path).name for run in list_runs(folder, order)]


def test_states_numbers_and_times(folder: Path) -> None:
    found = {Path(run.path).name: run for run in list_runs(folder)}
    assert {name: run.state for name, run in found.items()} == {
        "done": "finished",
        "halted": "stopped",
        "broken": "failed",
        "cut": "interrupted",
    }
    done = found["done"]
    assert (done.step, done.steps, done.loss, done.eval_loss, done.tokens_per_second, done.time) == (2, 2, 3.0, 3.5, 10.0, 6.0)
    assert (found["broken"].reason, found["halted"].reason, found["halted"].eval_loss) == ("no luck", "SIGTERM", None)
    assert found["broken"].to_json()["loss"] == "nan"


def test_orders(folder: Path) -> None:
    assert names(folder, "when") == ["halted", "done", "cut", "broken"]
    assert names(folder, "name") == ["cut", "done", "broken", "halted"]  # by path
    assert names(folder, "loss") == ["halted", "done", "cut", "broken"]
    assert names(folder, "held-out")[0] == "done"
    assert names(folder, "speed") == ["halted", "broken", "done", "cut"]
    assert names(folder, "step")[:2] == ["halted", "done"]
    with pytest.raises(RunError, match="--sort age: choose one of when"):
        list_runs(folder, "age")


def test_a_locked_directory_is_running_and_looking_does_not_disturb(folder: Path) -> None:
    rundir = RunDir(folder / "cut")
    assert rundir.acquire()
    assert {run.state for run in list_runs(folder / "cut")} == {"running"}
    rundir.release()
    assert {run.state for run in list_runs(folder / "cut")} == {"interrupted"}
    assert rundir.acquire(), "the look has left a lock"
    rundir.release()


def test_no_folder_and_no_runs(folder: Path) -> None:
    assert list_runs(folder / "not a run") == []
    with pytest.raises(RunError, match="nowhere is not a folder"):
        list_runs(folder / "nowhere")
