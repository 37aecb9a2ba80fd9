"""Where `optim/offload/offloaded_adamw` keeps master weights and moments: in the host's memory, or in a file that is walked through in portions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from phalanx.optim.adamw import Bytes, State
from phalanx.optim.chunks import Portion, Slice
from phalanx.optim.offload.scratch import BLOCK, Buffer, ScratchFile

KINDS = ("master", "exp_avg", "exp_avg_sq")

ALIGNED = BLOCK // 2
"""Numbers, of two bytes or four, that fill whole blocks: every portion of a file is a multiple."""

_SLOTS = 3  # one is read ahead, one is worked on, one is written back


@dataclass(slots=True)
class Record:
    """One portion in the host's memory: what is written into it is kept."""

    kinds: dict[str, Tensor]
    busy: torch.cuda.Event | None = None
    """A copy to the device that has still to be made from it."""


class Store(Protocol):
    def walk(self) -> Iterator[tuple[Portion, Record]]:
        """Every portion in turn, to be changed in place before the next is asked for."""

    def put(self, number: int, kind: str, values: list[Tensor]) -> None:
        """Overwrite one kind of a portion, slice by slice."""

    def state(self, index: int, kind: str, shape: tuple[int, ...]) -> State:
        """All of one tensor."""

    def bytes(self) -> Bytes: ...
    @property
    def where(self) -> str:
        """In words."""

    def close(self) -> None: ...


def _widths(moments: torch.dtype) -> dict[str, torch.dtype]:
    return {"master": torch.float32, "exp_avg": moments, "exp_avg_sq": moments}


def width(moments: torch.dtype) -> int:
    """Bytes of one number's master weight and moments."""
    return sum(dtype.itemsize for dtype in _widths(moments).values())


class InMemory:
    """All of it, each kind in one piece."""

    def __init__(self, portions: list[Portion], moments: torch.dtype, *, pin: bool):
        self._portions, self._begins = portions, _begins([portion.size for portion in portions])
        total = sum(portion.size for portion in portions)
        self._buffers = {kind: Buffer(total * dtype.itemsize, pin) for kind, dtype in _widths(moments).items()}
        self._kinds = {kind: self._buffers[kind].bytes.view(dtype) for kind, dtype in _widths(moments).items()}
        self._pinned = pin

    def walk(self) -> Iterator[tuple[Portion, Record]]:
        for number, portion in enumerate(self._portions):
            yield portion, Record({kind: self._portion(number, kind) for kind in KINDS})

    def put(self, number: int, kind: str, values: list[Tensor]) -> None:
        _put(self._portions[number], self._portion(number, kind), values)

    def state(self, index: int, kind: str, shape: tuple[int, ...]) -> Tensor:
        found = [(n, part) for n, portion in enumerate(self._portions) for part in portion.slices if part.index == index]
        if not found:
            return torch.empty(shape, dtype=self._kinds[kind].dtype)
        number, first = found[0]
        length = sum(part.length for _, part in found)  # portions lie end to end, so its slices do
        return self._kinds[kind].narrow(0, self._begins[number] + first.at, length).view(shape)

    def bytes(self) -> Bytes:
        return Bytes(host=sum(buffer.bytes.numel() for buffer in self._buffers.values()))

    @property
    def where(self) -> str:
        return f"in {'locked ' if self._pinned else ''}memory of the host, {self.bytes().host} bytes"

    def close(self) -> None:
        pass

    def _portion(self, number: int, kind: str) -> Tensor:
        return self._kinds[kind].narrow(0, self._begins[number], self._portions[number].size)


