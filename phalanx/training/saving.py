"""The checkpoints of a run on one rank: what a checkpoint contains, which are kept, copied in memory, uploaded and exported, and which one
is restored. The trainer decides when to save; `checkpointing` writes and reads."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from phalanx import accelerator
from phalanx._version import __version__
from phalanx.checkpointing import directory
from phalanx.checkpointing.directory import DamagedCheckpoint
from phalanx.checkpointing.format import Marker, RunMetadata, SavedProgress
from phalanx.checkpointing.hf_folder import ReferenceLogits
from phalanx.checkpointing.location import Location, open_location
from phalanx.checkpointing.replicas.memory_checkpoint import CopyOutcome, MemoryCopies
from phalanx.checkpointing.replicas.replica_index import MemoryLocation
from phalanx.checkpointing.restore import load
from phalanx.checkpointing.save import SaveOutcome, Saver, failure_text
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.checkpointing.upload import Uploader, UploadOutcome
from phalanx.data.dataset import Dataset
from phalanx.events.records import (
    CheckpointDamaged,
    Copied,
    Event,
    Restored,
    Saved,
    SaveFailed,
    Uploaded,
    UploadFailed,
    Warned,
)
from phalanx.parallel.mesh import Mesh
from phalanx.spec.dump import dump
from phalanx.spec.errors import PhalanxError, RunFailed
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.exports import Exports
from phalanx.training.hooks import StepContext, StepHook
from phalanx.training.run_progress import Progress

_EXPORT_TIMEOUT = 7 * 24 * 3600.0
"""Seconds that ranks wait for the last export and upload: as long as it takes."""
_DEFAULT_COPY_SHARE = 0.005
"""Share of training time that in-memory copies of a GPU's state may take, if the run file does not ask for them."""

Tensors = Mapping[str, StateTensor]


