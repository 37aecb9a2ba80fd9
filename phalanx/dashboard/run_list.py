"""The runs below a folder, from their directories alone: state, progress, loss and speed of each. `phalanx runs`, `phalanx status` and sweeps
read it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from phalanx.dashboard.summary import Summary
from phalanx.events.log import launch_events, read_events
from phalanx.events.records import Event, Finished, Stopped, WorkerFailed, plain
from phalanx.events.rundir import RunDir
from phalanx.spec.errors import RunError
from phalanx.spec.json_value import JsonObject

_DEPTH = 3
"""Levels of folders that are searched for run directories."""
ORDERS = ("when", "name", "loss", "held-out", "speed", "step")
"""What a list of runs can be sorted by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInfo:
    """What is known of a run from its directory."""

    path: str
    state: str
    """"running", "stopped", "finished", "failed", or "interrupted": ended without saying so."""
    reason: str | None = None
    """Why it failed or was stopped."""
    step: int
    """Last step reached."""
    steps: int
    """Steps of the whole run."""
    loss: float | None
    """Of the last step."""
    eval_loss: float | None
    """Held-out loss of the last evaluation."""
    tokens_per_second: float | None
    """Median over the steps of the last launch."""
    time: float
    """When the last record was written, in seconds since 1970."""

    def to_json(self) -> JsonObject:
        """For programs. Numbers that JSON lacks become strings."""
        return {key: plain(value) for key, value in asdict(self).items()}


def run_info(rundir: RunDir) -> RunInfo:
    """What is known of the run in a directory that has records."""
    events = read_events(rundir.events_file)
    summary = Summary(events)
    state, reason = run_state(rundir, launch_events(rundir.events_file))
    return RunInfo(
        path=str(rundir.path),
        state=state,
        reason=reason,
        step=summary.steps,
        steps=summary.planned,
        loss=summary.loss,
        eval_loss=summary.eval_loss,
        tokens_per_second=summary.tokens_per_second,
        time=events[-1].time if events else rundir.events_file.stat().st_mtime,
    )


def run_state(rundir: RunDir, launch: Sequence[Event]) -> tuple[str, str | None]:
    """The state of a run from the records of its last launch, and the reason, if it failed or was stopped."""
    ending = next((event for event in reversed(launch) if isinstance(event, Finished | Stopped | WorkerFailed)), None)
    match ending:
        case WorkerFailed():
            return "failed", ending.reason
        case Stopped():
            return "stopped", ending.reason
        case Finished():
            return "finished", None
        case _:
            return ("running" if rundir.is_running else "interrupted"), None


def list_runs(folder: Path, order: str = "when") -> list[RunInfo]:
    """All runs in a folder and the folders below it, or the one whose directory it is. Raises RunError if there is no such folder.

    Sorted by `order`: newest, lowest loss, highest speed and most steps first, names in their order.
    """
    if order not in ORDERS:
        raise RunError(f"--sort {order}: choose one of {', '.join(ORDERS)}.")
    if not folder.is_dir():
        raise RunError(f"{folder} is not a folder: name one that holds run directories, such as runs.")
    found = [run_info(rundir) for rundir in _run_directories(folder, _DEPTH)]
    found.sort(key=lambda run: run.path)
    match order:
        case "when":
            found.sort(key=lambda run: -run.time)
        case "loss":
            found.sort(key=lambda run: _or_last(run.loss))
        case "held-out":
            found.sort(key=lambda run: _or_last(run.eval_loss))
        case "speed":
            found.sort(key=lambda run: -(run.tokens_per_second or 0.0))
        case "step":
            found.sort(key=lambda run: -run.step)
    return found


def best_loss(run: RunInfo) -> float:
    """What runs are compared by: held-out loss, or training loss without one; infinite if there is none."""
    return _or_last(run.loss if run.eval_loss is None else run.eval_loss)


def _or_last(value: float | None) -> float:
    return math.inf if value is None or math.isnan(value) else value


def _run_directories(folder: Path, depth: int) -> Iterator[RunDir]:
    rundir = RunDir(folder)
    if rundir.events_file.is_file():
        yield rundir
    elif depth:
        for path in sorted(folder.iterdir()):
            if path.is_dir() and not path.is_symlink():
                yield from _run_directories(path, depth - 1)
