"""Where positions of a sequence meet. Context and sequence parallelism give each rank some positions of every sequence: that is exact if
positions meet in attention and nowhere else, which the graph of the module proves or refutes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import nn

from phalanx.tracing.cut_values import Change, Conflict, Cut, Refine, Restart
from phalanx.tracing.infer_cuts import LENGTH, traced
from phalanx.tracing.module_graph import Op
from phalanx.tracing.position_rules import PositionRules, sentence
from phalanx.tracing.walk_state import Limits


@dataclass(frozen=True, slots=True)
class Positions:
    """Whether a model can be cut by position."""

    attentions: int
    """Calls of scaled dot-product attention in one forward, in all layers."""
    mixed: str | None
    """The first operation outside of attention whose result at one position depends on others, with its module; None: there is none."""


def positions_meet(model: nn.Module, length: int = LENGTH) -> Positions:
    """As for two ranks, so that a batch of sequences is never taken for one sequence. `length` is even."""
    limits = Limits(2, frozenset(), {}, False)
    return _PositionWalk(traced(model, length).graph, limits, {}, frozenset()).run()


class _PositionWalk(PositionRules):
    """Inputs are cut by position. Values that depend on several positions are remembered with what mixed them: a mask may be made of such values."""

    def run(self) -> Positions:
        self.mixed: dict[Op, str] = {}
        attentions = 0
        for op in self.graph.ops:
            self.op, self.change = op, Change()
            if op.kind == "input" and op.shape is not None:
                self.cuts[op] = Cut(1, (op.size[1],), frozenset([("input", 1)]))
            elif op.kind == "scaled_dot_product_attention" and self._attention(op):
                attentions += self.graph.weight(op)
            elif op.kind not in ("input", "parameter", "buffer", "constant") and op not in self.mixed:
                self._step(op)
        ends = [self._end(op) for op in self.graph.outputs]
        return Positions(attentions, next((end for end in ends if end is not None), None))

    def _end(self, op: Op) -> str | None:
        if op in self.mixed:
            return self.mixed[op]
        cut = self.cuts.get(op)
        return None if cut is not None and cut.dim == 1 else "the result does not depend on each position by itself"

    def _attention(self, op: Op) -> bool:
        """Masks are the business of whoever replaces attention."""
        for source in op.args[:3]:
            if source in self.mixed:
                self.mixed[op] = self.mixed[source]
                return False
        if any((cut := self.cut(source)) is None or cut.dim != 2 for source in op.args[:3]):
            self.mixed[op] = sentence(op, "attends over something else than positions")
            return False
        self.cuts[op] = replace(self.cuts[op.args[0]], place=None)
        return True

    def _step(self, op: Op) -> None:
        if known := next((self.mixed[source] for source in op.inputs if source in self.mixed), None):
            self.mixed[op] = known
        elif any(source in self.cuts or source in self.lists for source in op.inputs):
            try:
                found = self.rule(op)
            except (Conflict, Refine, Restart):
                self.mixed[op] = sentence(op, "mixes positions")
                return
            if isinstance(found, list):
                self.lists[op] = found
            elif found is not None:
                self.cuts[op] = found