class Checkpointer(StepHook):
    """Saves and restores the state of one rank."""

    def __init__(self, run: Run, plan: Plan, mesh: Mesh, folder: Path, data: Dataset):
        self._run, self._plan, self._mesh, self._data = run, plan, mesh, data
        self._location: Location = open_location(folder if run.checkpoint.local_first else run.checkpoint.url or folder)
        exports_here = run.checkpoint.export_hf and mesh.rank == 0
        self._exports = Exports(folder.parent / "hf") if exports_here else None
        self._uploads = _Uploads(run, mesh, self._location, self._exports)
        self._locations = [self._location, *([self._uploads.remote] if self._uploads.remote is not None else [])]
        self._saver = Saver(self._location, mesh, self._on_saved)
        self._copies = _MemoryCopies(run, mesh)
        self._newest: Location | None = None
        self.step: int | None = None
        """Step of the newest checkpoint, the same on all ranks."""

    def prepare(self, tensors: Tensors) -> None:
        """Allocates the memory that background saves and copies need."""
        if self._run.checkpoint.every is not None and self._saves_in_background(tensors):
            self._saver.prepare(tensors)
        self._copies.prepare(tensors)

    def _saves_in_background(self, tensors: Tensors) -> bool:
        """States in files are too large for a copy in memory: training waits for their saves."""
        return self._run.checkpoint.async_save and all(isinstance(state.tensor, Tensor) for state in tensors.values())

    def save(self, progress: Progress, tensors: Tensors, *, wait: bool) -> list[Event]:
        """Saves the present state; all ranks call it together. Returns the events of saves that have ended, perhaps of this one too."""
        self._uploads.before_save()
        wait = wait or not self._saves_in_background(tensors)
        return self._record(self._saver.save(progress.step, tensors, self._metadata_on_rank_0(progress), wait=wait))

    def copy(self, progress: Progress, tensors: Callable[[], Tensors]) -> None:
        """Copies the present state to host memory, if a copy is due; all ranks call it together."""
        self._copies.take(progress.step, tensors, lambda: self._metadata_on_rank_0(progress))

    def expect(self, step: int, reference: ReferenceLogits) -> None:
        """Sets the logits that an export of the next save must reproduce."""
        if self._exports is not None:
            self._exports.expect(step, reference)

    def _metadata_on_rank_0(self, progress: Progress) -> RunMetadata:
        return RunMetadata() if self._mesh.rank else self.metadata(progress)

    def metadata(self, progress: Progress) -> RunMetadata:
        """The part of the state that is not tensors; rank 0 writes it. Random numbers follow from the seed and the step."""
        own_states = self._run.optimizer.sync_every > 1  # each replica has its own state, so a resumed run needs as many
        return RunMetadata(
            progress=cast(SavedProgress, asdict(progress)),
            seed=self._run.train.seed,
            data=self._data.fingerprint,
            version=__version__,
            torch=torch.__version__,
            layout=asdict(self._plan.layout),
            run=dump(self._run),
            plan=self._plan.to_json(),
            replicas=self._mesh.size("data") if own_states else None,
        )

    def ended(self) -> list[Event]:
        """Events of saves, copies, exports and uploads that have ended since the last call, on rank 0."""
        saved = _save_events(self._saver.ended()) if self._mesh.rank == 0 else []
        exported = self._exports.ended() if self._exports is not None else []
        return [*saved, *self._copies.ended(), *exported, *self._uploads.ended()]

    def before_update(self, context: StepContext) -> None:
        self.release()

    def release(self) -> None:
        """Waits for saves and copies that still read the live state, which is about to change."""
        self._saver.release()
        self._copies.release()

    def settle(self) -> list[Event]:
        """Waits for the save and the copy in progress; all ranks call it together."""
        return [*self._copies.settle(), *self._record(self._saver.settle())]

    def lacks_export(self) -> bool:
        """Whether the restored checkpoint was not exported by the run that saved it; all ranks call it together."""
        if not self._run.checkpoint.export_hf:
            return False
        newest, exports = self._newest, self._exports
        return bool(self._mesh.broadcast_object(exports is not None and newest is not None and not exports.has(newest.name)))

    def export_restored(self) -> None:
        """Exports the restored checkpoint; call `expect` before."""
        if self._exports is not None and self._newest is not None:
            self._exports.on_saved(self._newest)

    def finish(self) -> list[Event]:
        """Waits for all exports and uploads, on all ranks together."""
        if not self._run.checkpoint.export_hf and not self._uploads.enabled:
            return []
        broadcast = self._mesh.slow_broadcast(_EXPORT_TIMEOUT)
        ended = self._exports.wait() if self._exports is not None else []
        ended += self._uploads.wait()
        if self._mesh.rank == 0 and self._newest is not None and self._newest.parent == self._location:
            self._prune(self._newest)  # checkpoints that exports and uploads needed until now
        broadcast(None)
        return ended

    def _record(self, outcomes: list[SaveOutcome]) -> list[Event]:
        last = self._saver.last
        if last is not None and last.failure is None:
            self.step = last.step
        return _save_events(outcomes)

    def _on_saved(self, checkpoint: Location) -> None:
        """Called on rank 0, in the saver's thread, when a checkpoint is complete."""
        self._newest = checkpoint
        if self._exports is not None:
            self._exports.on_saved(checkpoint)  # before pruning: exports protect their checkpoints
        self._uploads.on_saved(checkpoint)
        self._prune(checkpoint)

    def _prune(self, newest: Location) -> None:
        protected = self._uploads.protected | (self._exports.protected if self._exports is not None else set())
        spec = self._run.checkpoint
        removed = directory.prune(self._location, spec.keep_last, newest, spec.keep_every, protected)
        if self._exports is not None:
            self._exports.on_pruned(removed)

    def restore(self, tensors: Tensors, path: Path | Location | None) -> tuple[Progress | None, list[Event]]:
        """Restores `path`, or the newest valid checkpoint, on all ranks together; None if there is none."""
        self.release()
        events: list[Event] = []
        damaged_paths: set[str] = set()
        if self._mesh.rank == 0 and not path:
            directory.restore_replaced(self._location)
        while True:
            started = time.perf_counter()
            chosen, damaged = self._choose(path, damaged_paths)
            problem, marker = self._load(chosen, tensors) if chosen is not None else (None, None)
            if problem is not None:
                if path is not None:
                    raise problem
                damaged = [*damaged, problem]
            events += [CheckpointDamaged(path=bad.path, reason=bad.reason) for bad in damaged]
            if chosen is not None and marker is not None:
                progress = Progress(**marker.run.progress)
                # An in-memory copy is no checkpoint: a state restored from one must still be saved.
                self.step = None if isinstance(chosen, MemoryLocation) else progress.step
                self._newest = chosen if path is None else None
                if self._mesh.rank == 0 and path is None:
                    self._uploads.on_restored(chosen)
                seconds = time.perf_counter() - started
                return progress, [*events, Restored(step=progress.step, path=str(chosen), seconds=seconds)]
            damaged_paths |= {bad.path for bad in damaged}
            if chosen is None:
                if damaged_paths:
                    raise RunFailed(_all_damaged(events))
                return None, events

    def _choose(self, path: Path | Location | None, damaged: set[str]) -> tuple[Location | None, list[DamagedCheckpoint]]:
        """Rank 0 chooses for all ranks, so that they agree while files come and go."""
        if path:
            found: Any = (open_location(path), [])
        else:
            found = directory.newest(self._locations, damaged) if self._mesh.rank == 0 else None
        return cast(tuple[Location | None, list[DamagedCheckpoint]], self._mesh.broadcast_object(found))

    def newest_until(self, step: int, damaged: set[str]) -> Location | None:
        """The newest checkpoint of this step or an earlier one, except the damaged ones; all ranks call it together."""
        found = None
        if self._mesh.rank == 0:
            checkpoints = [path for location in self._locations for path in directory.list_checkpoints(location)]
            later = {str(path) for path in checkpoints if (directory.step_of(path) or 0) > step}
            found, _ = directory.newest(self._locations, {*later, *damaged})
        return cast(Location | None, self._mesh.broadcast_object(found))

    def remove_after(self, step: int) -> None:
        """Removes checkpoints of later steps after a rollback to `step`; all ranks call it together."""
        failure = None
        if self._mesh.rank == 0:
            try:
                removed = [name for location in self._locations for name in directory.remove_after(location, step)]
                if self._exports is not None:
                    self._exports.on_pruned(removed)
            except OSError as error:
                failure = failure_text(error)
        if failure := self._mesh.broadcast_object(failure):
            raise RunFailed(f"The checkpoints after step {step}, to which the run went back, could not be removed: {failure}.")

    def _load(self, path: Location, tensors: Tensors) -> tuple[DamagedCheckpoint | None, Marker | None]:
        """Returns how the checkpoint is damaged on any rank, and its marker. Raises other problems on all ranks."""
        problem: BaseException | None = None
        marker: Marker | None = None
        try:
            marker = load(path, tensors)
        except PhalanxError as error:
            problem = error
        for of_rank in self._mesh.gather_objects(problem):
            if isinstance(of_rank, DamagedCheckpoint):
                return of_rank, None
            if of_rank is not None:
                raise of_rank
        return None, marker

    def close(self) -> None:
        self._saver.close()
        self._uploads.close()
        self._copies.close()
        if self._exports is not None:
            self._exports.close()


