"""Saves the state of all ranks to a checkpoint while training continues: a step waits only for a copy of the state in host memory. A thread
of each rank then writes the rank's own file, and rank 0's thread commits the checkpoint when all ranks have written.

The host copy (`Staging`) is allocated in advance and reused, pinned on GPUs. Nothing that is saved changes between two optimizer steps, so the
copy runs while the next forward and backward compute, and only the optimizer step after them waits for it.
"""

from __future__ import annotations

import math
import mmap
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from phalanx import accelerator
from phalanx.checkpointing import directory
from phalanx.checkpointing.format import BLOCK, RankFile, RunMetadata, write_rank_file
from phalanx.checkpointing.location import Chunks, Location
from phalanx.checkpointing.replicas.shm_slots import free_memory
from phalanx.checkpointing.state_tensor import StateTensor, WrittenBox, as_state_tensors, raw_bytes, written_boxes
from phalanx.events.records import Event, Saved, SaveFailed, Warned
from phalanx.spec.errors import PhalanxError

_POLL = 0.02  # seconds between two checks whether all ranks have written
T = TypeVar("T")
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


State = Mapping[str, Tensor | StateTensor]
"""Of a process or of one of its devices, by name."""


def parts_of(tensors: Mapping[str, T] | Sequence[Mapping[str, T]]) -> Sequence[Mapping[str, T]]:
    """The state of each device of this process; the torch engine has one."""
    return [tensors] if isinstance(tensors, Mapping) else tensors


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
    return str(error) if isinstance(error, PhalanxError | OSError) else f"{type(error).__name__}: {error}"


def live_bytes(boxes: list[WrittenBox]) -> Iterator[memoryview]:
    """The bytes of boxes as they are now, in full blocks of the same memory: use each before requesting the next. Blocks are whole
    pages, so that they can be written with direct I/O."""
    devices = [box.state.tensor.device for box in boxes if isinstance(box.state.tensor, Tensor)]
    device = next((device for device in devices if accelerator.of(device).asynchronous), torch.device("cpu"))
    if accelerator.of(device).asynchronous:
        block = accelerator.of(device).pin(torch.empty(BLOCK, dtype=torch.uint8))
    else:
        block = torch.frombuffer(mmap.mmap(-1, BLOCK), dtype=torch.uint8)
    filled = 0
    for box in boxes:
        rest = box.values().contiguous().view(-1).view(torch.uint8)
        while len(rest):
            count = min(len(rest), BLOCK - filled)
            block[filled : filled + count].copy_(rest[:count])
            rest, filled = rest[count:], filled + count
            if filled == BLOCK:
                yield raw_bytes(block)
                filled = 0
    if filled:
        yield raw_bytes(block[:filled])


