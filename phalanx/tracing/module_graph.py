"""The graph of a module: every operation of one forward, with sizes, the module that asked for it, and what modules are called with.
`torch.export` traces it on fake tensors, so that a model of any size needs no memory. Everything else in this room reads it."""

from __future__ import annotations

import logging
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.node import has_side_effect

from phalanx.spec.errors import refuse
from phalanx.tracing.refusals import own_functions, random_numbers, refusal, surroundings

_LIBRARY = torch.library.Library("phalanx_tracing", "DEF")
_LIBRARY.define("argument(Tensor x, str module, str name) -> ()")
_LIBRARY.define("result(Tensor x, str module, str name) -> ()")
for _name in ("argument", "result"):
    _LIBRARY.impl(_name, lambda x, module, name: None, "CompositeExplicitAutograd")
    has_side_effect(getattr(torch.ops.phalanx_tracing, _name).default)  # or the trace drops them

_REGIONS = ("wrap_with_set_grad_enabled", "wrap_with_autocast")
"""Operations of a graph that hold a graph of their own."""
BATCH = 3
"""Sequences in a trace: a number that is no size of a model."""


@dataclass(eq=False, slots=True)
class Op:
    """One value of the graph and the operation that gives it."""

    kind: str
    """"linear", "view", …; "input", "parameter", "buffer" or "constant" for what the graph is given."""
    target: Any
    args: tuple[Any, ...]
    """As the operation is called; values are `Op`s."""
    kwargs: dict[str, Any]
    value: Any
    """A fake tensor, or several of them."""
    owner: str
    """The module whose code asked for it."""
    calls: tuple[str, ...]
    """The calls of modules that it happens in, outermost first."""
    name: str = ""
    """Of a parameter, a buffer, or an input."""
    grad: bool = False
    """Whether it depends on a parameter."""
    users: list[Op] = field(default_factory=list)
    index: int = 0
    # Kept, as walks ask for them millions of times.
    _inputs: list[Op] | None = None
    _shape: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...] | None:
        if self._shape is None and isinstance(self.value, Tensor):
            self._shape = tuple(_hint(size) for size in self.value.shape)
        return self._shape

    @property
    def size(self) -> tuple[int, ...]:
        shape = self.shape
        assert shape is not None, f"{self.kind} is not a tensor"
        return shape

    @property
    def inputs(self) -> list[Op]:
        if self._inputs is None:
            self._inputs = []
            _collect((self.args, tuple(self.kwargs.values())), self._inputs)
        return self._inputs

    def argument(self, index: int, name: str, default: Any = None) -> Any:
        return self.args[index] if len(self.args) > index else self.kwargs.get(name, default)


@dataclass(frozen=True, slots=True)
class Passed:
    """A tensor that a module is called with, or that it returns."""

    module: str
    calls: tuple[str, ...]
    """The calls of modules that it happens in, that of the module last."""
    name: str
    """Its position or name among the arguments; dotted inside tuples and dictionaries."""
    value: Op

    @property
    def call(self) -> str:
        return self.calls[-1]


@dataclass(frozen=True, slots=True)
class Returned:
    """The place of a tensor in what a module returns."""

    name: str


@dataclass(slots=True)
class ModuleGraph:
    """One forward of a module."""

    ops: list[Op]
    """In order."""
    parameters: dict[str, Op]
    arguments: list[Passed]
    results: list[Passed]
    returned: dict[str, Any]
    """What a module returns, by its path: names of `results` in place of tensors."""
    outputs: list[Op]
    weights: dict[str, int]
    """How many layers of the model a traced layer stands for, by its path."""
    opaque: dict[str, str]
    """Modules that are called with an object whose tensors a trace does not see, and its type."""

    def weight(self, op: Op) -> int:
        return next((count for layer, count in self.weights.items() if within(op.owner, layer)), 1)

    @property
    def inputs(self) -> list[Op]:
        return [op for op in self.ops if op.kind == "input"]


@dataclass(slots=True)
class Calls:
    """Calls of modules while a trace runs."""

    active: list[str] = field(default_factory=list)
    """Modules that are being called, outermost first."""
    arguments: list[tuple[str, str, tuple[int, ...]]] = field(default_factory=list)
    """Module, name and shape of every tensor that a module was called with."""


def within(name: str, owner: str) -> bool:
    """Whether a module or parameter is this module or lies inside it."""
    return owner == "" or name == owner or name.startswith(f"{owner}.")


