"""What gradients of values that every rank has whole look like with sequence parallelism: whole, or a part that must be summed over the ranks. A
parameter that is used on own positions gets a part. Used by `sequence_seams`."""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.tracing.cut_values import Change
from phalanx.tracing.module_graph import Op, within
from phalanx.tracing.seams import BOTH, PART, WHOLE, Seams
from phalanx.tracing.sequence_walk import SequenceWalk
from phalanx.tracing.view_shapes import PRODUCTS


class SequenceGradients:
    """Of a finished walk. `scattered`: modules whose sums go to own positions."""

    def __init__(self, walk: SequenceWalk, seams: Seams, scattered: set[str]):
        self.walk, self.tensor, self.seams, self.scattered = walk, walk.tensor, seams, scattered
        self.known: dict[Op, str | None] = {}
        for op in reversed(walk.graph.ops):  # users first
            self.status(op)

    def partial(self) -> set[str]:
        """Whole parameters of whose gradient each rank has a part."""
        return {op.name for op in self.walk.graph.parameters.values() if op not in self.tensor.cuts and self.status(op) == PART}

    def problems(self) -> Iterator[str]:
        """Values whose gradient would be wrong."""
        walk, tensor = self.walk, self.tensor
        for op in walk.graph.ops:
            if (
                not op.grad
                or op in walk.cuts
                or op in walk.lists
                or op in tensor.cuts
                or op in tensor.lists
                or op in tensor.parts
            ):
                continue
            status, name = self.status(op), op.name or f"the result of {op.kind} in {op.owner or 'the model'}"
            if status == BOTH:
                yield f"{name} is used both with the positions of one rank and with all of them"
            elif status == PART and tensor.changes.get(op, Change()).leave:
                yield f"{name} is a sum over the ranks that is used with the positions of one rank"

    def inside(self, value: Op, call: str) -> set[str]:
        """Of the uses of a value in a call of a module into which all of its positions are gathered."""
        uses = [user for user in value.users if call in user.calls and self.walk.seen(value, user.calls) is None]
        return {status for user in uses if (status := self._whole_use(value, user, call))}

    def status(self, value: Op) -> str | None:
        if value not in self.known:
            found = {status for user in value.users if (status := self._use(value, user))}
            if value in self.walk.graph.outputs:
                found.add(PART if value in self.tensor.cuts else WHOLE)
            self.known[value] = BOTH if len(found) > 1 or BOTH in found else next(iter(found), None)
        return self.known[value]

    def _use(self, value: Op, user: Op) -> str | None:
        """What gradient a use gives; None: that of own positions, or none."""
        if not user.grad or value in self.walk.cuts or value in self.walk.lists:
            return None
        shared = any(passed is value and call not in user.calls for call, passed in self.walk.placed.returned)
        if shared or self.walk.seen(value, user.calls) is not None:
            return WHOLE  # gathered on the way back
        return self._whole_use(value, user, None)

    def _whole_use(self, value: Op, user: Op, gathered: str | None) -> str | None:
        """Of a use that sees all positions. `gathered`: the call into which they are gathered, which sums gradients itself."""
        walk, tensor = self.walk, self.tensor
        if not user.grad:
            return None
        if tensor.limits.projects and user.owner == "" and user.kind in PRODUCTS:
            return WHOLE
        if any((call, value) in walk.placed.entered for call in user.calls if call != gathered):
            return WHOLE
        change = tensor.changes.get(user, Change())
        if value is change.bias:
            return PART if user.owner in self.scattered else self.status(user)
        if user in tensor.cuts or user in tensor.lists or user in tensor.parts or change.leave:
            rewritten = any(within(user.owner, path) for path in self.seams.rewritten)
            return WHOLE if rewritten and value.kind != "parameter" else PART
        if user in walk.cuts or user in walk.lists:
            return PART
        return self.status(user)
