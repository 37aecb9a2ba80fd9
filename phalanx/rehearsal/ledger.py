"""Every memory allocation of a rehearsal: when it was made and freed, its size, purpose and place in the program. `rehearsal/op_tracker`
writes it; `rehearsal/rehearse` reads peaks and components from it afterwards, when it is known what became of each allocation.

The allocator follows c10/cuda/CUDACachingAllocator.cpp with default settings. Only one step is rehearsed: in the next one, what the
first created for good exists from the beginning, and its gradients are freed first."""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_LEAST = 512
_SMALL = 1 << 20
"""Blocks up to this size are cut from segments of 2 MiB."""
_SMALL_SEGMENT, _SEGMENT = 2 << 20, 20 << 20
_LARGE = 10 << 20
"""Blocks from this size on get a new segment of their own size."""
_STEP = 2 << 20


def rounded(size: int) -> int:
    """Bytes of an allocation, rounded up."""
    return max(_LEAST, -(-size // _LEAST) * _LEAST)


class NoRoom(Exception):
    """The device has no memory, even after all cached blocks are returned to CUDA."""

    def __init__(self, wanted: int, reserved: int, allocated: int):
        super().__init__(f"{wanted} bytes wanted, {reserved} reserved, {allocated} allocated")
        self.wanted, self.reserved, self.allocated = wanted, reserved, allocated


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment."""

    place: int
    size: int
    pool: _Pool
    before: Block | None = None
    after: Block | None = None
    free: bool = False


class _Pool:
    """Free blocks of one kind and stream, sorted by size and then by address."""

    __slots__ = ("blocks", "keys", "small")

    def __init__(self, small: bool):
        self.small = small
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}

    def put(self, block: Block) -> None:
        block.free = True
        insort(self.keys, (block.size, block.place))
        self.blocks[block.place] = block

    def drop(self, block: Block) -> None:
        block.free = False
        del self.keys[bisect_left(self.keys, (block.size, block.place))]
        del self.blocks[block.place]

    def fitting(self, size: int) -> Block | None:
        at = bisect_left(self.keys, (size, 0))
        return self.blocks[self.keys[at][1]] if at < len(self.keys) else None


class Allocator:
    """The allocator of one GPU. `limit`: bytes that it may reserve; None: no limit."""

    def __init__(self, limit: int | None = None):
        self._limit = limit
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._next = 0
        self.reserved = self.allocated = self.most_reserved = self.most_allocated = 0

    def allocate(self, size: int, stream: int = 0) -> Block:
        size = rounded(size)
        small = size <= _SMALL
        pool = self._pools.setdefault((small, stream), _Pool(small))
        block = pool.fitting(size)
        if block is None:
            block = self._segment(size, pool)
        else:
            pool.drop(block)
        rest = block.size - size
        if rest >= _LEAST if small else rest > _SMALL:
            after = Block(block.place + size, rest, pool, block, block.after)
            if block.after is not None:
                block.after.before = after
            block.after, block.size = after, size
            pool.put(after)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        self.allocated -= block.size
        pool = block.pool
        for other in (block.before, block.after):
            if other is None or not other.free:
                continue
            pool.drop(other)
            first, second = (other, block) if other is block.before else (block, other)
            first.size += second.size
            first.after = second.after
            if second.after is not None:
                second.after.before = first
            block = first
        pool.put(block)

    def _segment(self, size: int, pool: _Pool) -> Block:
        wanted = _SMALL_SEGMENT if size <= _SMALL else _SEGMENT if size < _LARGE else -(-size // _STEP) * _STEP
        if self._limit is not None and self.reserved + wanted > self._limit:
            self._release()
            if self.reserved + wanted > self._limit:
                raise NoRoom(size, self.reserved, self.allocated)
        self.reserved += wanted
        self.most_reserved = max(self.most_reserved, self.reserved)
        self._next += 2 * wanted  # segments are never adjacent
        return Block(self._next - wanted, wanted, pool)

    def _release(self) -> None:
        """Return all unused segments."""
        for pool in self._pools.values():
            for block in [block for block in pool.blocks.values() if block.before is None and block.after is None]:
                pool.drop(block)
                self.reserved -= block.size


class ProgramLocation(NamedTuple):
    """A place in the program."""

    phase: str
    """build, forward, loss, backward, recompute, reduce, optimizer, update."""
    module: str
    action: str
    """The micro-batch; in a pipeline stage, kind and micro-batch, as schedules write them."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """One allocation that exists at some time."""

    number: int
    size: int
    where: ProgramLocation
    operation: str
    component: str


class Ledger:
    """All allocations of the device, or of host memory."""

    def __init__(self, *, step: int = 512) -> None:
        """`step`: sizes are rounded up to a multiple of it."""
        self._step = step
        self.events = array("q")
        """Numbers of allocations, from 1: positive when made, negative when freed."""
        self.sizes = array("q", [0])
        self.streams = array("b", [0])
        self._wheres = array("i", [0])
        self._operations = array("i", [0])
        self._known_wheres: dict[ProgramLocation, int] = {}
        self._known_operations: dict[str, int] = {}
        self.phases: list[str] = [""]
        """The phase of each allocation."""
        self.components: dict[int, str] = {}
        """Components of allocations that are known; for others the phase decides."""
        self.now = self.peak = self.peak_at = 0

    def add(self, size: int, where: ProgramLocation, operation: str, stream: int = 0) -> int:
        number = len(self.sizes)
        self.sizes.append(size)
        self.streams.append(stream)
        self._wheres.append(self._known_wheres.setdefault(where, len(self._known_wheres)))
        self._operations.append(self._known_operations.setdefault(operation, len(self._known_operations)))
        self.phases.append(where.phase)
        self.events.append(number)
        self.now += self.rounded_size(number)
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, len(self.events)
        return number

    def drop(self, number: int) -> None:
        self.events.append(-number)
        self.now -= self.rounded_size(number)

    def rounded_size(self, number: int) -> int:
        """Bytes of an allocation, rounded up as the allocator does."""
        size = self.sizes[number]
        return rounded(size) if self._step == 512 else size

    def forget_peak(self) -> None:
        """Forget earlier peaks."""
        self.peak, self.peak_at = self.now, len(self.events)

    def living(self, at: int) -> Iterator[Allocation]:
        """The allocations that exist after the first `at` events."""
        alive: dict[int, None] = {}
        for event in self.events[:at]:
            if event > 0:
                alive[event] = None
            else:
                alive.pop(-event, None)
        wheres, operations = list(self._known_wheres), list(self._known_operations)
        for number in alive:
            where, operation = wheres[self._wheres[number]], operations[self._operations[number]]
            yield Allocation(number, self.rounded_size(number), where, operation, self.component(number, where))

    def where(self, number: int) -> tuple[ProgramLocation, str]:
        """The place in the program and the operation that made an allocation."""
        wheres, operations = list(self._known_wheres), list(self._known_operations)
        return wheres[self._wheres[number]], operations[self._operations[number]]

    def component(self, number: int, where: ProgramLocation) -> str:
        known = self.components.get(number)
        if known is not None:
            return known
        return _BY_PHASE.get(where.phase, "temporary")


_BY_PHASE = {
    "build": "buffers",
    "inputs": "inputs",
    "forward": "activations",
    "recompute": "activations",
    "loss": "logits and loss",
}
COMPONENTS = (
    "parameters",
    "gradients",
    "optimizer",
    "gathered parameters",
    "weights in compute format",
    "activations",
    "logits and loss",
    "communication",
    "inputs",
    "buffers",
    "temporary",
    "workspaces",
)
"""In the order of display."""


@dataclass(frozen=True, slots=True)
class FirstStep:
    """What became of the allocations of the first step."""

    built: int
    """Number of events before the step."""
    permanent: frozenset[int]
    """Allocations of the step that stay."""
    gradients: frozenset[int]
    """Allocations that the next step frees at its beginning."""


def first_step(ledger: Ledger, built: int) -> FirstStep:
    """`built`: number of events before the step."""
    alive: dict[int, None] = {}
    for event in ledger.events[built:]:
        if event > 0:
            alive[event] = None
        else:
            alive.pop(-event, None)
    gradients = frozenset(number for number in alive if ledger.components.get(number) == "gradients")
    return FirstStep(built, frozenset(alive) - gradients, gradients)


def second_step(ledger: Ledger, first: FirstStep) -> Iterator[int]:
    """The events of the second step."""
    for number in first.gradients:
        yield -number
    for event in ledger.events[first.built :]:
        if event not in first.permanent:
            yield event


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest memory of the first two steps."""

    bytes: int
    at: int
    """Number of events, counted from the beginning of the rehearsal, after which it is reached."""
    second: bool


def peak(ledger: Ledger, first: FirstStep) -> Peak:
    now, most, at = 0, -1, 0
    for index, event in enumerate(ledger.events, start=1):
        now += ledger.rounded_size(event) if event > 0 else -ledger.rounded_size(-event)
        if index > first.built and now > most:
            most, at = now, index
    in_first = Peak(most, at, False)
    now -= sum(ledger.rounded_size(number) for number in first.gradients)
    most, at = -1, 0
    for index, event in enumerate(ledger.events[first.built :], start=first.built + 1):
        if event not in first.permanent:
            now += ledger.rounded_size(event) if event > 0 else -ledger.rounded_size(-event)
        if now > most:
            most, at = now, index
    in_second = Peak(most, at, True)
    return in_second if in_second.bytes >= in_first.bytes else in_first


def live_at_peak(ledger: Ledger, first: FirstStep, top: Peak) -> list[Allocation]:
    """The allocations that exist at the peak."""
    alive = list(ledger.living(top.at))
    if top.second:
        known = {allocation.number for allocation in alive}
        alive += [
            allocation for allocation in ledger.living(len(ledger.events)) if allocation.number in first.permanent - known
        ]
    return alive


@dataclass(frozen=True, slots=True)
class Reserved:
    """The memory of two steps in a GPU's caching allocator."""

    allocated: int
    reserved: int
    without: tuple[int, NoRoom] | None
    """The first allocation that fails, and its error; None: none fails."""


def reserve(ledger: Ledger, first: FirstStep, limit: int | None) -> Reserved:
    """Runs the allocations of two steps through an allocator that may reserve `limit` bytes."""
    allocator = Allocator(limit)
    blocks: dict[int, Block] = {}
    sizes, streams = ledger.sizes, ledger.streams

    def replay(events: Iterator[int]) -> None:
        for event in events:
            if event < 0:
                if (block := blocks.pop(-event, None)) is not None:
                    allocator.free(block)
            elif sizes[event]:
                try:
                    blocks[event] = allocator.allocate(sizes[event], streams[event])
                except NoRoom as error:
                    raise _AllocationFailed(event, error) from None

    without = None
    try:
        replay(iter(ledger.events))
        replay(second_step(ledger, first))
    except _AllocationFailed as stopped:
        without = stopped.allocation, stopped.error
    return Reserved(allocator.most_allocated, allocator.most_reserved, without)


class _AllocationFailed(Exception):
    def __init__(self, allocation: int, error: NoRoom):
        super().__init__()
        self.allocation, self.error = allocation, error