def _hint(size: Any) -> int:
    if isinstance(size, int):
        return size
    if size.node.hint is None:
        raise ValueError("a data-dependent size")
    return int(size.node.hint)


def _collect(value: Any, found: list[Op]) -> None:
    if isinstance(value, Op):
        found.append(value)
    elif isinstance(value, (tuple, list)):
        for each in value:
            _collect(each, found)
    elif isinstance(value, dict):
        for each in value.values():
            _collect(each, found)


def trace(
    model: nn.Module,
    mode: FakeTensorMode,
    length: int,
    weights: dict[str, int],
    *,
    dynamic: bool = False,
    calls: Calls | None = None,
) -> ModuleGraph:
    """The graph of a model whose parameters are fake (`layer_sample.sample`). `dynamic`: for any batch and length. `calls`
    tells how far a trace came that fails."""
    refuse(surroundings(model))
    calls = Calls() if calls is None else calls
    returned: dict[str, Any] = {}
    opaque: dict[str, str] = {}
    handles = list(_mark(model, calls, returned, opaque))
    with mode:
        tokens_BS, positions_BS = (torch.zeros(BATCH, length, dtype=torch.int64) for _ in range(2))
    free = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} if dynamic else None
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # what fails is said below
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.export.export(
                model, (tokens_BS, positions_BS), dynamic_shapes=(free, free) if dynamic else None, strict=False
            )
    except Exception as error:
        raise refusal(model, calls.active[-1] if calls.active else "", error) from error
    finally:
        logging.disable(level)
        for handle in handles:
            handle.remove()
    graph = _Reader(program, model, weights, returned, opaque).graph()
    drawn = (random_numbers(op.kind, op.args, op.kwargs, op.owner) for op in graph.ops)
    refuse(sorted({sentence for sentence in drawn if sentence}))
    return graph


def check_functions(model: nn.Module, mode: FakeTensorMode, length: int) -> None:
    """Refuses autograd functions of the module's own: only a forward that records gradients shows them."""
    with mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tokens_BS, positions_BS = (torch.zeros(BATCH, length, dtype=torch.int64) for _ in range(2))
        try:
            result = model(tokens_BS, positions_BS)
        except Exception:
            return  # the trace will say what is wrong
    refuse(own_functions(result))


def _mark(model: nn.Module, calls: Calls, returned: dict[str, Any], opaque: dict[str, str]) -> Iterator[Any]:
    """Hooks that write into the graph what every module is called with and returns."""
    for path, module in model.named_modules():

        def before(module: nn.Module, args: Any, kwargs: Any, path: str = path) -> None:
            calls.active.append(path)
            for kind in _opaque((args, kwargs)):
                opaque[path] = kind
            for name, value in leaves((*enumerate(args), *kwargs.items())):
                calls.arguments.append((path, name, tuple(_hint(size) for size in value.shape)))
                torch.ops.phalanx_tracing.argument(value, path, name)

        def after(module: nn.Module, args: Any, result: Any, path: str = path) -> None:
            calls.active.pop()
            returned[path] = _outline(result)
            for name, value in [("", result)] if isinstance(result, Tensor) else leaves(_items(result)):
                torch.ops.phalanx_tracing.result(value, path, name)

        yield module.register_forward_pre_hook(before, with_kwargs=True, prepend=True)
        yield module.register_forward_hook(after)


def _items(value: Any) -> Any:
    return value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (tuple, list)) else ()


def _opaque(value: Any) -> Iterator[str]:
    """Types of objects that may hold tensors, other than tuples and dictionaries of them."""
    if isinstance(value, (tuple, list, dict)):
        for _, each in _items(value):
            yield from _opaque(each)
    elif hasattr(value, "__dict__") and not (isinstance(value, (Tensor, nn.Module, type)) or callable(value)):
        yield type(value).__name__