class Staging:
    """The host copy of one rank's boxes."""

    def __init__(self, device: torch.device, *, pin: bool = True):
        self._device, self._accelerator = device, accelerator.of(device)
        self._pin = pin and self._accelerator.asynchronous
        self._memory: Tensor | None = None
        self._unpin: Callable[[], object] | None = None
        self._allocating: threading.Thread | None = None
        self._copying: threading.Thread | None = None
        self._released = False
        self._stream: Any = None
        self._error: BaseException | None = None
        self._wait_events: tuple[Any, Any] | None = None

    def prepare(self, boxes: list[WrittenBox]) -> None:
        """Allocate the memory in the background: touching every page, and pinning, takes seconds."""
        size = sum(box.bytes for box in boxes)
        self._allocating = threading.Thread(target=self._allocate, args=(size,), name="staging", daemon=True)
        self._allocating.start()

    def _allocate(self, size: int) -> str | None:
        """Returns why the memory is not available, or None."""
        self._accelerator.set_device(self._device)
        try:
            memory = self._map_memory(size)
        except (OSError, MemoryError) as error:
            return str(error)
        if self._pin and size:
            unpin = self._accelerator.register_host_memory(memory.data_ptr(), size)
            if isinstance(unpin, str):
                return f"{size / 1e9:.2f} GB cannot be pinned ({unpin})"
            self._unpin = unpin
        self._memory = memory
        return None

    def _map_memory(self, size: int) -> Tensor:
        if size > (free := free_memory()):
            raise MemoryError(f"{size / 1e9:.2f} GB are needed for it, and {free / 1e9:.2f} GB are free")
        # From the system and not from torch, which rounds pinned sizes up to powers of two. In huge pages, each touched once now, so
        # that no copy into them waits for the system.
        area = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        area.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(area, dtype=torch.uint8, count=size).zero_() if size else torch.empty(0, dtype=torch.uint8)

    def begin(self, boxes: list[WrittenBox]) -> str | None:
        """Start copying the boxes as they are now. Until `release` returns, only buffers may change. Returns why no copy is possible,
        or None."""
        size = sum(box.bytes for box in boxes)
        if self._allocating is not None:
            self._allocating.join()
            self._allocating = None
        if self._memory is None or self._memory.numel() != size:
            self._free()
            if (problem := self._allocate(size)) is not None:
                return problem
        assert self._memory is not None
        self._error, self._released = None, False
        later, begin = [], 0
        for box in boxes:
            region = self._memory[begin : begin + box.bytes].view(box.dtype).view(box.box.shape)
            begin += box.bytes
            if box.state.is_buffer:
                _copy(box, region)
            else:
                later.append((box, region))
        stream = self._accelerator.current_stream(self._device)
        computed = None if stream is None else stream.record_event()
        self._copying = threading.Thread(target=self._copy_all, args=(later, computed), name="copying", daemon=True)
        self._copying.start()
        return None

    def _copy_all(self, copies: list[tuple[WrittenBox, Tensor]], computed: Any) -> None:
        """In a thread. `computed`: event after which the device has computed the state; None on the CPU."""
        try:
            if computed is None:
                for box, region in copies:
                    _copy(box, region)
                return
            self._stream = self._stream or self._accelerator.stream(self._device)
            with self._accelerator.use(self._stream):
                self._stream.wait_event(computed)
                for box, region in sorted(copies, key=lambda pair: _on_host(pair[0])):  # start the device's copies first
                    _copy(box, region)
        except BaseException as error:  # raised by `chunks`
            self._error = error

    def release(self) -> None:
        """Wait until the state may change: by this process, or by what it launches on the device from now on."""
        if self._copying is None or self._released:
            return  # called before every optimizer step; only the first one after a save waits
        self._released = True
        self._copying.join()
        if self._stream is not None:
            current = self._accelerator.current_stream(self._device)
            before = current.record_event(self._accelerator.event(timing=True))
            current.wait_stream(self._stream)
            self._wait_events = (before, current.record_event(self._accelerator.event(timing=True)))

    def device_wait(self) -> float:
        """Seconds that the device waited for the copy; waits until that is known."""
        if self._wait_events is None:
            return 0.0
        before, after = self._wait_events
        self._wait_events = None
        after.synchronize()
        return float(before.elapsed_time(after)) / 1000

    def chunks(self) -> list[memoryview]:
        """The copied bytes in order; waits until the copy is complete."""
        assert self._memory is not None and self._copying is not None
        self._copying.join()
        if self._error is not None:
            raise self._error
        if self._stream is not None:
            self._stream.synchronize()
        return [raw_bytes(block) for block in self._memory.split(BLOCK)] if self._memory.numel() else []

    def _free(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None
        self._memory = None

    def close(self) -> None:
        for thread in (self._allocating, self._copying):
            if thread is not None:
                thread.join()
        if self._stream is not None:
            self._stream.synchronize()
        self._free()


def _on_host(box: WrittenBox) -> bool:
    return isinstance(box.state.tensor, Tensor) and box.state.tensor.is_cpu


def _copy(box: WrittenBox, region: Tensor) -> None:
    box.copy_into(region)


@dataclass(frozen=True, slots=True)
class _Save:
    """A save in progress, on this rank."""

    step: int
    partial: Location
    files: Sequence[tuple[RankFile, Callable[[], Chunks]]]
    """Each with its values."""
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

    def prepare(self, tensors: State | Sequence[State]) -> None:
        """Allocate, in the background, the memory for asynchronous saves of this state."""
        (part,) = parts_of(tensors)
        self._staging.prepare(written_boxes(as_state_tensors(part)))

    def save(
        self, step: int, tensors: State | Sequence[State], metadata: RunMetadata | None = None, *, wait: bool
    ) -> list[Event]:
        """Start a save of the current state; all ranks call it together. With `wait`, also complete it, without a copy of the state.
        Otherwise call `release` before the state changes. A process with several devices gives the state of each, and waits: a file
        for each is written from it.

        Returns the events of saves that have ended by now: the previous one and, if it could not start or was waited for, this one.
        """
        started = time.perf_counter()
        ended = self.settle()
        begun = self._begin(step)
        if isinstance(begun, SaveFailed):
            self.last = begun
            return [*ended, begun]
        partial, ballot = begun
        states = [as_state_tensors(part) for part in parts_of(tensors)]
        boxes = [written_boxes(state) for state in states]
        assert wait or len(boxes) == 1, "only the state of a single device is copied"
        no_copy = None if wait else self._staging.begin(boxes[0])
        direct = wait or no_copy is not None
        values = [_live_values(own) if direct else self._staging.chunks for own in boxes]
        files = [
            rank_file(self._ranks, state, own, (part, len(states)))
            for part, (state, own) in enumerate(zip(states, boxes, strict=True))
        ]
        pairs = list(zip(files, values, strict=True))
        save = _Save(step, partial, pairs, metadata or RunMetadata(), ballot, started, direct, no_copy)
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
            if not save.waited:
                save.files[0][1]()  # waits for the copy
            first_byte = time.perf_counter()
            size = sum(write_rank_file(save.partial, file, values) for file, values in save.files)
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
            directory.commit(save.partial, save.step, save.metadata, self._ranks.ranks * len(save.files))
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


def _live_values(boxes: list[WrittenBox]) -> Callable[[], Chunks]:
    return lambda: live_bytes(boxes)


def rank_file(
    ranks: Ranks, state: Mapping[str, StateTensor], boxes: list[WrittenBox], part: tuple[int, int] = (0, 1)
) -> RankFile:
    """This rank's file of a checkpoint of `state`, of which it writes `boxes`. `part`: which of the rank's files, and how many each rank has."""
    index, parts = part
    names = {name: tensor.whole_bytes for name, tensor in state.items()} if ranks.is_stage_leader and not index else None
    return RankFile(ranks.rank * parts + index, ranks.ranks * parts, [box.saved for box in boxes], ranks.stage, names)