class InFile:
    """A portion behind the other, each with all its kinds, so that the disk sees long runs. Few are in memory at any time."""

    def __init__(self, file: ScratchFile, portions: list[Portion], moments: torch.dtype, *, pin: bool):
        self._file, self._portions, self._widths = file, portions, _widths(moments)
        self._begins = _begins([portion.size * width(moments) for portion in portions])
        largest = max((portion.size for portion in portions), default=0)
        # One at least: it also serves for reading and writing single tensors.
        self._slots = [Buffer(largest * width(moments), pin) for _ in range(max(min(_SLOTS, len(portions)), 1))]
        self._records: list[Record | None] = [None] * len(self._slots)
        self._reader, self._writer = ThreadPoolExecutor(1, "read-ahead"), ThreadPoolExecutor(1, "write-back")

    def walk(self) -> Iterator[tuple[Portion, Record]]:
        written: dict[int, Future[None]] = {}
        last = len(self._portions) - 1
        ahead = self._reader.submit(self._read, 0, None) if self._portions else None
        for number, portion in enumerate(self._portions):
            assert ahead is not None
            record = ahead.result()
            if number < last:
                # Not before what was written from the same memory is on its way out.
                before = written.pop(number + 1 - len(self._slots), None)
                ahead = self._reader.submit(self._read, number + 1, before)
            yield portion, record
            written[number] = self._writer.submit(self._write, number)
        for future in written.values():
            future.result()

    def put(self, number: int, kind: str, values: list[Tensor]) -> None:
        portion, buffer = self._portions[number], self._free()
        first, dtype = self._within(number, kind), self._widths[kind]
        _put(portion, buffer.numbers(dtype, 0, portion.size), values)
        self._file.write(buffer.view[: portion.size * dtype.itemsize], self._begins[number] + first)

    def state(self, index: int, kind: str, shape: tuple[int, ...]) -> Stored:
        parts = [(n, part) for n, portion in enumerate(self._portions) for part in portion.slices if part.index == index]
        return Stored(self, parts, kind, shape, self._widths[kind])

    def read(self, number: int, kind: str, part: Slice) -> Tensor:
        """A slice, in memory that the next reading takes again."""
        begin, stop, inside = self._blocks(number, kind, part)
        buffer = self._free()
        self._file.read(buffer.view[: stop - begin], begin)
        return buffer.numbers(self._widths[kind], inside, part.length)

    def write(self, number: int, kind: str, part: Slice, values: Tensor) -> None:
        begin, stop, _ = self._blocks(number, kind, part)
        self.read(number, kind, part).copy_(values)  # blocks are written whole, with what else they hold
        self._file.write(self._slots[0].view[: stop - begin], begin)

    def bytes(self) -> Bytes:
        return Bytes(files=self._file.size, buffer=sum(slot.bytes.numel() for slot in self._slots))

    @property
    def where(self) -> str:
        how = (
            "read and written directly"
            if self._file.direct
            else "read and written through the page cache, which is emptied each time"
        )
        size = self._file.path.stat().st_size
        return (
            f"in {self._file.path}, {size} bytes, {how}, in {len(self._portions)} portions through {self.bytes().buffer} bytes"
        )

    def close(self) -> None:
        self._reader.shutdown()
        self._writer.shutdown()
        self._file.close()

    def _read(self, number: int, before: Future[None] | None) -> Record:
        if before is not None:
            before.result()
        slot = number % len(self._slots)
        self._settle(slot)
        portion, buffer = self._portions[number], self._slots[slot]
        self._file.read(buffer.view[: self._size(number)], self._begins[number])
        kinds = {kind: buffer.numbers(dtype, self._within(number, kind), portion.size) for kind, dtype in self._widths.items()}
        record = self._records[slot] = Record(kinds)
        return record

    def _write(self, number: int) -> None:
        self._file.write(self._slots[number % len(self._slots)].view[: self._size(number)], self._begins[number])

    def _free(self) -> Buffer:
        """Memory for a moment, between steps."""
        self._settle(0)
        return self._slots[0]

    def _settle(self, slot: int) -> None:
        record = self._records[slot]
        if record is not None and record.busy is not None:
            record.busy.synchronize()

    def _size(self, number: int) -> int:
        return self._portions[number].size * sum(dtype.itemsize for dtype in self._widths.values())

    def _within(self, number: int, kind: str) -> int:
        """Where a kind begins in its portion, in bytes."""
        before = KINDS[: KINDS.index(kind)]
        return self._portions[number].size * sum(self._widths[name].itemsize for name in before)

    def _blocks(self, number: int, kind: str, part: Slice) -> tuple[int, int, int]:
        """The blocks that hold a slice, from and to, and where in them it begins."""
        wide = self._widths[kind].itemsize
        first = self._begins[number] + self._within(number, kind) + part.at * wide
        begin = first // BLOCK * BLOCK
        return begin, -(-(first + part.length * wide) // BLOCK) * BLOCK, first - begin


@dataclass(slots=True)
class Stored:
    """One state of one parameter, in the file: read and written as a whole, a portion of it in memory at a time."""

    store: InFile
    parts: list[tuple[int, Slice]]
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, into: Tensor | None = None) -> Tensor:
        # Not from torch's allocator, which does not always give memory back that was let go.
        size = math.prod(self.shape) * self.dtype.itemsize
        whole = Buffer(size, pin=False).bytes.view(self.dtype).view(self.shape) if into is None else into
        for number, part in self.parts:
            part.of(whole.view(-1)).copy_(self.store.read(number, self.kind, part))
        return whole

    def write(self, values: Tensor, /) -> None:
        for number, part in self.parts:
            self.store.write(number, self.kind, part, part.of(values.reshape(-1)))


def _put(portion: Portion, target: Tensor, values: list[Tensor]) -> None:
    for part, value in zip(portion.slices, values, strict=True):
        part.within(target).copy_(value)


def _begins(sizes: list[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1] if sizes else []