def leaves(named: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors among arguments, by position or name; dotted inside tuples and dictionaries."""
    for name, value in named:
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Tensor):
            yield path, value
        else:
            yield from leaves(_items(value), path)


def _outline(value: Any, path: str = "") -> Any:
    """A result with names in place of its tensors."""
    if isinstance(value, Tensor):
        return Returned(path)
    if isinstance(value, (tuple, list)):
        return type(value)(_outline(each, f"{path}.{i}" if path else str(i)) for i, each in enumerate(value))
    if isinstance(value, dict):
        return {key: _outline(each, f"{path}.{key}" if path else str(key)) for key, each in value.items()}
    return value


class _Reader:
    """Turns an exported program into a `ModuleGraph`; regions without gradients or autocast become part of it."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        model: nn.Module,
        weights: dict[str, int],
        returned: dict[str, Any],
        opaque: dict[str, str],
    ):
        self.program, self.model = program, model
        self.first = {id(tensor): name for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
        self.named = {
            name: tensor
            for name, tensor in [
                *model.named_parameters(remove_duplicate=False),
                *model.named_buffers(remove_duplicate=False),
            ]
        }
        self.read = ModuleGraph([], {}, [], [], returned, [], weights, opaque)

    def graph(self) -> ModuleGraph:
        self._read(self.program.graph_module, self._givens())
        for index, op in enumerate(self.read.ops):
            op.index = index
            for source in op.inputs:
                source.users.append(op)
        return self.read

    def _givens(self) -> list[Op]:
        signature = self.program.graph_signature
        kinds = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        givens = []
        for node in self.program.graph_module.graph.nodes:
            if node.op == "placeholder":
                name = kinds.get(node.name)
                tensor = self.named.get(name) if name else None
                if tensor is None:
                    kind = "input" if node.name in signature.user_inputs else "constant"
                    op = Op(kind, None, (), {}, node.meta["val"], "", (), node.name)
                else:
                    first = self.first[id(tensor)]
                    op = self._given(first, isinstance(tensor, nn.Parameter), tensor)
                if not any(op is known for known in self.read.ops):
                    self.read.ops.append(op)
                givens.append(op)
        return givens

    def _given(self, name: str, is_parameter: bool, tensor: Tensor) -> Op:
        if is_parameter and name in self.read.parameters:
            return self.read.parameters[name]
        op = Op("parameter" if is_parameter else "buffer", None, (), {}, tensor, "", (), name)
        if is_parameter:
            self.read.parameters[name] = op
            op.grad = tensor.requires_grad
        return op

    def _read(self, graph_module: fx.GraphModule, givens: list[Op], frozen: bool = False) -> Any:
        """Reads one graph; returns what it returns."""
        env: dict[fx.Node, Any] = {}
        given = iter(givens)
        for node in graph_module.graph.nodes:
            args, kwargs = (fx.node.map_arg(x, lambda n: env[n]) for x in (node.args, node.kwargs))
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "get_attr":
                held = operator.attrgetter(node.target)(graph_module)
                env[node] = held if isinstance(held, fx.GraphModule) else self._add(Op("constant", None, (), {}, held, "", ()))
            elif node.op == "output":
                found: list[Op] = []
                _collect(args, found)
                if not givens or graph_module is self.program.graph_module:
                    self.read.outputs = found[-len(self.program.graph_signature.user_outputs) :]
                return args[0]
            else:
                env[node] = self._call(node, args, kwargs, frozen)
        return None

    def _call(self, node: fx.Node, args: Any, kwargs: Any, frozen: bool) -> Any:
        kind = _kind(node)
        if kind in _REGIONS:
            at = next(i for i, x in enumerate(args) if isinstance(x, fx.GraphModule))
            closed = frozen or (kind == _REGIONS[0] and not args[0])
            return self._read(args[at], list(args[at + 1 :]), closed)
        if kind == "getitem" and not isinstance(args[0], Op):
            return args[0][args[1]]
        if kind in ("argument", "result"):
            passed = Passed(args[1], tuple(node.meta.get("nn_module_stack") or [""]), args[2], args[0])
            (self.read.arguments if kind == "argument" else self.read.results).append(passed)
            return None
        if kind.startswith(("_assert", "sym_constrain")):
            return None
        stack = node.meta.get("nn_module_stack") or {"": ("", "")}
        owner = list(stack.values())[-1][0].partition("@")[0]
        op = Op(kind, node.target, tuple(args), dict(kwargs), node.meta.get("val"), owner, tuple(stack))
        op.grad = not frozen and _differentiable(op) and any(x.grad for x in op.inputs)
        return self._add(op)

    def _add(self, op: Op) -> Op:
        self.read.ops.append(op)
        return op


def _kind(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        name = node.target._schema.name.split("::")[1]
        return name[:-1] if name.endswith("_") and not name.endswith("__") else name
    target: Callable[..., Any] | str = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _differentiable(op: Op) -> bool:
    if op.kind == "detach":
        return False
    values = op.value if isinstance(op.value, (tuple, list)) else [op.value]
    return any(isinstance(value, Tensor) and value.is_floating_point() for value in values)
