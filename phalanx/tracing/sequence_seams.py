"""Where sequence parallelism gathers the positions of all ranks and gives each its own again, in terms of modules. Used by `infer_cuts`.

The first layer takes its own positions of the residual stream, and what tensor parallelism enters gathers them. Sums over the ranks go to own
positions. Two repairs are tried where an operation would need positions of other ranks: a value that all ranks have whole and that meets own
positions is shared out where a module returns or takes it, and a module inside of a layer is computed whole by every rank. An operation that
neither helps is refused with its module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from phalanx.spec.cut_plan import Argument, CutPlan, Result, SequencePlan
from phalanx.spec.errors import RunError
from phalanx.tracing.cut_walk import Walk
from phalanx.tracing.layer_sample import Sample
from phalanx.tracing.module_graph import BATCH, Op, Passed, within
from phalanx.tracing.seams import PART, WHOLE, Seams
from phalanx.tracing.sequence_gradients import SequenceGradients
from phalanx.tracing.sequence_walk import GIVEN, Meeting, Placed, SequenceWalk
from phalanx.tracing.view_shapes import SAME, VIEWS


class SequenceSeams:
    """Of one traced model, whose own modules `plan` names."""

    def __init__(self, sample: Sample, tensor: Walk, seams: Seams, length: int, *, ends_whole: bool = False):
        """`ends_whole`: what follows the layers has all positions, as some models shape their states like their tokens there."""
        self.sample, self.tensor, self.seams, self.length = sample, tensor, seams, length
        self.graph, self.placed = tensor.graph, Placed()
        self.name = type(sample.model).__name__
        layers = getattr(sample.model, "layers_path", None)
        if layers is None:
            raise RunError(
                f"layout.sequence = true divides the residual stream between layers, but {self.name} holds no list of layers: put them into an "
                "nn.ModuleList, or remove layout.sequence."
            )
        self.layers = [f"{layers}.{key}" for key in dict(sample.model.get_submodule(layers).named_children())]
        self.whole = set(seams.rewritten)
        """Modules that every rank computes from all positions."""
        self.scattered: dict[str, tuple[str, Op]] = {}
        """Modules whose sum goes to own positions: call and result."""
        self._begin()
        if ends_whole:
            self.whole |= self._end()
        while not self._settled():
            pass
        self.gradients = SequenceGradients(self.walk, seams, set(self.scattered))
        self.plan = self._plan()

    def partial(self) -> set[str]:
        return self.gradients.partial()

    def expanded(self, plan: CutPlan) -> CutPlan:
        """The plan of all layers with sequence parallelism. The layers after the first are given their part of the stream by the one before."""
        many, own = self.sample.names, self.plan

        def each(arguments: tuple[Argument, ...]) -> tuple[Argument, ...]:
            return tuple(replace(one, module=name) for one in arguments for name in many(one.module))

        sequence = SequencePlan(
            shared=tuple(one for one in own.shared if one == self.stream)
            + each(tuple(x for x in own.shared if x != self.stream)),
            gathered=each(own.gathered),
            joined=each(own.joined),
            scattered=tuple(name for one in own.scattered for name in many(one)),
            returned=tuple(replace(one, module=name) for one in own.returned for name in many(one.module)),
        )
        partial = frozenset(each for name in self.partial() for each in many(name))
        return replace(plan, partial=partial, sequence=sequence)

    # Placing.

    def _begin(self) -> None:
        """Shares the stream before the first layer, enters as tensor parallelism does, and lets its sums go to own positions."""
        calls = [passed for passed in self.graph.arguments if passed.module in self.layers]
        first = [passed for passed in calls if passed.module == calls[0].module]
        stream = [passed for passed in first if passed.value.grad and self._spans(passed.value) and "." not in passed.name][:1]
        if not stream or len({passed.call for passed in first}) > 1:
            raise RunError(
                f"layout.sequence = true divides the residual stream between the layers of {self.name}, but its first layer is not called once "
                "with a tensor of [sequences, positions, width]. Remove layout.sequence."
            )
        self.stream = Argument(stream[0].module, _key(stream[0].name))
        self.placed.shared = {(passed.call, passed.value) for passed in stream}
        enters = {(enter.module, str(enter.argument)) for enter in self.seams.enters}
        self.placed.entered = {(p.call, p.value) for p in self.graph.arguments if (p.module, p.name) in enters}
        begin = next(op.index for op in self.graph.ops if stream[0].call in op.calls)
        leaves = {leave.module for leave in self.seams.leaves}
        self.sums = [
            op for op, change in self.tensor.changes.items() if change.leave and op.owner in leaves and op.index >= begin
        ]

    def _settled(self) -> bool:
        """Whether no operation needs positions of other ranks; else something has changed. Raises RunError if nothing helps."""
        meeting = self._walk()
        if meeting is not None:
            if not self._mend(meeting):
                raise self._refusal(f"{meeting.kind} in {meeting.owner or 'the model'}")
            return False
        for passed in self.graph.arguments:
            moved = (passed.call, passed.value) in self.placed.entered or passed.call in self.placed.whole
            if moved and self._is_odd(passed):
                if not self._make_whole(passed.module.rpartition(".")[0]):
                    raise self._refusal(passed.module)
                return False
        return True

    def _is_odd(self, passed: Passed) -> bool:
        """Whether a module is given own positions elsewhere than in dimension 1, where they are moved."""
        cut = self.walk.seen(passed.value, passed.calls[:-1])
        return cut is not None and (cut.dim, cut.segments) != (1, (self.length,))

    def _end(self) -> set[str]:
        """The first module after the layers that is given a tensor."""
        inside = [any(within(passed.module, layer) for layer in self.layers) for passed in self.graph.arguments]
        after = self.graph.arguments[len(inside) - inside[::-1].index(True) :]
        return {passed.module for passed in after[:1]}

    def _walk(self) -> Op | None:
        """The operation at which own positions meet others; None: there is none."""
        whole = {passed.call for passed in self.graph.arguments if passed.module in self.whole}
        self.placed.whole = whole
        self.scattered = {
            op.owner: (op.calls[-1], result)
            for op in self.sums
            if not whole & set(op.calls) and self._spans(result := self._result(op))
        }
        returned = self.placed.returned
        self.placed.returned = returned | set(self.scattered.values())
        self.walk = SequenceWalk(self.tensor, self.placed)
        try:
            self.walk.run()
        except Meeting as meeting:
            self.placed.returned = returned
            return meeting.op
        return None

    def _result(self, op: Op) -> Op:
        """What the module of a sum returns: the sum or a view of it."""
        results = {passed.value for passed in self.graph.results if passed.module == op.owner and passed.name == ""}
        while op not in results and len(op.users) == 1 and op.users[0].kind in VIEWS | SAME:
            op = op.users[0]
        return op

    def _spans(self, value: Op) -> bool:
        """Whether a value has all positions where own ones can be taken."""
        shape = value.shape
        return shape is not None and len(shape) > 2 and shape[:2] == (BATCH, self.length) and value.value.is_floating_point()

    def _mend(self, op: Op) -> bool:
        """Whether there is something to try."""
        own = [x for x in op.inputs if self.walk.seen(x, op.calls) is not None]
        if any(self._take(value, op) for value in op.inputs if own and value not in own):
            return True
        while op.owner == "" and op in self.walk.cuts:  # a model returns its logits, or what it makes of them
            op = next(x for x in op.inputs if self.walk.seen(x, op.calls) is not None)
        return self._make_whole(op.owner)

    def _make_whole(self, path: str) -> bool:
        """Lets every rank compute a module, or the one around it, from all positions; not a whole layer."""
        while any(passed.module == path and self._is_odd(passed) for passed in self.graph.arguments):
            path = path.rpartition(".")[0]
        if path in self.whole or any(within(layer, path) for layer in self.layers):
            return False
        self.whole.add(path)
        return True

    def _take(self, value: Op, op: Op) -> bool:
        """Whether a value that meets own positions in an operation can be shared out before: where a module is given it, or returns it, or what it
        is computed from."""
        placed = self.placed
        if value.kind in GIVEN or not self._spans(value) or value in self.tensor.cuts:
            return False
        for passed in self.graph.arguments:
            pair = passed.call, value
            named = passed.value is value and passed.call in op.calls and passed.module != "" and "." not in passed.name
            if named and pair not in placed.shared:
                placed.shared.add(pair)
                return True
        for passed in self.graph.results:
            pair = passed.call, value
            if passed.value is value and passed.call not in op.calls and pair not in placed.returned:
                placed.returned.add(pair)
                return True
        return value.owner == op.owner and any(self._take(source, op) for source in value.inputs)

    def _refusal(self, what: str) -> RunError:
        return RunError(
            f"layout.sequence = true divides the residual stream of {self.name} by position, but {what} needs all positions, and no module around it "
            "inside of a layer takes and returns them. Remove layout.sequence."
        )

    # The finished placement.

    def _plan(self) -> SequencePlan:
        walk, placed = self.walk, self.placed
        self.problems = [*self.gradients.problems(), *self._unpassed()]

        def divided(passed: Passed) -> bool:
            return walk.seen(passed.value, passed.calls[:-1]) is not None

        entered = [p for p in self.graph.arguments if (p.call, p.value) in placed.entered]
        plan = SequencePlan(
            shared=self._arguments([p for p in self.graph.arguments if (p.call, p.value) in placed.shared and not divided(p)]),
            gathered=self._arguments([p for p in entered if divided(p)], PART),
            joined=self._arguments(
                [p for p in self.graph.arguments if p.call in placed.whole and divided(p) and p not in entered], WHOLE
            ),
            scattered=tuple(self.scattered),
            returned=tuple(self._returned()),
        )
        if self.problems:
            raise RunError([f"layout.sequence = true: {problem}. Remove layout.sequence." for problem in self.problems])
        return plan

    def _arguments(self, found: list[Passed], status: str | None = None) -> tuple[Argument, ...]:
        """By module and name. `status`: the gradient that all uses inside of the module must give."""
        named: dict[tuple[str, str], list[Passed]] = {}
        for passed in found:
            named.setdefault((passed.module, passed.name), []).append(passed)
            if status is not None and self.gradients.inside(passed.value, passed.call) - {status}:
                self.problems.append(f"what {passed.module} is given is used in it both by each rank for itself and in parts")
        for (module, name), some in named.items():
            if "." in name:
                self.problems.append(f"{module} is given a tensor of the residual stream inside of a tuple")
            if len(some) != sum(passed.module == module and passed.name == name for passed in self.graph.arguments):
                self.problems.append(f"{module} is called in different ways")
        return tuple(Argument(module, _key(name)) for module, name in named)

    def _returned(self) -> Iterator[Result]:
        """Results of which ranks take their own positions, other than sums."""
        placed = self.placed.returned
        named: dict[tuple[str, str], int] = {}
        for passed in self.graph.results:
            if (passed.call, passed.value) in placed:
                named[passed.module, passed.name] = named.get((passed.module, passed.name), 0) + 1
        for (module, name), count in named.items():
            if count != sum(passed.module == module and passed.name == name for passed in self.graph.results):
                self.problems.append(f"{module} is called in different ways")
            elif name != "" and not name.isdigit():
                self.problems.append(f"{module} returns what must be divided neither alone nor in a tuple")
            elif module not in self.scattered:
                yield Result(module, int(name) if name else None)

    def _unpassed(self) -> Iterator[str]:
        """Modules that every rank computes whole, and that read of the stream what they are not given."""
        given = {(passed.call, passed.value) for passed in self.graph.arguments}
        for op in self.graph.ops:
            for call in self.placed.whole & set(op.calls):
                around = op.calls[: op.calls.index(call)]
                for value in op.inputs:
                    if call not in value.calls and (call, value) not in given and self.walk.seen(value, around) is not None:
                        yield f"{op.owner} reads of the residual stream what it is not given"


def _key(name: str) -> int | str:
    """The name of an argument as hooks see it."""
    return int(name) if name.isdigit() else name
