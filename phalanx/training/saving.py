"""The checkpoints of a run on one rank: what a checkpoint contains, which are kept, copied in memory, uploaded and exported, and which one
is restored. The trainer decides when to save; `checkpointing` writes and reads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from phalanx._version import __version__
from phalanx.checkpointing import directory
from phalanx.checkpointing.base_digest import base_digest, check_base
from phalanx.checkpointing.directory import DamagedCheckpoint
from phalanx.checkpointing.format import Marker, RunMetadata, SavedProgress
from phalanx.checkpointing.hf_folder import ReferenceLogits
from phalanx.checkpointing.location import Location, open_location
from phalanx.checkpointing.replicas.copy_pace import CopyPace
from phalanx.checkpointing.replicas.memory_checkpoint import MemoryCopies
from phalanx.checkpointing.replicas.replica_index import MemoryLocation
from phalanx.checkpointing.replicas.shm_slots import slots_for
from phalanx.checkpointing.restore import load
from phalanx.checkpointing.save import Saver, failure_text, parts_of
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.checkpointing.upload import Uploader
from phalanx.data.dataset import Dataset
from phalanx.events.records import CheckpointDamaged, Event, Restored, Saved
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

Tensors = Mapping[str, StateTensor] | Sequence[Mapping[str, StateTensor]]
"""The state of a process, or of each of its devices; a checkpoint gets a file for each."""


class Checkpointer(StepHook):
    """Saves and restores the state of one rank."""

    def __init__(self, run: Run, plan: Plan, mesh: Mesh, folder: Path, data: Dataset, reference: Callable[[], ReferenceLogits]):
        """`reference` computes the logits that an export of the present state must reproduce, on all ranks together."""
        self._run, self._plan, self._mesh, self._data, self._reference = run, plan, mesh, data, reference
        url = run.checkpoint.url if run.checkpoint.save else None  # nothing is read there either: it may hold another run
        self._location: Location = open_location(folder if run.checkpoint.local_first else url or folder)
        self._exports = Exports(folder.parent / "hf", enabled=run.checkpoint.export_hf and mesh.rank == 0)
        # Of checkpoints that are saved in the run directory first.
        remotes = [open_location(url)] if run.checkpoint.local_first and url is not None else []
        self._locations = [self._location, *remotes]
        self._uploaded: Location | None = None
        """The newest checkpoint at the URL, if exports needed older ones when it was complete: they are pruned later."""
        self._uploads = [Uploader(self._location, remote, mesh, self._prune_remote) for remote in remotes]
        self._saver = Saver(self._location, mesh, self._on_saved)
        self._copy_every = run.checkpoint.memory_every or mesh.place.copy_every or 0
        self._copies = [_memory_copies(run, plan, mesh)] if self._copy_every and mesh.place.replica_folder is not None else []
        self._background: list[Saver | MemoryCopies | Exports | Uploader]
        self._after_save: list[Exports | Uploader] = [self._exports, *self._uploads]
        self._background = [self._saver, *self._copies, *self._after_save]
        self._newest: Location | None = None
        self.step: int | None = None
        """Step of the newest checkpoint, the same on all ranks."""
        self.equal_step: Callable[[], int | None] = lambda: None
        """The newest step whose state was found equal among replicas: if one is corrupt, the run goes back to a state before it."""

    def prepare(self, tensors: Tensors) -> None:
        """Allocates the memory that background saves and copies need."""
        periodic = self._run.checkpoint.save and self._run.checkpoint.every is not None
        if periodic and self._saves_in_background(tensors):
            self._saver.prepare(tensors)
        for copies in self._copies:
            copies.prepare(tensors)

    def _saves_in_background(self, tensors: Tensors) -> bool:
        """States in files are too large for a copy in memory: training waits for their saves."""
        return self._run.checkpoint.async_save and all(
            isinstance(state.tensor, Tensor) for part in parts_of(tensors) for state in part.values()
        )

    def save(self, progress: Progress, tensors: Tensors, *, wait: bool) -> list[Event]:
        """Saves the present state; all ranks call it together. Returns the events of saves that have ended, perhaps of this one too."""
        if self._run.checkpoint.export_hf:
            self._exports.expect(progress.step, self._reference())
        for uploads in self._uploads:
            uploads.expect()
        wait = wait or not self._saves_in_background(tensors)
        return self._record(self._saver.save(progress.step, tensors, self._metadata_on_rank_0(progress), wait=wait))

    def copy(self, progress: Progress, tensors: Callable[[], Tensors]) -> None:
        """Copies the present state to host memory, if a copy is due; all ranks call it together."""
        for copies in self._copies:
            if progress.step % self._copy_every == 0 and copies.may_be_due(progress.step):
                copies.take(progress.step, tensors(), self._metadata_on_rank_0(progress), self.equal_step())

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
            base=self._base,
        )

    @cached_property
    def _base(self) -> str | None:
        """Digest of the weights below LoRA adapters."""
        return None if self._run.lora.rank is None else base_digest(self._run.model.from_)

    def ended(self) -> list[Event]:
        """Events of saves, copies, exports and uploads that have ended since the last call, on rank 0."""
        if self._mesh.rank:
            return []
        return [event for background in self._background for event in background.ended()]

    def before_update(self, context: StepContext) -> None:
        self.release()

    def release(self) -> None:
        """Waits for saves and copies that still read the live state, which is about to change."""
        self._saver.release()
        for copies in self._copies:
            copies.release()

    def settle(self) -> list[Event]:
        """Waits for the save and the copy in progress; all ranks call it together."""
        copied = [event for copies in self._copies for event in copies.settle()]
        return [*copied, *self._record(self._saver.settle())]

    def export_restored(self) -> None:
        """Exports the restored checkpoint, unless the run that saved it has done so; all ranks call it together."""
        newest = self._newest
        if not self._run.checkpoint.export_hf or newest is None:
            return
        if self._mesh.broadcast_object(not self._exports.has(newest.name)):
            self._exports.expect(directory.step_of(newest) or 0, self._reference())
            self._exports.on_saved(newest)

    def finish(self) -> list[Event]:
        """Waits for all exports and uploads, on all ranks together."""
        if not self._run.checkpoint.export_hf and not self._uploads:
            return []
        broadcast = self._mesh.slow_broadcast(_EXPORT_TIMEOUT)
        ended: list[Event] = []
        if self._mesh.rank == 0:
            ended = [event for jobs in self._after_save for event in jobs.wait()]
            if self._uploaded is not None:
                with suppress(OSError):  # then the next run prunes
                    self._prune_remote(self._uploaded)
            if self._newest is not None and self._newest.parent == self._location:
                self._prune(self._newest)  # checkpoints that exports and uploads needed until now
        broadcast(None)
        return ended

    def _record(self, events: list[Event]) -> list[Event]:
        if isinstance(self._saver.last, Saved):
            self.step = self._saver.last.step
        return events

    def _on_saved(self, checkpoint: Location) -> None:
        """Called on rank 0, in the saver's thread, when a checkpoint is complete."""
        self._newest = checkpoint
        for jobs in self._after_save:
            jobs.on_saved(checkpoint)  # before pruning: they protect their checkpoints
        self._prune(checkpoint)

    def _prune(self, newest: Location) -> None:
        protected = {name for jobs in self._after_save for name in jobs.in_use} | self._found_equal(newest)
        spec = self._run.checkpoint
        self._exports.on_pruned(directory.prune(self._location, spec.keep_last, newest, spec.keep_every, protected))

    def _prune_remote(self, uploaded: Location) -> None:
        protected, spec = self._exports.in_use, self._run.checkpoint  # an export may read from the URL
        self._uploaded = uploaded if protected else None
        protected = {*protected, *self._found_equal(uploaded)}
        directory.prune(self._locations[1], spec.keep_last, uploaded, spec.keep_every, protected)

    def _found_equal(self, newest: Location) -> set[str]:
        """The newest checkpoint next to this one whose state was found equal on all replicas: the run may go back to it until its last step."""
        equal = self.equal_step()
        if equal is None or (directory.step_of(newest) or 0) >= self._run.steps:
            return set()
        checkpoints = directory.list_checkpoints(newest.parent)  # newest first
        older = (path.name for path in checkpoints if (directory.step_of(path) or 0) <= equal)
        return set(itertools.islice(older, 1))

    def restore(
        self, tensors: Tensors, path: Path | Location | None = None, until: int | None = None
    ) -> tuple[Progress | None, list[Event]]:
        """Restores `path`, or the newest valid checkpoint, of step `until` or an earlier one; None if there is none. All ranks call it
        together."""
        self.release()
        resumes = path is None and until is None
        if self._mesh.rank == 0 and resumes:
            directory.restore_replaced(self._location)
        damaged: list[DamagedCheckpoint] = []
        overwritten = False
        while True:
            started = time.perf_counter()
            if path is not None:
                chosen: Location | None = open_location(path)
            else:
                chosen, also_damaged = self.newest(until, {bad.path for bad in damaged})
                damaged += also_damaged
            events: list[Event] = [CheckpointDamaged(path=bad.path, reason=bad.reason) for bad in damaged]
            if chosen is None:
                if overwritten or (damaged and resumes):
                    raise RunFailed(_all_damaged(damaged, until))
                return None, events
            try:
                progress = Progress(**self._load(chosen, tensors).run.progress)
            except DamagedCheckpoint as problem:  # on all ranks alike
                if path is not None:
                    raise
                damaged.append(problem)
                overwritten = True
                continue
            # An in-memory copy is no checkpoint: a state restored from one must still be saved.
            self.step = None if isinstance(chosen, MemoryLocation) else progress.step
            self._newest = chosen if resumes else None
            for uploads in self._uploads if self._mesh.rank == 0 and resumes else ():
                if chosen.parent == self._location and directory.MARKER not in (self._locations[1] / chosen.name).entries():
                    uploads.on_saved(chosen)  # the run that saved it has ended before it was uploaded
            seconds = time.perf_counter() - started
            return progress, [*events, Restored(step=progress.step, path=str(chosen), seconds=seconds)]

    def newest(
        self, until: int | None = None, damaged: Collection[str] = ()
    ) -> tuple[Location | None, list[DamagedCheckpoint]]:
        """The newest checkpoint, of step `until` or an earlier one, except those known to be `damaged`; and newer ones that are damaged.

        Rank 0 chooses for all ranks, so that they agree while files come and go.
        """
        newest = None
        if self._mesh.rank == 0:
            skipped = set(damaged)
            if until is not None:
                checkpoints = (path for location in self._locations for path in directory.list_checkpoints(location))
                skipped |= {str(path) for path in checkpoints if (directory.step_of(path) or 0) > until}
            newest = directory.newest(self._locations, skipped)
        return cast(tuple[Location | None, list[DamagedCheckpoint]], self._mesh.broadcast_object(newest))

    def has_newer(self, memory: MemoryLocation) -> bool:
        """Whether a checkpoint is newer than this copy in memory; all ranks call it together."""
        is_newer = False
        if self._mesh.rank == 0:
            with suppress(OSError, DamagedCheckpoint):  # the copy is there
                checkpoint, _ = directory.newest(self._locations)
                is_newer = checkpoint is not None and _age(checkpoint) > _age(memory)
        return bool(self._mesh.broadcast_object(is_newer))

    def remove_after(self, step: int) -> None:
        """Removes checkpoints of later steps after a rollback to `step`; all ranks call it together."""
        failure = None
        if self._mesh.rank == 0:
            try:
                for location in self._locations:
                    self._exports.on_pruned(directory.remove_after(location, step))
            except OSError as error:
                failure = failure_text(error)
        if failure := self._mesh.broadcast_object(failure):
            raise RunFailed(f"The checkpoints after step {step}, to which the run went back, could not be removed: {failure}.")

    def _load(self, path: Location, tensors: Tensors) -> Marker:
        """Fills the tensors and returns the marker. Raises the problem of any rank on all ranks, damage first."""
        problem: PhalanxError | None = None
        marker: Marker | None = None
        try:
            for part in parts_of(tensors):
                marker = load(path, part)
            assert marker is not None
            if self._mesh.rank == 0 and self._run.lora.rank is not None:
                check_base(self._run.model.from_, marker.run.base, path)
        except PhalanxError as error:
            problem = error
        problems = [of_rank for of_rank in self._mesh.gather_objects(problem) if of_rank is not None]
        if problems:
            raise next((damage for damage in problems if isinstance(damage, DamagedCheckpoint)), problems[0])
        assert marker is not None
        return marker

    def close(self) -> None:
        for background in self._background:
            background.close()