class _MemoryCopies:
    """In-memory copies of one rank's state, if the run file asks for them and the launcher has started a replica server."""

    def __init__(self, run: Run, mesh: Mesh):
        self._every, folder = run.checkpoint.memory_every or mesh.place.copy_every, mesh.place.replica_folder
        self._copies: MemoryCopies | None = None
        if self._every is not None and folder is not None:
            is_default, on_gpu = run.checkpoint.memory_every is None, accelerator.of(mesh.device).asynchronous
            # Default copies protect state that no other rank holds: on CPUs they are taken after every step, at any cost.
            patient = is_default and not on_gpu
            self._copies = MemoryCopies(mesh, Path(folder), mesh.place.generation, patient=patient)
            if is_default and on_gpu:
                self._copies.pace = _DEFAULT_COPY_SHARE
        self._rank = mesh.rank
        self._warned: set[str] = set()

    def prepare(self, tensors: Tensors) -> None:
        if self._copies is not None:
            self._copies.prepare(tensors)

    def take(self, step: int, tensors: Callable[[], Tensors], metadata: Callable[[], RunMetadata]) -> None:
        if self._copies is not None and self._every is not None and step % self._every == 0:
            self._copies.take(step, tensors(), metadata())

    def release(self) -> None:
        if self._copies is not None:
            self._copies.release()

    def ended(self) -> list[Event]:
        return self._events(self._copies.ended()) if self._copies is not None and self._rank == 0 else []

    def settle(self) -> list[Event]:
        return self._events(self._copies.settle()) if self._copies is not None else []

    def _events(self, outcomes: list[CopyOutcome]) -> list[Event]:
        events: list[Event] = []
        for copy in outcomes:
            if copy.failure is not None:
                events += self._warn_once("There is no copy in memory of step {}: {}.", copy.step, copy.failure)
                continue
            if copy.problem is not None:
                events += self._warn_once(
                    "The copy in memory of step {} is not whole on a second node: {}.", copy.step, copy.problem
                )
            events.append(
                Copied(
                    step=copy.step,
                    bytes=copy.bytes,
                    seconds=copy.seconds,
                    stall=copy.stall,
                    peer=copy.peer,
                    skipped=copy.skipped,
                )
            )
        return events

    def _warn_once(self, sentence: str, step: int, reason: str) -> list[Event]:
        """Warns once for each reason: copies are taken every few steps."""
        if reason in self._warned:
            return []
        self._warned.add(reason)
        return [Warned(message=sentence.format(step, reason))]

    def close(self) -> None:
        if self._copies is not None:
            self._copies.close()


