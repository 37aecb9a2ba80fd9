"""Every memory allocation of a rehearsal: when it was made and freed, its size, purpose and place in the program. `rehearsal/op_tracker`
writes it; `rehearsal/rehearse` reads peaks and components from it afterwards, when it is known what became of each allocation.

Only one step is rehearsed. The second half of the file derives the memory of the next step from it: what the first step created for
good exists from the beginning, and its gradients are freed first.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.rehearsal.allocator import Allocator, Block, NoRoom, rounded


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
