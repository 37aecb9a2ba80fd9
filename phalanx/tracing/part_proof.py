"""Whether the module's own code computes what the walk says when its parameters are a rank's parts: it is traced again with the parts in
place, and every shape compared. Where it is not so, integers that the code reads are divided, or the module's graph is rewritten."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from phalanx.spec.cut_plan import DividedAttribute
from phalanx.spec.errors import RunError
from phalanx.tracing.cut_values import Change, Cut, Segments, own
from phalanx.tracing.cut_walk import Walk
from phalanx.tracing.layer_sample import Sample, sample
from phalanx.tracing.module_graph import Calls, ModuleGraph, Op, trace, within
from phalanx.tracing.part_graph import PartGraph
from phalanx.tracing.refusals import names_read
from phalanx.tracing.sequence_hooks import STAND_INS, install_stand_ins
from phalanx.tracing.sequence_seams import SequenceSeams
from phalanx.tracing.sequence_walk import PARTS
from phalanx.tracing.view_shapes import ATTENTIONS, CONSTANT, PIECES, VIEWS
from phalanx.tracing.walk_state import WalkState

_TRIES = 40
"""Combinations of attributes that are tried for one module."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    module: str
    what: str


@dataclass(slots=True)
class Proof:
    """Traces of a rank's part of a model."""

    model: nn.Module
    walk: Walk
    length: int
    trimmed: bool
    selects: frozenset[str]
    rewritten: Mapping[str, PartGraph]
    sequence: SequenceSeams | None = None
    """With sequence parallelism: the rank's part of the positions is shown too."""
    traces: int = 0
    index: int = 0
    """The rank whose part is traced."""

    def attributes(self) -> tuple[list[DividedAttribute], Mismatch | None]:
        """Integers to divide; where no choice of them helps, what remains different and in which module."""
        chosen: list[DividedAttribute] = []
        wrong = self.mismatch(chosen)
        while wrong is not None:
            better = self._divide(wrong, chosen)
            if better is None:
                return chosen, wrong
            chosen, wrong = better
        return chosen, None

    def _divide(self, wrong: Mismatch, chosen: list[DividedAttribute]) -> tuple[list[DividedAttribute], Mismatch | None] | None:
        """Choices for the module that differs: single integers, all, pairs. One is better if the next difference is in another module."""
        candidates = [c for c in self._candidates(wrong.module) if c not in chosen]
        counts = dict.fromkeys((1, len(candidates), *range(2, len(candidates))))
        order = itertools.chain.from_iterable(itertools.combinations(candidates, count) for count in counts)
        for some in itertools.islice((x for x in order if x), _TRIES):
            after = self.mismatch([*chosen, *some])
            if after is None or after.module != wrong.module:
                return self._fewest(chosen, list(some), after)
        return None

    def _fewest(
        self, chosen: list[DividedAttribute], some: list[DividedAttribute], after: Mismatch | None
    ) -> tuple[list[DividedAttribute], Mismatch | None]:
        """Without those that change nothing."""
        for one in list(some) if len(some) > 2 else []:
            fewer = [x for x in some if x is not one]
            if self.mismatch([*chosen, *fewer]) == after:
                some = fewer
        return [*chosen, *some], after

    def _candidates(self, path: str) -> list[DividedAttribute]:
        """Integers of a module and of its config that equal a size which the walk divides there."""
        walk, sizes = self.walk, set[Segments]()
        for op in walk.graph.ops:
            if op.owner == path and op in walk.cuts:
                cut = walk.cuts[op]
                sizes |= {cut.segments, *((size,) for size in cut.segments)}
        for name, cut in walk.known.items():
            if isinstance(name, str) and within(name, path):
                sizes |= {cut.segments, *((size,) for size in cut.segments)}
        module: Any = self.model.get_submodule(path)
        found = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "__dict__"):
            found += [(f"config.{name}", value) for name, value in vars(config).items() if not name.startswith("_")]
        read = names_read(type(module))
        found = [(name, value) for name, value in found if name.rpartition(".")[2] in read]
        fit = [(n, segments) for n, v in found if type(v) is int for segments in sorted(sizes) if sum(segments) == v > 1]
        fit.sort(key=lambda x: ("head" not in x[0], x[0]))
        divided = [(name, *(own(segments, index, walk.ranks) for index in (0, walk.ranks - 1))) for name, segments in fit]
        return list(dict.fromkeys(DividedAttribute(path, name, a, None if a == b else b) for name, a, b in divided))

    def mismatch(self, divided: Sequence[DividedAttribute]) -> Mismatch | None:
        """The first difference between the walk and the code on a rank's part: the first rank's, and the last one's if that is smaller."""
        last = self.walk.ranks - 1
        uneven = any(size % self.walk.ranks for cut in self.walk.known.values() for size in cut.segments)
        found = (self._mismatch_on(index, divided) for index in ((0, last) if uneven else (0,)))
        return next((wrong for wrong in found if wrong is not None), None)

    def _mismatch_on(self, index: int, divided: Sequence[DividedAttribute]) -> Mismatch | None:
        self.traces += 1
        self.index = index
        part = sample(self.model, self.trimmed)
        _shrink(part, self.walk, index)
        _set(part.model, {(each.module, each.attribute): each.on(index, self.walk.ranks) for each in divided})
        for path in self.selects:
            _select(part.model.get_submodule(path), self.walk)
        for path, graph in self.rewritten.items():
            module: Any = part.model.get_submodule(path)
            module.forward = graph.forward(module, index, _same, _same)
        if self.sequence is not None:
            install_stand_ins(dict(part.model.named_modules()), self.sequence.plan, PARTS)
        calls = Calls()
        try:
            again = trace(part.model, part.mode, self.length, part.weights, calls=calls)
        except RunError as error:
            return Mismatch(self._cause(calls), str(error))
        return self._compare(again)

    def _cause(self, calls: Calls) -> str:
        """The module that went wrong: the caller of the first that was called with another shape than is due, else the one that failed."""
        modules = {passed.call: passed.module for passed in self.walk.graph.arguments}
        inside = [f"{path}." for path in self.rewritten]  # modules that a rewritten graph does not call
        called = [passed for passed in self.walk.graph.arguments if not any(passed.module.startswith(path) for path in inside)]
        for passed, (path, name, shape) in zip(called, calls.arguments, strict=False):
            if (passed.module, passed.name) != (path, name) or self._expected(passed.value) != shape:
                return modules.get(passed.calls[-2], "") if len(passed.calls) > 1 else ""
        return calls.active[-1] if calls.active else ""

    def _compare(self, again: ModuleGraph) -> Mismatch | None:
        ours, theirs = self._calls(self.walk.graph), self._calls(again)
        for op, other in zip(ours, theirs, strict=False):
            if op.kind != other.kind or op.owner != other.owner:
                return Mismatch(op.owner, f"{other.kind} in place of {op.kind}")
            if what := self._difference(op, other):
                return Mismatch(op.owner, f"{op.kind}: {what}")
        if len(ours) != len(theirs):
            last = (ours if len(ours) > len(theirs) else theirs)[min(len(ours), len(theirs))]
            return Mismatch(last.owner, f"{len(theirs)} operations in place of {len(ours)}")
        return None

    def _calls(self, graph: ModuleGraph) -> list[Op]:
        """What is compared: not what is given, nor rewritten graphs, nor the selection of keys and values. A trace drops `contiguous` where a
        value is so already, as with one head on a rank."""
        givens = ("input", "parameter", "buffer", "constant", "contiguous")
        return [
            op
            for op in graph.ops
            if op.kind not in givens
            and op.kind not in STAND_INS
            and not any(within(op.owner, path) for path in self.rewritten)
            and not (op.owner in self.selects and _is_selection(op))
        ]

    def _difference(self, op: Op, other: Op) -> str | None:
        due = self._expected(op)
        got = _shapes(other.value)
        if due != got:
            return f"{got} in place of {due}"
        change = self.walk.changes.get(op, Change())
        if op.kind in VIEWS or op.kind in CONSTANT:
            return None
        if op.kind in PIECES and change.pieces is not None:
            begin = other.args[2] if op.kind in ("slice", "narrow") and len(other.args) > 2 else 0
            first = own(change.pieces[1][0][0], self.index, self.walk.ranks)
            return None if (begin or 0) == first else f"it begins at {begin} in place of {first}"
        mine, its = _literals((op.args, op.kwargs)), _literals((other.args, other.kwargs))
        return None if mine == its else f"{its} in place of {mine}"

    def _expected(self, op: Op) -> Any:
        walks: list[WalkState] = [self.walk, *([] if self.sequence is None else [self.sequence.walk])]
        for walk in walks:  # no value is divided by both
            if op in walk.lists:
                return [self._part(shape, cut, walk) for shape, cut in zip(_shapes(op.value), walk.lists[op], strict=True)]
            if op in walk.cuts and op.shape is not None:
                return self._part(_shapes(op.value), walk.cuts[op], walk)
        return _shapes(op.value)

    def _part(self, shape: tuple[int, ...], cut: Cut, walk: WalkState) -> tuple[int, ...]:
        """Of a value on the rank that is traced. Its positions are those of the first rank, whichever part of the matrices it has."""
        index = self.index if walk is self.walk else 0
        return tuple(own(cut.segments, index, walk.ranks) if d == cut.dim else s for d, s in enumerate(shape))