class _Uploads:
    """Uploads of checkpoints that were saved in the run directory first (`checkpoint.local_first`); does nothing otherwise."""

    def __init__(self, run: Run, mesh: Mesh, local: Location, exports: Exports | None):
        self._spec, self._mesh, self._local, self._exports = run.checkpoint, mesh, local, exports
        self._to_prune: Location | None = None
        self.remote: Location | None = None
        self._uploader: Uploader | None = None
        if run.checkpoint.local_first and run.checkpoint.url is not None:
            self.remote = open_location(run.checkpoint.url)
            self._uploader = Uploader(local, self.remote, mesh, self._prune)

    @property
    def enabled(self) -> bool:
        return self._uploader is not None

    @property
    def protected(self) -> set[str]:
        """Names of checkpoints in the run directory that uploads still need."""
        return self._uploader.in_use if self._uploader is not None else set()

    def before_save(self) -> None:
        if self._uploader is not None:
            self._uploader.expect()

    def on_saved(self, checkpoint: Location) -> None:
        """Uploads a checkpoint that is complete in the run directory. Rank 0 calls it."""
        step = directory.step_of(checkpoint)
        if self._uploader is not None and step is not None:
            self._uploader.saved(step)

    def on_restored(self, checkpoint: Location) -> None:
        """Uploads the restored checkpoint if the run that saved it ended before it was uploaded. Rank 0 calls it."""
        if self.remote is None or checkpoint.parent != self._local:
            return
        if directory.MARKER not in (self.remote / checkpoint.name).entries():
            self.on_saved(checkpoint)

    def ended(self) -> list[Event]:
        return [_upload_event(upload) for upload in self._uploader.ended()] if self._uploader is not None else []

    def wait(self) -> list[Event]:
        """Waits on rank 0 until everything is uploaded."""
        if self._uploader is None or self._mesh.rank:
            return []
        ended = [_upload_event(upload) for upload in self._uploader.wait()]
        if self._to_prune is not None:
            with suppress(OSError):  # then the next run prunes
                self._prune(self._to_prune)
        return ended

    def _prune(self, uploaded: Location) -> None:
        assert self.remote is not None
        protected = self._exports.protected if self._exports is not None else set()  # an export may read from the URL
        self._to_prune = uploaded if protected else None
        directory.prune(self.remote, self._spec.keep_last, uploaded, self._spec.keep_every, protected)

    def close(self) -> None:
        if self._uploader is not None:
            self._uploader.close()


def _save_events(outcomes: list[SaveOutcome]) -> list[Event]:
    events: list[Event] = []
    for save in outcomes:
        if save.note:
            events.append(Warned(message=save.note))
        if save.failure is not None:
            events.append(SaveFailed(step=save.step, path=save.path, reason=save.failure))
            continue
        events.append(
            Saved(
                step=save.step,
                path=save.path,
                bytes=save.bytes,
                seconds=save.seconds,
                stall=save.stall,
                write_seconds=save.write,
                bytes_per_second=save.bytes / max(save.write, 1e-9),
            )
        )
    return events


def _upload_event(upload: UploadOutcome) -> Event:
    if upload.failure is not None:
        return UploadFailed(step=upload.step, url=upload.url, reason=upload.failure)
    return Uploaded(step=upload.step, url=upload.url, bytes=upload.bytes, seconds=upload.seconds, skipped=upload.skipped)


def _all_damaged(events: list[Event]) -> str:
    damaged = "\n".join(f"  {bad.path}: {bad.reason}" for bad in events if isinstance(bad, CheckpointDamaged))
    return (
        f"No checkpoint of this run can be loaded:\n{damaged}\nRestore one of them from a copy; or, to begin again from step 0, remove "
        "them, or start in another run directory."
    )
