"""Saves the state of all ranks to a checkpoint while training continues: a step waits only for a copy of the state in host memory. A thread
of each rank then writes the rank's own file, and rank 0's thread commits the checkpoint when all ranks have written."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.checkpointing import directory
from phalanx.checkpointing.format import RankFile, RunMetadata, write_rank_file
from phalanx.checkpointing.location import Chunks, Location
from phalanx.checkpointing.staging import Staging, live_bytes
from phalanx.checkpointing.state_tensor import StateTensor, WrittenBox, as_state_tensors, written_boxes
from phalanx.events.records import Event, Saved, SaveFailed, Warned
from phalanx.spec.errors import PhalanxError

_POLL = 0.02  # seconds between two checks whether all ranks have written
_PATIENCE = 10.0  # seconds that a run which ends by a failure still waits for the other ranks


class Ranks(Protocol):
    """The ranks that save together; `parallel.mesh.Mesh` is one."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def stage(self) -> int:
        """Pipeline stage. Ranks of one stage hold parts of the same tensors."""

    @property
    def is_stage_leader(self) -> bool:
        """Whether this rank writes the names of its stage's tensors."""

    @property
    def device(self) -> torch.device: ...
    def broadcast_object(self, value: Any, /) -> Any:
        """Rank 0's value; all ranks call it together."""

    def store_add(self, key: str, amount: int, /) -> int:
        """Add to a number that all ranks share, at any time and from any thread; returns the new value."""

    def store_set(self, key: str, text: str, /) -> None: ...
    def store_get(self, key: str, /) -> str: ...


class Ballot:
    """Counts in the ranks' shared store for one operation: who is done, who failed and why, and how many bytes that was. For any thread."""

    def __init__(self, ranks: Ranks, key: str):
        self.ranks, self.key = ranks, key

    def fail(self, reason: str) -> None:
        number = self.ranks.store_add(f"{self.key}-failed", 1)
        self.ranks.store_set(f"{self.key}-why-{number}", f"rank {self.ranks.rank}: {reason}")

    def done(self, size: int = 0) -> None:
        self.ranks.store_add(f"{self.key}-bytes", size)
        self.ranks.store_add(f"{self.key}-done", 1)

    def wait(self, give_up: Callable[[], bool], longest_pause: float = _POLL) -> bool:
        """Wait until all ranks are done; False if `give_up` becomes true before."""
        pause = _POLL
        while self.ranks.store_add(f"{self.key}-done", 0) < self.ranks.ranks:
            if give_up():
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, longest_pause)
        return True

    @property
    def bytes(self) -> int:
        return self.ranks.store_add(f"{self.key}-bytes", 0)

    def failures(self) -> str | None:
        """Why ranks failed; None if none did."""
        count = self.ranks.store_add(f"{self.key}-failed", 0)
        return "; ".join(self.ranks.store_get(f"{self.key}-why-{number + 1}") for number in range(count)) or None


