"""State to storage, all ranks together and behind training. Driven by the trainer between steps.

A save stops a step only for a copy in memory; a thread of each rank then writes its own file, with nobody's plan but its own, and
rank 0's makes the whole a checkpoint when every rank has told that its part is there. At most one save is under way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from phalanx.checkpointing import directory, format
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.restore import failure_text
from phalanx.checkpointing.shard_io import Holding, Writer, laid_out, live
from phalanx.checkpointing.staging import Staging
from phalanx.checkpointing.state_tensor import SavePieces, StateTensor, as_state_tensors, written

_LOOK = 0.02  # seconds between two looks at whether all ranks have written
_PATIENCE = 10.0  # seconds for which a run that ends by a failure still waits for the others


class Ranks(Protocol):
    """The ranks that save together."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> int: ...
    @property
    def stage(self) -> int:
        """Ranks with the same number hold parts of the same tensors."""

    @property
    def is_stage_leader(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    def broadcast_object(self, value: Any, /) -> Any:
        """Rank 0's value; all ranks call it at once."""

    def store_add(self, key: str, amount: int, /) -> int:
        """Add to a number that all ranks see, at any time and from any thread; returns the new one."""

    def store_set(self, key: str, text: str, /) -> None: ...
    def store_get(self, key: str, /) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOutcome:
    """How a save went."""

    step: int
    path: str
    """Where the checkpoint is, or would be."""
    failure: str | None
    """Why there is none."""
    bytes: int = 0
    seconds: float = 0.0
    """From the moment it holds until it was a checkpoint."""
    stall: float = 0.0
    """Seconds of those that training stood still for it, on rank 0: this process, or its device."""
    write: float = 0.0
    """Seconds of those from the first byte that rank 0 wrote until it was a checkpoint."""
    note: str | None = None
    """What a person should know of it all the same."""


class Saver:
    """Saves of one run, on one rank."""

    def __init__(self, checkpoints: Location, ranks: Ranks, retain: Callable[[Location], None] | None = None):
        """`retain`: called by rank 0 with each new checkpoint, behind training: what is to go may go."""
        self._checkpoints, self._ranks, self._retain = checkpoints, ranks, retain
        self._staging = Staging(ranks.device)
        self._thread: threading.Thread | None = None
        self._found: SaveOutcome | None = None
        self.last: SaveOutcome | None = None
        """The save that ended last, as all ranks know it after `save` and `settle`."""
        self._key = ""  # under which ranks tell each other of the save under way
        self._left: float | None = None
        self._stall = 0.0

    def prepare(self, tensors: Mapping[str, Tensor | StateTensor]) -> None:
        """A save behind training will come: get the memory for it ready."""
        self._staging.prepare(written(as_state_tensors(tensors)))

    def save(
        self, step: int, tensors: Mapping[str, Tensor | StateTensor], contents: dict[str, Any], *, wait: bool
    ) -> list[SaveOutcome]:
        """Begin a save of this moment, by all ranks together; with `wait`, also see it through, without a copy of the state. Else
        call `release` before the state changes.

        Returns what has ended by now: the save before this one and, if it could not begin or was waited for, this one.
        """
        started = time.perf_counter()
        ended = self.settle()
        folder = self._begin(step)
        if isinstance(folder, SaveOutcome):
            self.last = folder
            return [*ended, folder]
        held = as_state_tensors(tensors)
        parts = laid_out(written(held))
        holding = Holding(
            self._ranks.stage, {n: p.whole_bytes for n, p in held.items()} if self._ranks.is_stage_leader else None
        )
        no_copy = None if wait else self._staging.begin(parts)
        direct = wait or no_copy is not None
        file = format.file_name(self._ranks.rank, self._ranks.ranks)
        writer = Writer(folder, file, parts, partial(live, parts) if direct else self._staging.chunks, holding)
        self._stall = time.perf_counter() - started
        self._thread = threading.Thread(
            target=self._write,
            args=(folder, writer, SavePieces(parts), contents | {"step": step}, (started, direct, no_copy)),
            name=f"save of step {step}",
            daemon=True,
        )
        self._thread.start()
        if no_copy is not None:
            self._thread.join()  # this rank alone: the others' copies may have found room
        return [*ended, *self.settle()] if wait else ended

    def _begin(self, step: int) -> Location | SaveOutcome:
        """Rank 0 makes room for all."""
        failure, number = None, 0
        folder = directory.step_dir(self._checkpoints, step)
        if self._ranks.rank == 0:
            number = self._ranks.store_add(
                "saves", 1
            )  # not counted here: these ranks may have saved through another Saver before
            try:
                directory.begin(self._checkpoints, step)
            except OSError as error:
                failure = failure_text(error)
        failure, number = self._ranks.broadcast_object((failure, number))
        if failure is not None:
            return SaveOutcome(step=step, path=str(folder), failure=failure)
        self._key = f"save-{number}"
        return folder.parent / f"{folder.name}{directory.PARTIAL}" if folder.renames else folder

    def _write(
        self,
        folder: Location,
        writer: Writer,
        planner: SavePieces,
        contents: dict[str, Any],
        how: tuple[float, bool, str | None],
    ) -> None:
        """In a thread of its own: this rank's file; on rank 0 also the commit."""
        (started, waited, no_copy), step = how, contents["step"]
        key, failure, note = self._key, None, None
        if no_copy is not None:
            note = f"There is no memory for a copy of the state on rank 0 ({no_copy}): training waited until step {step} was written."
        try:
            # What torch's `save` does for one process; in a thread it would also change the warnings of all others.
            writer.write_data(planner.create_local_plan(), planner).wait()
        except BaseException as error:
            failure = failure_text(error)
            self._ranks.store_set(
                f"{key}-why-{self._ranks.store_add(f'{key}-failed', 1)}", f"rank {self._ranks.rank}: {failure}"
            )
        size = self._ranks.store_add(f"{key}-bytes", writer.bytes)
        self._ranks.store_add(f"{key}-done", 1)
        path = directory.step_dir(self._checkpoints, step)
        if self._ranks.rank == 0:
            try:
                self._wait_for_all(f"{key}-done")
                size = self._ranks.store_add(f"{key}-bytes", 0)
                if failed := self._ranks.store_add(f"{key}-failed", 0):
                    failure = "; ".join(self._ranks.store_get(f"{key}-why-{number + 1}") for number in range(failed))
                else:
                    directory.commit(folder, contents, self._ranks.ranks)
            except BaseException as error:
                failure = f"rank 0: {failure_text(error)}"
            note = self._tidy(folder, path, failure) or note
        write = time.perf_counter() - writer.begun
        whole = time.perf_counter() - started
        stall = whole if waited else self._stall + self._staging.waited()
        self._found = SaveOutcome(
            step=step, path=str(path), failure=failure, bytes=size, seconds=whole, stall=stall, write=write, note=note
        )

    def _wait_for_all(self, done: str) -> None:
        while self._ranks.store_add(done, 0) < self._ranks.ranks:
            if self._left is not None and time.monotonic() > self._left + _PATIENCE:
                raise TimeoutError("not all ranks have written their parts")
            time.sleep(_LOOK)

    def _tidy(self, folder: Location, path: Location, failure: str | None) -> str | None:
        """After a save: what is to go, goes. Of one that failed, everything, as where the disk is full the next needs the room."""
        try:
            if failure is not None:
                folder.remove()
            elif self._retain is not None:
                self._retain(path)
        except Exception as error:
            return f"{path} is complete, but what it replaces could not be removed: {failure_text(error)}."
        return None

    def release(self) -> None:
        """Wait until the state may change. The copy of it has been made beside what this process did since the save began."""
        started = time.perf_counter()
        self._staging.release()
        self._stall += time.perf_counter() - started

    def ended(self) -> list[SaveOutcome]:
        """What has ended by now, without waiting. To be asked on rank 0, which knows of all."""
        if self._thread is None or self._thread.is_alive():
            return []
        self._thread.join()
        self._thread = None
        return self._take()

    def settle(self) -> list[SaveOutcome]:
        """Wait for the save under way, all ranks together: afterwards each knows whether it is there."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        found, self.last = self._ranks.broadcast_object((self._take(), self.last))
        return list(found)

    def _take(self) -> list[SaveOutcome]:
        found, self._found = self._found, None
        if found is None:
            return []
        self.last = found
        return [found]

    def close(self) -> None:
        """Wait for what this rank writes. Where a run fails in the middle of a save, the others may be gone: not for them."""
        self._left = time.monotonic()
        if self._thread is not None:
            self._thread.join()
        self._staging.close()