def _is_selection(op: Op) -> bool:
    return op.kind == "slice" and any(user.kind in ATTENTIONS for user in op.users)


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(int(size) for size in value.shape)
    return [_shapes(each) for each in value] if isinstance(value, (tuple, list)) else None


def _literals(value: Any) -> list[Any]:
    if isinstance(value, Op):
        return []
    if isinstance(value, (tuple, list)):
        return [x for each in value for x in _literals(each)]
    if isinstance(value, dict):
        return [x for _, each in sorted(value.items()) for x in _literals(each)]
    return [value]


def _same(x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _shrink(part: Sample, walk: Walk, index: int) -> None:
    """Parts in place of the parameters that are cut; parameters that modules share stay shared."""
    first = {id(parameter): name for name, parameter in part.model.named_parameters()}
    made: dict[int, nn.Parameter] = {}
    for name, parameter in list(part.model.named_parameters(remove_duplicate=False)):
        cut = walk.known.get(first[id(parameter)])
        if cut is None:
            continue
        if id(parameter) not in made:
            shape = [own(cut.segments, index, walk.ranks) if d == cut.dim else s for d, s in enumerate(parameter.shape)]
            with part.mode:
                made[id(parameter)] = nn.Parameter(
                    torch.empty(shape, dtype=parameter.dtype), requires_grad=parameter.requires_grad
                )
        owner, _, leaf = name.rpartition(".")
        part.model.get_submodule(owner).register_parameter(leaf, made[id(parameter)])


def _set(model: nn.Module, divided: Mapping[tuple[str, str], int]) -> None:
    """Sets the attributes; a config is copied first, because modules share it."""
    copied: set[tuple[str, str]] = set()
    for (path, attribute), value in divided.items():
        target: Any = model.get_submodule(path)
        *steps, last = attribute.split(".")
        for step in steps:
            if (path, step) not in copied:
                setattr(target, step, copy.copy(getattr(target, step)))
                copied.add((path, step))
            target = getattr(target, step)
        setattr(target, last, value)


def _select(module: Any, walk: Walk) -> None:
    inner = module.attend

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
        heads = q.shape[1]
        per = heads * walk.ranks // k.shape[1]
        chosen = sorted({head // per for head in range(heads)})
        return inner(q, k[:, : len(chosen)], v[:, : len(chosen)], *rest)

    module.attend = attend
