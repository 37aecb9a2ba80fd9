"""One walk over the graph of a module, in order: which values are cut, given which parameters may not be. The rules say how each
operation passes a cut on; the first that cannot ends the walk with a Conflict. Used by `cut_search`."""

from __future__ import annotations

import math

from phalanx.tracing import pass_rules, product_rules, view_rules
from phalanx.tracing.cut_values import Change, Conflict, Cut, Key, Restart
from phalanx.tracing.module_graph import Op
from phalanx.tracing.view_shapes import ATTENTIONS, PIECES, PRODUCTS, VIEWS
from phalanx.tracing.walk_state import WalkState

SUMMED = {
    "mul",
    "div",
    "add",
    "sub",
    "neg",
    "sum",
    "mean",
    "to",
    "type_as",
    "contiguous",
    "clone",
    "alias",
    "dropout",
    "index",
    "getitem",
}
"""Operations that give parts of a sum from parts of a sum, besides views."""
ZEROS = {"zeros", "zeros_like", "new_zeros"}
_BEGIN = {"parameter", "embedding", *PRODUCTS, *ATTENTIONS}
"""Operations that a cut can begin at."""
_UNCHANGED = Change()


class Walk(WalkState):
    def run(self) -> None:
        cuts, lists, parts, known = self.cuts, self.lists, self.parts, self.known
        for op in self.graph.ops:
            # A search takes thousands of walks, and most operations see nothing but whole values.
            if op.kind in _BEGIN or op in known or any(x in cuts or x in parts or x in lists for x in op.inputs):
                self.op = op
                self._step(op)
        for op in self.graph.outputs:
            self._end(op)
        entered = [op for op in self.entered if op.kind != "parameter" and op.grad]
        self.sent += sum(math.prod(op.size) * self.graph.weight(op.users[0]) for op in entered)

    def _step(self, op: Op) -> None:
        self.change = Change()
        if op.kind == "parameter":
            if (known := self.known.get(op.name)) is not None:  # whoever else reads it sees a part too
                self.cuts[op] = known
            return
        if op.kind in ("input", "buffer", "constant"):
            return
        cut = self._rule(op)
        if isinstance(cut, list):
            self.lists[op] = cut
        elif cut is not None:
            self.cuts[op] = cut
        if self.change != _UNCHANGED:
            self.changes[op] = self.change

    def _rule(self, op: Op) -> Cut | list[Cut] | None:
        if any(source in self.parts for source in op.inputs):
            self._pass_sum(op)
            return None
        if op.kind == "getitem" and op.args[0] in self.lists:
            return self.lists[op.args[0]][op.args[1]]
        if op.kind == "embedding":
            return product_rules.lookup(self, op)
        if op.kind in PRODUCTS:
            return product_rules.product(self, op)
        if op in self.known:
            return self.demanded(op)
        if not any(source in self.cuts or source in self.lists for source in op.inputs):
            if op.kind in ATTENTIONS:
                self.work += product_rules.attention_work(self, op)
            return None
        if op.kind in ATTENTIONS:
            return product_rules.attention(self, op)
        if op.kind in VIEWS and self.cut(op.args[0]) is not None:
            return view_rules.view(self, op, self.cuts[op.args[0]])
        if op.kind in PIECES and self.cut(op.args[0]) is not None:
            return view_rules.pieces(self, op, self.cuts[op.args[0]])
        return pass_rules.other(self, op)

    def _pass_sum(self, op: Op) -> None:
        parts = [source for source in op.inputs if source in self.parts]
        others = [source for source in op.inputs if source not in self.parts and source.shape is not None]
        linear = op.kind in SUMMED or op.kind in VIEWS
        if op.kind in ("add", "sub"):
            self.change.shared = bool(others) and op.kind == "add" and op.owner in self.limits.shares
            linear = not others or self.change.shared
        elif op.kind in ("mul", "div"):
            linear = len(parts) == 1 and op.args[0] in self.parts
            linear = linear or (op.kind == "mul" and len(parts) == 1)
        elif op.kind in ("index_add", "scatter_add"):
            linear = op.args[0].kind in ZEROS
        if not linear or any(source in self.cuts for source in others) or op.owner != parts[0].owner:
            self.summed.update(parts)
            raise Restart
        self.enter(*others)
        found = frozenset[Key]().union(*(self.parts[source] for source in parts))
        self.part_of_sum(op, found)

    def _end(self, op: Op) -> None:
        cut = self.cuts.get(op)
        if op in self.parts:
            self.summed.add(op)
            raise Restart
        if cut is None:
            return
        if cut.dim != len(op.size) - 1 or len(cut.segments) > 1 or cut.place is None or cut.place.scale != 1:
            raise Conflict("it is not the logits, cut by the vocabulary, that the model returns", cut.origins)
        for parameter, dim in cut.origins:
            self.roles[parameter, dim, 0] = "vocab"
