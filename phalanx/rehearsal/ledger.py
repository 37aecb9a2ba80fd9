"""Every piece of memory of a rehearsal: when it came and went, how large, what for and where in the program. `rehearsal/op_tracker` writes
it; peaks, components and pictures are read off it afterwards, when it is known what became of each piece."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.rehearsal.allocator import rounded


class Where(NamedTuple):
    """A place in the program."""

    phase: str
    """build, forward, loss, backward, recompute, reduce, optimizer, update."""
    module: str
    action: str
    """Which micro-batch; in a pipeline kind, stage and micro-batch, as schedules write them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of memory that lives at a moment."""

    number: int
    size: int
    where: Where
    operation: str
    component: str


class Ledger:
    """Of one place: the device, or the host's memory."""

    def __init__(self, *, step: int = 512) -> None:
        """`step`: sizes are rounded up to it."""
        self._step = step
        self.events = array("q")
        """Numbers of pieces, counted from 1, as they come; negative as they go."""
        self.sizes = array("q", [0])
        self.streams = array("b", [0])
        self._wheres = array("i", [0])
        self._operations = array("i", [0])
        self._known_wheres: dict[Where, int] = {}
        self._known_operations: dict[str, int] = {}
        self.phases: list[str] = [""]
        """Of each piece."""
        self.components: dict[int, str] = {}
        """What is known of single pieces; of all others their place in the program tells."""
        self.now = self.peak = self.peak_at = 0

    def add(self, size: int, where: Where, operation: str, stream: int = 0) -> int:
        number = len(self.sizes)
        self.sizes.append(size)
        self.streams.append(stream)
        self._wheres.append(self._known_wheres.setdefault(where, len(self._known_wheres)))
        self._operations.append(self._known_operations.setdefault(operation, len(self._known_operations)))
        self.phases.append(where.phase)
        self.events.append(number)
        self.now += self.taken(number)
        if self.now > self.peak:
            self.peak, self.peak_at = self.now, len(self.events)
        return number

    def drop(self, number: int) -> None:
        self.events.append(-number)
        self.now -= self.taken(number)

    def taken(self, number: int) -> int:
        """Bytes, as an allocator gives them."""
        size = self.sizes[number]
        return rounded(size) if self._step == 512 else size

    def forget_peak(self) -> None:
        """Peaks from here on."""
        self.peak, self.peak_at = self.now, len(self.events)

    def living(self, at: int) -> Iterator[Piece]:
        """All that lives after so many events."""
        alive: dict[int, None] = {}
        for event in self.events[:at]:
            if event > 0:
                alive[event] = None
            else:
                alive.pop(-event, None)
        wheres, operations = list(self._known_wheres), list(self._known_operations)
        for number in alive:
            where, operation = wheres[self._wheres[number]], operations[self._operations[number]]
            yield Piece(number, self.taken(number), where, operation, self.component(number, where))

    def where(self, number: int) -> tuple[Where, str]:
        """The place in the program that made a piece, and the operation."""
        wheres, operations = list(self._known_wheres), list(self._known_operations)
        return wheres[self._wheres[number]], operations[self._operations[number]]

    def component(self, number: int, where: Where) -> str:
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
"""In the order in which they are shown."""