def _age(state: Location) -> tuple[int, int]:
    """Of two states the newer one has the larger. A rollback abandons the steps after it."""
    marker = directory.read_marker(state)
    return len(marker.run.progress.get("left_out", [])), marker.step


def _memory_copies(run: Run, plan: Plan, mesh: Mesh) -> MemoryCopies:
    """In-memory copies of one rank's state, in the replica server that the launcher has started."""
    assert mesh.place.replica_folder is not None
    is_default, on_gpu = run.checkpoint.memory_every is None, plan.device != "cpu"
    # Default copies protect state that no other rank holds: on CPUs they are taken after every step, at any cost.
    patient = is_default and not on_gpu
    slots = slots_for(run, mesh.layout)
    copies = MemoryCopies(mesh, Path(mesh.place.replica_folder), mesh.place.generation, patient=patient, slots=slots)
    if is_default and on_gpu:
        copies.pace = CopyPace(_DEFAULT_COPY_SHARE)
    return copies


def _all_damaged(damaged: list[DamagedCheckpoint], until: int | None) -> str:
    which = "this run" if until is None else f"step {until} or before"
    reasons = "\n".join(f"  {bad.path}: {bad.reason}" for bad in damaged)
    return (
        f"No checkpoint of {which} can be loaded:\n{reasons}\nRestore one of them from a copy; or, to begin again from step 0, remove "
        "them, or start in another run directory."
    )
