"""A trainer's checkpoints: what goes into one, when it is waited for, which are kept, and how one is found again. The trainer
decides when; `checkpointing` knows how."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from phalanx._version import __version__
from phalanx.checkpointing import disk
from phalanx.checkpointing.load import load
from phalanx.checkpointing.location import Location, at
from phalanx.checkpointing.pieces import Piece
from phalanx.checkpointing.save import Outcome, Saver
from phalanx.data.dataset import Dataset
from phalanx.events.records import CheckpointDamaged, Event, Restored, Saved, SaveFailed
from phalanx.parallel.mesh import Mesh
from phalanx.spec.dump import dump
from phalanx.spec.errors import PhalanxError, RunFailed
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.report import Progress


class Saving:
    """The checkpoints of one run, on one rank."""

    def __init__(self, run: Run, plan: Plan, mesh: Mesh, folder: Path, data: Dataset):
        self._run, self._plan, self._mesh, self._data = run, plan, mesh, data
        self._place: Location = at(run.checkpoint.url or folder)
        self._saver = Saver(self._place, mesh, self._retain)
        self.step: int | None = None
        """Of the newest checkpoint, as all ranks know it."""
        self.failure: str | None = None
        """Why the save that ended last left none, as all ranks know it."""

    def prepare(self, tensors: Mapping[str, Piece]) -> None:
        """The run saves while it trains: memory for that is got ready now."""
        if self._run.checkpoint.every is not None and self._behind(tensors):
            self._saver.prepare(tensors)

    def _behind(self, tensors: Mapping[str, Piece]) -> bool:
        """States in files are too large for a copy in memory: their saves are waited for."""
        return self._run.checkpoint.asynchronous and all(isinstance(one.tensor, Tensor) for one in tensors.values())

    def save(self, progress: Progress, tensors: Mapping[str, Piece], *, wait: bool) -> list[Event]:
        """A checkpoint of this moment; all ranks call it together. Tells what has ended by now, perhaps this save too."""
        saved = self._saver.save(progress.step, tensors, self._contents(progress), wait=wait or not self._behind(tensors))
        return self._heard(saved)

    def _contents(self, progress: Progress) -> dict[str, Any]:
        """The plain part of the state, of which one rank writes the marker. Random numbers are drawn from the seed and the step."""
        if self._mesh.rank:
            return {}
        contents: dict[str, Any] = {
            "progress": asdict(progress),
            "seed": self._run.train.seed,
            "data": self._data.fingerprint,
            "version": __version__,
            "layout": asdict(self._plan.layout),
            "run": dump(self._run),
            "plan": self._plan.to_json(),
        }
        if self._run.optimizer.local_steps > 1:
            contents["replicas"] = self._mesh.size("data")  # each has a state of its own: it is resumed with as many
        return contents

    def ended(self) -> list[Event]:
        """What has ended since this was asked last; rank 0 tells."""
        return [_event(outcome) for outcome in self._saver.ended()] if self._mesh.rank == 0 else []

    def settle(self) -> list[Event]:
        """Wait for the save under way; all ranks call it together."""
        return self._heard(self._saver.settle())

    def _heard(self, outcomes: list[Outcome]) -> list[Event]:
        last = self._saver.last
        if last is not None:
            self.failure = last.failure
            if last.failure is None:
                self.step = last.step
        return [_event(outcome) for outcome in outcomes]

    def _retain(self, saved: Location) -> None:
        disk.prune(self._place, self._run.checkpoint.keep_last, saved, self._run.checkpoint.keep_every)

    def restore(self, tensors: Mapping[str, Piece], path: Path | None) -> tuple[Progress | None, list[Event]]:
        """Fill the tensors from `path`, or from the newest valid checkpoint, all ranks together; None where there is none."""
        events: list[Event] = []
        passed: set[str] = set()
        while True:
            started = time.perf_counter()
            # One rank looks, so that all agree even while files come and go.
            found = (at(path), []) if path else disk.newest(self._place, passed) if self._mesh.rank == 0 else None
            chosen, damaged = self._mesh.share(found)
            if chosen is not None:
                problem, contents = self._load(chosen, tensors)
                if problem is None:
                    progress = Progress(**contents["progress"])
                    self.step = progress.step
                    events += [CheckpointDamaged(path=bad.path, reason=bad.reason) for bad in damaged]
                    seconds = time.perf_counter() - started
                    return progress, [*events, Restored(step=progress.step, path=str(chosen), seconds=seconds)]
                if path is not None:
                    raise problem
                damaged = [*damaged, problem]
            events += [CheckpointDamaged(path=bad.path, reason=bad.reason) for bad in damaged]
            passed |= {bad.path for bad in damaged}
            if chosen is None:
                if passed:
                    raise RunFailed(_none_left(events))
                return None, events

    def _load(self, path: Location, tensors: Mapping[str, Piece]) -> tuple[disk.DamagedCheckpoint | None, dict[str, Any]]:
        """What is wrong with it on any rank; and what was saved beside the tensors."""
        problem: BaseException | None = None
        contents: dict[str, Any] = {}
        try:
            contents = load(path, tensors)
        except PhalanxError as error:
            problem = error
        for found in self._mesh.collect(problem):
            if isinstance(found, disk.DamagedCheckpoint):
                return found, {}
            if found is not None:
                raise found
        return None, contents

    def close(self) -> None:
        self._saver.close()


def _event(outcome: Outcome) -> Event:
    if outcome.failure is not None:
        return SaveFailed(step=outcome.step, path=outcome.path, reason=outcome.failure)
    return Saved(
        step=outcome.step,
        path=outcome.path,
        bytes=outcome.bytes,
        seconds=outcome.seconds,
        stall=outcome.stall,
        write_seconds=outcome.write,
        bytes_per_second=outcome.bytes / max(outcome.write, 1e-9),
    )


def _none_left(damaged: list[Event]) -> str:
    said = "\n".join(f"  {bad.path}: {bad.reason}" for bad in damaged if isinstance(bad, CheckpointDamaged))
    return (
        f"No checkpoint of this run can be loaded:\n{said}\nRestore one of them from a copy; or, to begin again from step 0, start "
        "with --fresh or another --run-dir."
    )
