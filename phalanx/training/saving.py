"""A trainer's checkpoints: what goes into one, when it is waited for, which are kept, and how one is found again. The trainer
decides when; `checkpointing` knows how."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from phalanx._version import __version__
from phalanx.checkpointing import directory
from phalanx.checkpointing.hf_folder import ReferenceLogits
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.replicas.replica_index import MemoryLocation
from phalanx.checkpointing.restore import failure_text, load
from phalanx.checkpointing.save import SaveOutcome, Saver
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.checkpointing.storage import open_location
from phalanx.data.dataset import Dataset
from phalanx.events.records import CheckpointDamaged, Event, Restored, Saved, SaveFailed, Warned
from phalanx.parallel.mesh import Mesh
from phalanx.spec.dump import dump
from phalanx.spec.errors import PhalanxError, RunFailed
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.exporting import Exports
from phalanx.training.memory_copies import Copying
from phalanx.training.step_report import Progress
from phalanx.training.uploading import Uploads

_LONG = 7 * 24 * 3600.0
"""Seconds that ranks wait for the last export and upload: as long as it takes."""


class Saving:
    """The checkpoints of one run, on one rank."""

    def __init__(self, run: Run, plan: Plan, mesh: Mesh, folder: Path, data: Dataset):
        self._run, self._plan, self._mesh, self._data = run, plan, mesh, data
        self._place: Location = open_location(folder if run.checkpoint.local_first else run.checkpoint.url or folder)
        self._uploads = Uploads(run, mesh, self._place)
        self._places = [self._place, *([self._uploads.far] if self._uploads.far is not None else [])]
        self._saver = Saver(self._place, mesh, self._retain)
        self._copying = Copying(run, mesh)
        wanted = run.checkpoint.export_hf and mesh.rank == 0
        self._exports = exports = Exports(folder.parent / "hf") if wanted else None
        if exports is not None:
            self._uploads.exporting = lambda: exports.owned
        self._newest: Location | None = None
        self.step: int | None = None
        """Of the newest checkpoint, as all ranks know it."""
        self.failure: str | None = None
        """Why the save that ended last left none, as all ranks know it."""

    def prepare(self, tensors: Mapping[str, StateTensor]) -> None:
        """The run saves while it trains: memory for that is got ready now."""
        if self._run.checkpoint.every is not None and self._behind(tensors):
            self._saver.prepare(tensors)
        self._copying.prepare(tensors)

    def _behind(self, tensors: Mapping[str, StateTensor]) -> bool:
        """States in files are too large for a copy in memory: their saves are waited for."""
        return self._run.checkpoint.async_save and all(isinstance(one.tensor, Tensor) for one in tensors.values())

    def save(self, progress: Progress, tensors: Mapping[str, StateTensor], *, wait: bool) -> list[Event]:
        """A checkpoint of this moment; all ranks call it together. Tells what has ended by now, perhaps this save too."""
        self._uploads.expect()
        saved = self._saver.save(progress.step, tensors, self._contents(progress), wait=wait or not self._behind(tensors))
        return self._heard(saved)

    def copy(self, progress: Progress, tensors: Callable[[], Mapping[str, StateTensor]]) -> None:
        """A copy in host memory of this moment, if one is due; all ranks call it together."""
        self._copying.take(progress.step, tensors, lambda: self._contents(progress))

    def expect(self, step: int, reference: ReferenceLogits) -> None:
        """What the model says to a fixed prompt as a save of this step begins: an export of it has to say the same."""
        if self._exports is not None:
            self._exports.expect(step, reference)

    def _contents(self, progress: Progress) -> dict[str, Any]:
        return {} if self._mesh.rank else self.contents(progress)

    def contents(self, progress: Progress) -> dict[str, Any]:
        """The plain part of the state, of which one rank writes the marker. Random numbers are drawn from the seed and the step."""
        contents: dict[str, Any] = {
            "progress": asdict(progress),
            "seed": self._run.train.seed,
            "data": self._data.fingerprint,
            "version": __version__,
            "torch": torch.__version__,
            "layout": asdict(self._plan.layout),
            "run": dump(self._run),
            "plan": self._plan.to_json(),
        }
        if self._run.optimizer.sync_every > 1:
            contents["replicas"] = self._mesh.size("data")  # each has a state of its own: it is resumed with as many
        return contents

    def ended(self) -> list[Event]:
        """What has ended since this was asked last; rank 0 tells."""
        ended = _events(self._saver.ended()) if self._mesh.rank == 0 else []
        return [*ended, *self._copying.ended(), *(self._exports.ended() if self._exports else []), *self._uploads.ended()]

    def release(self) -> None:
        """The state is about to change: wait for what still copies it."""
        self._saver.release()
        self._copying.release()

    def settle(self) -> list[Event]:
        """Wait for the save and the copy under way; all ranks call it together."""
        return [*self._copying.settle(), *self._heard(self._saver.settle())]

    def lacks_export(self) -> bool:
        """Whether the run that made the restored checkpoint was gone before it was exported; all ranks ask together."""
        if not self._run.checkpoint.export_hf:
            return False
        newest, exports = self._newest, self._exports
        return bool(self._mesh.broadcast_object(exports is not None and newest is not None and not exports.has(newest.name)))

    def export_restored(self) -> None:
        """After `expect`."""
        if self._exports is not None and self._newest is not None:
            self._exports.saved(self._newest)

    def finish(self) -> list[Event]:
        """Wait until every export and upload has ended, all ranks together, however long it takes; rank 0 tells."""
        if not self._run.checkpoint.export_hf and not self._uploads.wanted:
            return []
        share = self._mesh.slow_broadcast(_LONG)
        ended = self._exports.wait() if self._exports is not None else []
        ended += self._uploads.wait()
        if self._mesh.rank == 0 and self._newest is not None and self._newest.parent == self._place:
            self._prune(self._newest)  # what was held for them
        share(None)
        return ended

    def _heard(self, outcomes: list[SaveOutcome]) -> list[Event]:
        last = self._saver.last
        if last is not None:
            self.failure = last.failure
            if last.failure is None:
                self.step = last.step
        return _events(outcomes)

    def _retain(self, saved: Location) -> None:
        """On rank 0, in the thread that saves, when a checkpoint is complete."""
        self._newest = saved
        if self._exports is not None:
            self._exports.saved(saved)  # first, as then it is held
        self._uploads.saved(saved)
        self._prune(saved)

    def _prune(self, saved: Location) -> None:
        held = self._uploads.held | (self._exports.owned if self._exports is not None else set())
        kept = self._run.checkpoint
        removed = directory.prune(self._place, kept.keep_last, saved, kept.keep_every, held)
        if self._exports is not None:
            self._exports.pruned(removed)

    def restore(self, tensors: Mapping[str, StateTensor], path: Path | Location | None) -> tuple[Progress | None, list[Event]]:
        """Fill the tensors from `path`, or from the newest valid checkpoint, all ranks together; None where there is none."""
        self.release()
        events: list[Event] = []
        passed: set[str] = set()
        if self._mesh.rank == 0 and not path:
            directory.restore_replaced(self._place)
        while True:
            started = time.perf_counter()
            # One rank looks, so that all agree even while files come and go.
            found = (
                (open_location(path), []) if path else directory.newest(self._places, passed) if self._mesh.rank == 0 else None
            )
            chosen, damaged = self._mesh.broadcast_object(found)
            if chosen is not None:
                problem, contents = self._load(chosen, tensors)
                if problem is None:
                    progress = Progress(**contents["progress"])
                    # A copy in memory is no checkpoint: what was restored from one is still to be saved.
                    self.step = None if isinstance(chosen, MemoryLocation) else progress.step
                    self._newest = chosen if path is None else None
                    if self._mesh.rank == 0 and path is None:
                        self._uploads.restored(chosen)
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

    def newest_until(self, step: int, passed: Collection[str]) -> Location | None:
        """The newest checkpoint of this step or before, all ranks together. `passed`: those that turned out to be damaged."""
        found = None
        if self._mesh.rank == 0:
            later = {
                str(path)
                for place in self._places
                for path in directory.list_checkpoints(place)
                if (directory.step_of(path) or 0) > step
            }
            found, _ = directory.newest(self._places, {*later, *passed})
        return cast(Location | None, self._mesh.broadcast_object(found))

    def forget_after(self, step: int) -> None:
        """The run has gone back to `step`, and saved it: no resumption may take later ones for the newest. All ranks together."""
        failure = None
        if self._mesh.rank == 0:
            try:
                removed = [name for place in self._places for name in directory.remove_after(place, step)]
                if self._exports is not None:
                    self._exports.pruned(removed)
            except OSError as error:
                failure = failure_text(error)
        if failure := self._mesh.broadcast_object(failure):
            raise RunFailed(f"The checkpoints after step {step}, to which the run went back, could not be removed: {failure}.")

    def _load(
        self, path: Location, tensors: Mapping[str, StateTensor]
    ) -> tuple[directory.DamagedCheckpoint | None, dict[str, Any]]:
        """What is wrong with it on any rank; and what was saved beside the tensors."""
        problem: BaseException | None = None
        contents: dict[str, Any] = {}
        try:
            contents = load(path, tensors)
        except PhalanxError as error:
            problem = error
        for found in self._mesh.gather_objects(problem):
            if isinstance(found, directory.DamagedCheckpoint):
                return found, {}
            if found is not None:
                raise found
        return None, contents

    def close(self) -> None:
        self._saver.close()
        self._uploads.close()
        self._copying.close()
        if self._exports is not None:
            self._exports.close()


def _events(outcomes: list[SaveOutcome]) -> list[Event]:
    return [event for one in outcomes for event in (*([Warned(message=one.note)] if one.note else []), _event(one))]


def _event(outcome: SaveOutcome) -> Event:
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
        f"No checkpoint of this run can be loaded:\n{said}\nRestore one of them from a copy; or, to begin again from step 0, remove "
        "them, or start in another run directory."
    )