def failure_text(error: BaseException) -> str:
    """An error in one sentence, for reports."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
    return str(error) if isinstance(error, PhalanxError) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class _Save:
    """A save in progress, on this rank."""

    step: int
    partial: Location
    file: RankFile
    values: Callable[[], Chunks]
    metadata: RunMetadata
    ballot: Ballot
    started: float
    waited: bool
    """Training waits until it is written."""
    no_copy: str | None
    """Why there is no memory for a copy of the state."""


class Saver:
    """The saves of one run, on one rank."""

    def __init__(self, checkpoints: Location, ranks: Ranks, retain: Callable[[Location], None] | None = None):
        """`retain`: called by rank 0, in the background, with each new checkpoint, to remove older ones."""
        self._checkpoints, self._ranks, self._retain = checkpoints, ranks, retain
        self._staging = Staging(ranks.device)
        self._thread: threading.Thread | None = None
        self._ended: list[Event] = []
        self.last: Saved | SaveFailed | None = None
        """The save that ended last; the same on all ranks after `save` and `settle`."""
        self._closed_at = math.inf
        self._stall = 0.0

    def prepare(self, tensors: Mapping[str, Tensor | StateTensor]) -> None:
        """Allocate, in the background, the memory for asynchronous saves of this state."""
        self._staging.prepare(written_boxes(as_state_tensors(tensors)))

    def save(
        self, step: int, tensors: Mapping[str, Tensor | StateTensor], metadata: RunMetadata | None = None, *, wait: bool
    ) -> list[Event]:
        """Start a save of the current state; all ranks call it together. With `wait`, also complete it, without a copy of the state.
        Otherwise call `release` before the state changes.

        Returns the events of saves that have ended by now: the previous one and, if it could not start or was waited for, this one.
        """
        started = time.perf_counter()
        ended = self.settle()
        begun = self._begin(step)
        if isinstance(begun, SaveFailed):
            self.last = begun
            return [*ended, begun]
        partial, ballot = begun
        state = as_state_tensors(tensors)
        boxes = written_boxes(state)
        no_copy = None if wait else self._staging.begin(boxes)
        direct = wait or no_copy is not None
        values: Callable[[], Chunks] = (lambda: live_bytes(boxes)) if direct else self._staging.chunks
        file = rank_file(self._ranks, state, boxes)
        save = _Save(step, partial, file, values, metadata or RunMetadata(), ballot, started, direct, no_copy)
        self._stall = time.perf_counter() - started
        self._thread = threading.Thread(target=self._write, args=(save,), name=f"save of step {step}", daemon=True)
        self._thread.start()
        if no_copy is not None:
            self._thread.join()  # on this rank alone: others may have had memory for a copy
        return [*ended, *self.settle()] if wait else ended

    def _begin(self, step: int) -> tuple[Location, Ballot] | SaveFailed:
        """Rank 0 creates the folder."""
        failure, number = None, 0
        if self._ranks.rank == 0:
            # Numbered in the store, as these ranks may have saved through another Saver before.
            number = self._ranks.store_add("saves", 1)
            try:
                directory.begin(self._checkpoints, step)
            except OSError as error:
                failure = failure_text(error)
        failure, number = self._ranks.broadcast_object((failure, number))
        if failure is not None:
            return SaveFailed(step=step, path=str(directory.step_dir(self._checkpoints, step)), reason=failure)
        return directory.partial_dir(self._checkpoints, step), Ballot(self._ranks, f"save-{number}")

    def _write(self, save: _Save) -> None:
        """In a thread: write this rank's file; on rank 0 also commit the checkpoint."""
        failure, note, size = None, None, 0
        if save.no_copy is not None:
            note = (
                f"There is no memory for a copy of the state on rank 0 ({save.no_copy}): training waited until step {save.step} was "
                "written."
            )
        first_byte = time.perf_counter()
        try:
            save.values()  # waits for the copy
            first_byte = time.perf_counter()
            size = write_rank_file(save.partial, save.file, save.values)
        except BaseException as error:
            failure = failure_text(error)
            save.ballot.fail(failure)
        save.ballot.done(size)
        path = directory.step_dir(self._checkpoints, save.step)
        if self._ranks.rank == 0:
            failure, size = self._commit(save), save.ballot.bytes
            note = self._clean_up(save.partial, path, failure) or note
        ended = time.perf_counter()
        seconds, writing = ended - save.started, ended - first_byte
        if note is not None:
            self._ended.append(Warned(message=note))
        if failure is not None:
            self._ended.append(SaveFailed(step=save.step, path=str(path), reason=failure))
            return
        stall = seconds if save.waited else self._stall + self._staging.device_wait()
        self._ended.append(
            Saved(
                step=save.step, path=str(path), bytes=size, seconds=seconds, stall=stall, write_seconds=writing,
                bytes_per_second=size / max(writing, 1e-9),
            )
        )  # fmt: skip

    def _commit(self, save: _Save) -> str | None:
        """On rank 0, when all ranks have written; returns why there is no checkpoint."""
        try:
            if not save.ballot.wait(lambda: time.monotonic() > self._closed_at + _PATIENCE):
                raise TimeoutError("not all ranks have written their parts")
            if (failures := save.ballot.failures()) is not None:
                return failures
            directory.commit(save.partial, save.step, save.metadata, self._ranks.ranks)
        except BaseException as error:
            return f"rank 0: {failure_text(error)}"
        return None

    def _clean_up(self, partial: Location, path: Location, failure: str | None) -> str | None:
        """Remove the files of a failed save, because the next one needs the space, or the checkpoints that the
        new one replaces. Returns a warning."""
        try:
            if failure is not None:
                partial.remove()
            elif self._retain is not None:
                self._retain(path)
        except Exception as error:
            return f"{path} is complete, but what it replaces could not be removed: {failure_text(error)}."
        return None

    def release(self) -> None:
        """Wait until the state may change. The copy has been running since the save began."""
        started = time.perf_counter()
        self._staging.release()
        self._stall += time.perf_counter() - started

    def ended(self) -> list[Event]:
        """Events of the save that has ended, without waiting. Call it on rank 0, which knows the outcome for all ranks."""
        return [] if self._thread is None or self._thread.is_alive() else self._join()

    def settle(self) -> list[Event]:
        """Wait for the save in progress, all ranks together; afterwards every rank knows its outcome."""
        ended, self.last = self._ranks.broadcast_object((self._join(), self.last))
        return list(ended)

    def _join(self) -> list[Event]:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        ended, self._ended = self._ended, []
        self.last = next((event for event in ended if isinstance(event, Saved | SaveFailed)), self.last)
        return ended

    def close(self) -> None:
        """Wait for this rank's file, but not long for other ranks: when a run fails during a save, they may be gone."""
        self._closed_at = time.monotonic()
        if self._thread is not None:
            self._thread.join()
        self._staging.close()


def rank_file(ranks: Ranks, state: Mapping[str, StateTensor], boxes: list[WrittenBox]) -> RankFile:
    """This rank's file of a checkpoint of `state`, of which it writes `boxes`."""
    names = {name: tensor.whole_bytes for name, tensor in state.items()} if ranks.is_stage_leader else None
    return RankFile(ranks.rank, ranks.ranks, [box.saved for box in boxes], ranks.stage, names)
