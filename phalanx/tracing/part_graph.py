"""The graph of a submodule as one rank runs it, where the module's own code would not compute the right thing on a part: its operations with
the changes of a walk, and calls of what communicates. `parallel` puts it in place of the module's forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.spec.errors import RunError
from phalanx.spec.tensor_slice import chunk
from phalanx.tracing.cut_values import Change, Segments, own
from phalanx.tracing.module_graph import ModuleGraph, Op, Returned, leaves, within
from phalanx.tracing.view_shapes import CONSTANT
from phalanx.tracing.walk_state import WalkState

Collective = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class PartGraph:
    """The operations of one call of a module. Those of all layers of one kind are the same."""

    path: str
    """Of the module that was traced."""
    ops: tuple[Op, ...]
    changes: Mapping[Op, Change]
    arguments: Mapping[Op, str]
    given: frozenset[str]
    """Names of all tensors that the module was called with."""
    returned: Any
    results: Mapping[str, Op]
    ranks: int

    def forward(self, module: nn.Module, index: int, enter: Collective, leave: Collective) -> Callable[..., Any]:
        """To replace the forward of a module of the kind. `index`: which of the ranks this is; `enter` returns its argument and sums its
        gradient over the ranks; `leave` sums its argument and returns the gradient. Parameters are read from the module at every call."""

        def forward(*args: Any, **kwargs: Any) -> Any:
            return _Run(self, module, index, enter, leave)(args, kwargs)

        return forward


def part_graph(graph: ModuleGraph, changes: Mapping[Op, Change], path: str, ranks: int) -> PartGraph | str:
    """The graph of a module; a sentence where it reads what the module neither holds nor is given."""
    call = _call_of(graph, path)
    if call is None:
        return f"{path} is given no tensors"
    if path in graph.opaque:
        return f"{path} is given a {graph.opaque[path]}, whose tensors its graph would not see"
    ops = [op for op in graph.ops if call in op.calls]
    if any(op in changes and changes[op].shared for op in ops):
        return f"{path} adds a bias to a part of a sum"
    arguments = {passed.value: passed.name for passed in graph.arguments if passed.call == call and passed.module == path}
    held = set(ops)
    for op in ops:
        for source in op.inputs:
            known = source in held or source in arguments or source.kind == "constant" or source.shape is None
            if not known and not (source.kind in ("parameter", "buffer") and within(source.name, path)):
                return f"{path} reads a value that it is not given"
    results = {passed.name: passed.value for passed in graph.results if passed.module == path and passed.call == call}
    given = frozenset(passed.name for passed in graph.arguments if passed.call == call and passed.module == path)
    return PartGraph(path, tuple(ops), changes, arguments, given, graph.returned[path], results, ranks)


def changes_in(graph: ModuleGraph, walk: WalkState, path: str) -> dict[Op, Change] | None:
    """The changes of a walk at the operations of a module in another trace of the model; None if those are not the same."""
    ours, theirs = _named(walk.graph, path), _named(graph, path)
    if [op.kind for op in ours.values()] != [op.kind for op in theirs.values()] or ours.keys() != theirs.keys():
        return None
    other = {op: theirs[name] for name, op in ours.items()}
    return {
        other[op]: replace(
            change,
            enter={other[x]: None for x in change.enter},
            slices={other[x]: where for x, where in change.slices.items()},
            bias=None if change.bias is None else other[change.bias],
            select=None if change.select is None else (other[change.select[0]], other[change.select[1]]),
        )
        for op, change in walk.changes.items()
        if op in other and all(x in other for x in (*change.enter, *change.slices))
    }


def _named(graph: ModuleGraph, path: str) -> dict[Any, Op]:
    """What a module reads and computes, by names that are the same in every trace."""
    call = _call_of(graph, path)
    found: dict[Any, Op] = {
        ("given", op.name): op for op in graph.ops if op.kind in ("parameter", "buffer") and within(op.name, path)
    }
    found |= {("argument", p.name): p.value for p in graph.arguments if p.module == path and p.call == call}
    inside = [op for op in graph.ops if call in op.calls and not _is_size(op) and not _is_all(op)]
    return found | {index: op for index, op in enumerate(inside)}


def _call_of(graph: ModuleGraph, path: str) -> str | None:
    return next((passed.call for passed in graph.arguments if passed.module == path), None)


def _is_all(op: Op) -> bool:
    """A slice that takes everything: a trace for any length has more of them."""
    return op.kind == "slice" and op.size == op.args[0].size


def _is_size(op: Op) -> bool:
    return op.shape is None and not isinstance(op.value, (tuple, list))


class _Run:
    """One call on one rank."""

    def __init__(self, part: PartGraph, module: nn.Module, index: int, enter: Collective, leave: Collective):
        self.part, self.module, self.index, self.enter, self.leave = part, module, index, enter, leave
        self.values: dict[Op, Any] = {}
        self.entered: dict[Op, Tensor] = {}
        self.sizes: dict[Any, int] = {}

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if more := [name for name, _ in leaves((*enumerate(args), *kwargs.items())) if name not in self.part.given]:
            raise RunError(
                f"{self.part.path} is called with a tensor (argument {more[0]}) that it did not get when its graph was traced, without documents: it "
                "would not be read. Set data.document_mask = false, or layout.tensor = 1."
            )
        for op, name in self.part.arguments.items():
            value: Any = kwargs if name.split(".")[0] in kwargs else args
            for step in name.split("."):
                value = value[int(step) if isinstance(value, (tuple, list)) else step]
            if not isinstance(value, Tensor):
                raise RunError(
                    f"{self.part.path} is called with {name} = {value!r}, but its graph was traced with a tensor: it cannot run."
                )
            self.values[op] = value
            self._bind(op, value)
        for op in self.part.ops:
            if op not in self.values:
                self.values[op] = self._compute(op, self.part.changes.get(op))
        return self._result(self.part.returned)

    def _result(self, outline: Any) -> Any:
        if isinstance(outline, Returned):
            return self.values[self.part.results[outline.name]]
        if isinstance(outline, (tuple, list)):
            return type(outline)(self._result(each) for each in outline)
        if isinstance(outline, dict):
            return {key: self._result(each) for key, each in outline.items()}
        return outline

    def _value(self, op: Op) -> Any:
        if op not in self.values:
            name = op.name[len(self.part.path) :].lstrip(".")
            if op.kind in ("parameter", "buffer"):
                owner, _, leaf = name.rpartition(".")
                return getattr(self.module.get_submodule(owner), leaf)
            self.values[op] = self._size(op.value) if _is_size(op) else op.value
        return self.values[op]

    def _bind(self, op: Op, value: Tensor) -> None:
        """Sizes that differ between calls, such as the batch, as the arguments show them."""
        for traced, live in zip(op.value.shape, value.shape, strict=True):
            if not isinstance(traced, int) and traced.node.expr.is_symbol:
                self.sizes[traced.node.expr] = live

    def _size(self, traced: Any) -> Any:
        """A size that the module was not given: computed from those that it was."""
        return traced if isinstance(traced, (int, float, bool)) else int(traced.node.expr.subs(self.sizes))

    def _operand(self, op: Op, change: Change) -> Any:
        value = self._value(op)
        if (op in change.enter or op in change.slices) and op.grad and op.kind != "parameter":
            if op not in self.entered:
                self.entered[op] = self.enter(value)
            value = self.entered[op]
        if op in change.slices:
            value = self._own(value, *change.slices[op])
        if change.select is not None and op in change.select:
            value = self._selected(value)
        return value

    def _own(self, value: Tensor, dim: int, segments: tuple[int, ...]) -> Tensor:
        ranks = self.part.ranks
        if len(set(segments)) == 1:  # one for every sequence, of which there may be more or fewer than in the trace
            segments = segments[:1] * (value.shape[dim] // segments[0])
        parts = [piece.chunk(ranks, dim)[self.index] for piece in value.split(list(segments), dim)]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

    def _selected(self, value: Tensor) -> Tensor:
        """Of keys or values of all heads, those that the rank's queries read, one for each query head."""
        own = self.heads
        per = own * self.part.ranks // value.shape[1]
        return torch.stack([value[:, (self.index * own + head) // per] for head in range(own)], dim=1)

    def _compute(self, op: Op, change: Change | None) -> Any:
        if change is None:
            return op.target(*_mapped(op.args, self._value), **_mapped(op.kwargs, self._value))
        if change.select is not None:
            self.heads = self._value(op.args[0]).shape[1]

        def look(source: Op) -> Any:
            return self._operand(source, change)

        if change.leave and change.bias is not None:
            x, w = op.args[:2] if op.kind == "linear" else op.args[1:3]
            made = F.linear(look(x), look(w)) if op.kind == "linear" else look(x) @ look(w)
            return self.leave(made) + self._value(change.bias)
        args, kwargs = _mapped(op.args, look), _mapped(op.kwargs, look)
        if change.shape is not None:
            return self._reshape(op, args, kwargs, change.shape)
        if change.pieces is not None:
            dim, local = change.pieces
            found = [args[0].narrow(dim, self._count(before), self._count(within)) for before, within in local]
            return found[0] if op.kind in ("slice", "narrow") else found
        if change.lookup:
            return self._lookup(args, chunk(op.args[0].size[0], self.index, self.part.ranks)[0], change)
        made = op.target(*args, **kwargs)
        made = made if not change.mean else made * (self._count(change.mean) / sum(change.mean))
        return self.leave(made) if change.leave else made

    def _count(self, segments: Segments) -> int:
        return own(segments, self.index, self.part.ranks)

    def _reshape(self, op: Op, args: Any, kwargs: Any, shape: tuple[int, Segments]) -> Any:
        """The operation is given sizes: the cut one of them is divided, the others are those of this call."""
        dim, segments = shape
        if op.kind in CONSTANT:
            at = next(i for i, arg in enumerate(args) if isinstance(arg, (list, tuple)))
            return op.target(*args[:at], self._divided(args[at], dim, segments), *args[at + 1 :], **kwargs)
        if op.kind == "unflatten":
            first = args[1] % args[0].ndim
            return args[0].unflatten(first, self._divided(args[2], dim - first, segments))
        if op.kind == "flatten":
            return op.target(*args, **kwargs)
        if op.kind in ("expand", "broadcast_to"):
            return args[0].expand(self._divided(args[1], dim, segments))
        return args[0].reshape(self._divided(args[1], dim, segments))

    def _divided(self, sizes: Any, dim: int, segments: Segments) -> list[Any]:
        return [self._own_size(size, segments) if d == dim and size != -1 else size for d, size in enumerate(sizes)]

    def _own_size(self, size: int, segments: Segments) -> int:
        if len(set(segments)) == 1:  # one for every sequence, of which there may be more or fewer than in the trace
            segments = segments[:1] * (size // segments[0])
        return self._count(segments)

    def _lookup(self, args: Any, first: int, change: Change) -> Tensor:
        table, index = args[:2]
        local = index - first
        absent = (local < 0) | (local >= table.shape[0])
        made = F.embedding(local.masked_fill(absent, 0), table).masked_fill(absent[..., None], 0.0)
        return self.leave(made) if change.leave else made


def _mapped(value: Any, look: Callable[[Op], Any]) -> Any:
    if isinstance(value, Op):
        return look(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_mapped(each, look) for each in value)
    if isinstance(value, dict):
        return {key: _mapped(each, look) for key, each in value.items()}
    return value
