"""How a value that is cut by position passes operations: the rules of tensor parallelism, with positions in place of a dimension of a matrix.
Used by the proof of where positions meet, and by sequence parallelism."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

from phalanx.tracing import pass_rules, product_rules, view_rules
from phalanx.tracing.cut_values import Conflict, Cut, Key
from phalanx.tracing.module_graph import Op
from phalanx.tracing.view_shapes import PIECES, PRODUCTS, SAME, VIEWS
from phalanx.tracing.walk_state import WalkState


class PositionRules(WalkState):
    def rule(self, op: Op) -> Cut | list[Cut] | None:
        if op.kind == "getitem" and op.args[0] in self.lists:
            return self.lists[op.args[0]][op.args[1]]
        first = self.cut(op.args[0]) if op.args else None
        if op.kind == "embedding":
            return self.cut(op.args[1])
        if op.kind in PRODUCTS:
            return product_rules.product(self, op)
        if op.kind in VIEWS and first is not None:
            return view_rules.view(self, op, first)
        if op.kind in PIECES and first is not None:
            return view_rules.pieces(self, op, first)
        if op.kind == "index" and (rows := self._rows(op)) is not None:
            return rows
        if op.kind in ("gather", "scatter", "scatter_add") and op.args[1] % len(op.size) != (first or self._cut_of(op)).dim:
            return pass_rules.aligned(self, op, [x for x in op.inputs if self.cut(x) is not None])
        if op.kind == "one_hot" and first is not None:
            return first
        return pass_rules.other(self, op)

    def _cut_of(self, op: Op) -> Cut:
        return next(cut for source in op.inputs if (cut := self.cut(source)) is not None)

    def _rows(self, op: Op) -> Cut | None:
        """Rows of a table by the numbers of each token, and rows of tokens in their order, each several times."""
        table, indices = op.args[0], [x for x in op.args[1] if x is not None]
        if len(indices) != 1 or op.args[1][0] is None:
            return None
        cut, index = self.cut(table), self.cut(indices[0])
        if cut is None and index is not None:
            return index
        if (
            cut is not None
            and cut.dim == 0
            and index is None
            and len(indices[0].size) == 1
            and _in_order(indices[0], table.size[0])
        ):
            times = op.size[0] // table.size[0]
            return replace(cut, segments=tuple(size * times for size in cut.segments), place=None)
        return None

    # What the rules ask, where the answer is another one than for matrices.

    def part_of_sum(self, op: Op, found: frozenset[Key]) -> None:
        self.fail("a sum over positions")

    def want(self, op: Op, like: Cut, dim: int) -> None:
        self.fail("a value that is not cut by position")

    def seed(self, op: Op, dim: int) -> Cut | None:
        return None

    def fail(self, why: str, *cuts: Cut | None) -> NoReturn:
        raise Conflict(why, frozenset())


def _in_order(index: Op, size: int) -> bool:
    """Whether an index counts 0, 1, 2, …, each as often as the others."""
    while index.kind in SAME or index.kind in ("unsqueeze", "expand", "reshape", "view", "repeat_interleave", "flatten"):
        index = index.args[0]
    return index.kind == "arange" and index.size == (size,)


def sentence(op: Op, what: str) -> str:
    return f"{op.kind} in {op.owner or 'the model'} {what}"
