"""Every memory allocation of a rehearsal: when it was made and freed, its size, purpose and place in the program. `rehearsal/op_tracker`
writes it; `rehearsal/rehearse` reads peaks and components from it afterwards, when it is known what became of each allocation.

The allocator follows c10/cuda/CUDACachingAllocator.cpp with default settings. Only one step is rehearsed: in the next one, what the
first created for good exists from the beginning, and its gradients are freed first.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate, chain, islice
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


class ProgramLocation(NamedTuple):
    """A place in the program."""

    phase: str
    """build, forward, loss, backward, recompute, reduce, optimizer, update."""
    module: str
    action: str
    """The micro-batch; in a pipeline stage, kind and micro-batch, as schedules write them."""
    operation: str = ""

    def __str__(self) -> str:
        where = f" of {self.module}" if self.module else ""
        which = f", {self.action}" if self.action else ""
        return f"{self.phase}{where}{which} ({self.operation})"


class Ledger:
    """All allocations of the device, or of host memory, numbered from 1."""

    def __init__(self) -> None:
        self.events = array("q")
        """Numbers of allocations: positive when made, negative when freed."""
        self.sizes = array("q", [0])
        self.streams = array("b", [0])
        self.origins = [ProgramLocation("", "", "")]
        """Where in the program each allocation was made; equal ones are one object."""
        self.places: list[ProgramLocation] = []
        """Where in the program each event happened."""
        self.components: dict[int, str] = {}
        """Components of allocations that are known; for others the phase decides."""
        self.now = self.peak = 0
        self._known: dict[ProgramLocation, ProgramLocation] = {}

    def add(self, size: int, where: ProgramLocation, operation: str, stream: int = 0) -> int:
        number = len(self.sizes)
        origin = ProgramLocation(where.phase, where.module, where.action, operation)
        self.sizes.append(size)
        self.streams.append(stream)
        self.origins.append(self._known.setdefault(origin, origin))
        self.events.append(number)
        self.places.append(where)
        self.now += rounded(size)
        self.peak = max(self.peak, self.now)
        return number

    def drop(self, number: int, where: ProgramLocation) -> None:
        self.events.append(-number)
        self.places.append(where)
        self.now -= rounded(self.sizes[number])

    def change(self, event: int) -> int:
        """Bytes by which an event changes the memory in use, rounded up as the allocator does."""
        return rounded(self.sizes[event]) if event > 0 else -rounded(self.sizes[-event])

    def component(self, number: int) -> str:
        return self.components.get(number) or _BY_PHASE.get(self.origins[number].phase, "temporary")


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
    alive = _alive(ledger.events[built:])
    gradients = frozenset(number for number in alive if ledger.components.get(number) == "gradients")
    return FirstStep(built, frozenset(alive) - gradients, gradients)


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest memory of the first two steps."""

    bytes: int
    at: int
    """Number of events, counted from the beginning of the rehearsal, after which it is reached."""
    second: bool


def peak(ledger: Ledger, first: FirstStep) -> Peak:
    of_first = islice(accumulate(map(ledger.change, ledger.events)), first.built, None)
    changes = (0 if event in first.permanent else ledger.change(event) for event in ledger.events[first.built :])
    kept = ledger.now - sum(map(ledger.change, first.gradients))
    of_second = islice(accumulate(changes, initial=kept), 1, None)
    peaks = []
    for second, totals in ((True, of_second), (False, of_first)):
        most, at = max(((total, -index) for index, total in enumerate(totals, start=first.built + 1)), default=(-1, 0))
        peaks.append(Peak(most, -at, second))
    return max(peaks, key=lambda peak: peak.bytes)


def live_at_peak(ledger: Ledger, first: FirstStep, top: Peak) -> list[int]:
    """The allocations that exist at the peak."""
    alive = _alive(ledger.events[: top.at])
    if top.second:
        alive |= {number: None for number in _alive(ledger.events) if number in first.permanent}
    return list(alive)


def _alive(events: Iterable[int]) -> dict[int, None]:
    """The allocations that these events make and do not free, in order."""
    alive: dict[int, None] = {}
    for event in events:
        if event > 0:
            alive[event] = None
        else:
            alive.pop(-event, None)
    return alive


@dataclass(frozen=True, slots=True)
class Reserved:
    """The memory of two steps in a GPU's caching allocator."""

    allocated: int
    reserved: int
    failed: int | None = None
    """The first allocation that fails; None: none does."""


def reserve(ledger: Ledger, first: FirstStep, limit: int | None) -> Reserved:
    """Runs the allocations of two steps through an allocator that may reserve `limit` bytes."""
    allocator = Allocator(limit)
    blocks: dict[int, Block] = {}
    second = (event for event in ledger.events[first.built :] if event not in first.permanent)
    failed = None
    for event in chain(ledger.events, (-number for number in first.gradients), second):
        if event < 0:
            if -event in blocks:
                allocator.free(blocks.pop(-event))
        elif ledger.sizes[event]:
            block = allocator.allocate(ledger.sizes[event], ledger.streams[event])
            if block is None:
                failed = event
                break
            blocks[event] = block
    return Reserved(allocator.most_allocated, allocator.most_reserved, failed)


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment."""

    place: int
    size: int
    pool: _Pool
    before: Block | None = None
    after: Block | None = None
    free: bool = False


class _Pool(list[tuple[int, int, "Block"]]):
    """Free blocks of one kind and stream, by size and then by address."""

    def put(self, block: Block) -> None:
        block.free = True
        insort(self, (block.size, block.place, block))

    def drop(self, block: Block) -> None:
        block.free = False
        del self[bisect_left(self, (block.size, block.place))]

    def fitting(self, size: int) -> Block | None:
        at = bisect_left(self, (size,))
        return self[at][2] if at < len(self) else None


class Allocator:
    """The caching allocator of one GPU, on sizes alone. `limit`: bytes that it may reserve; None: no limit."""

    def __init__(self, limit: int | None = None):
        self._limit = limit
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._next = 0
        self.reserved = self.allocated = self.most_reserved = self.most_allocated = 0

    def allocate(self, size: int, stream: int = 0) -> Block | None:
        """None: the device has no memory, even after all cached blocks are returned to CUDA."""
        size = rounded(size)
        small = size <= _SMALL
        pool = self._pools.setdefault((small, stream), _Pool())
        block = pool.fitting(size)
        if block is not None:
            pool.drop(block)
        elif (block := self._segment(size, pool)) is None:
            return None
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

    def _segment(self, size: int, pool: _Pool) -> Block | None:
        wanted = _SMALL_SEGMENT if size <= _SMALL else _SEGMENT if size < _LARGE else -(-size // _STEP) * _STEP
        if self._limit is not None and self.reserved + wanted > self._limit:
            self._release()
            if self.reserved + wanted > self._limit:
                return None
        self.reserved += wanted
        self.most_reserved = max(self.most_reserved, self.reserved)
        self._next += 2 * wanted  # segments are never adjacent
        return Block(self._next - wanted, wanted, pool)

    def _release(self) -> None:
        """Return all unused segments."""
        for pool in self._pools.values():
            for size, _, block in list(pool):
                if block.before is None and block.after is None:
                    pool.drop(block)
                    self.reserved -= size
