"""Which values of a divided module have only a rank's own positions, given where positions are shared out and gathered. The first operation that
needs positions of other ranks ends the walk with `Meeting`. Used by `sequence_seams`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from phalanx.tracing.cut_values import Change, Conflict, Cut, Refine, Restart
from phalanx.tracing.cut_walk import Walk
from phalanx.tracing.module_graph import Op
from phalanx.tracing.position_rules import PositionRules
from phalanx.tracing.walk_state import Limits

GIVEN = ("input", "parameter", "buffer", "constant")
PARTS = 2
"""Parts of a sequence in a trace, whatever the number of ranks: it has an even number of positions."""


class Meeting(Exception):
    """An operation reads own positions where it needs all of them."""

    def __init__(self, op: Op):
        super().__init__(op.kind)
        self.op = op


@dataclass(slots=True)
class Placed:
    """Where positions change hands, by the call of a module and the value that is passed there."""

    shared: set[tuple[str, Op]] = field(default_factory=set)
    """Arguments of which a rank goes on with its own positions."""
    entered: set[tuple[str, Op]] = field(default_factory=set)
    """Arguments that tensor parallelism enters: they have all positions inside."""
    whole: set[str] = field(default_factory=set)
    """Calls in which everything has all positions."""
    returned: set[tuple[str, Op]] = field(default_factory=set)
    """Results of which a rank goes on with its own positions."""


class SequenceWalk(PositionRules):
    """`cuts` has the values that are computed from own positions."""

    def __init__(self, tensor: Walk, placed: Placed):
        super().__init__(tensor.graph, Limits(PARTS, frozenset(), {}, False), {}, frozenset())
        self.tensor, self.placed = tensor, placed

    def run(self) -> None:
        for op in self.graph.ops:
            self.op, self.change = op, Change()
            if op.kind not in GIVEN and any(self.cut(x) is not None or x in self.lists for x in op.inputs):
                self._step(op)
        for op in self.graph.outputs:
            if self.seen(op, ()) is not None:
                raise Meeting(op)

    def _step(self, op: Op) -> None:
        tensor = self.tensor
        divided = op in tensor.cuts or op in tensor.lists or op in tensor.parts or op in tensor.changes
        if divided or op.kind == "scaled_dot_product_attention":
            raise Meeting(op)
        try:
            found = self.rule(op)
        except (Conflict, Refine, Restart):
            raise Meeting(op) from None
        if isinstance(found, list):
            self.lists[op] = found
        elif found is None:
            raise Meeting(op)
        else:
            self.cuts[op] = found

    def cut(self, op: object) -> Cut | None:
        """As the operation at hand sees a value."""
        return self.seen(op, self.op.calls) if isinstance(op, Op) else None

    def seen(self, value: Op, calls: Iterable[str]) -> Cut | None:
        """How a value is divided inside of these calls of modules; None: it has all positions."""
        calls, placed = tuple(calls), self.placed
        cut = self.cuts.get(value)
        if any(passed is value and call not in calls for call, passed in placed.returned):
            cut = _own(value)
        for call in calls:
            if (call, value) in placed.entered or (call in placed.whole and call not in value.calls):
                cut = None
            elif (call, value) in placed.shared:
                cut = _own(value)
        return cut


def _own(value: Op) -> Cut:
    return Cut(1, (value.size[1],), frozenset([("input", 1)]))
