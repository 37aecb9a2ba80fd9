"""Pipeline stages of a module that was not written for them: the module's own forward runs on every stage, with stand-ins for the layers of
other stages.

    layers of earlier stages     return what they are given; the last of them returns the state that the stage before has sent
    layers of this stage         as they are
    layers of later stages       the first of them ends the forward, and the state that it was given is sent on

So each stage computes what the module computes before its layers (masks, rotary angles), but looks nothing up in an embedding: only the first
stage holds parameters that are read before the layers, and only the last one those that are read after them. `use_of` proves on tensors
without memory that each layer is called once, in order, with the result of the one before, and that nothing else passes between them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from phalanx.models.fake_forward import SHAPE, fake_forward
from phalanx.models.layer_list import layers_path
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec

_BEFORE, _BETWEEN, _AFTER = -1, -2, 1 << 30
"""When a parameter is read, if not in the layer of that number."""
_REMEDY = "set layout.pipeline = 1"


@dataclass(frozen=True, slots=True)
class LayerUse:
    """How a module uses its layers and its parameters."""

    path: str
    """Of the list of layers."""
    count: int
    argument: str | None
    """Name of the argument of a layer that is the state; None: its first positional argument."""
    results: int | None
    """Length of the tuple that a layer returns, the state first; None: it returns the state alone."""
    read: Mapping[str, frozenset[int]]
    """When each parameter is read: in which layers, before or after them."""
    kept_shape: Mapping[str, bool]
    """Modules with parameters that are called before the layers, and whether they return a tensor of the shape that they were given."""

    def before(self, name: str) -> bool:
        return _BEFORE in self.read[name] or not self.read[name]

    def after(self, name: str) -> bool:
        return _AFTER in self.read[name]

    def called_before(self, path: str) -> bool:
        return path in self.kept_shape

    @property
    def tied(self) -> str | None:
        """The parameter that is read before and after the layers: an embedding that is the head too."""
        return next((name for name in self.read if self.before(name) and self.after(name)), None)


_known: WeakKeyDictionary[nn.Module, LayerUse] = WeakKeyDictionary()
_known_specs: dict[tuple[ModelSpec, type[nn.Module] | None], LayerUse] = {}
"""A process may build a model several times."""


def part(model: nn.Module, first: int, stop: int, sampled: frozenset[int] | None = None) -> nn.Module:
    """The stage with layers first … stop - 1, under the names of the whole model. Shares its modules with the model. `sampled`: of these layers,
    those that a rehearsal runs; the others pass on what they are given."""
    use = use_of(model)
    stage: Any = _PathCopies(model)
    layers = stage.copied(use.path)
    given = threading.local()  # passes of two micro-batches may run side by side, in threads
    names = list(layers._modules)
    for index, name in enumerate(names):
        if not first <= index < stop or (sampled is not None and index not in sampled):
            forward = _leave if index == stop else partial(_enter, given) if index == first - 1 else _pass_on
            layers._modules[name] = _stand_in(layers._modules[name], partial(forward, use))
    named: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        named.setdefault(id(parameter), []).append(name)
    for name in use.read:
        if not name.startswith(f"{use.path}."):
            unread = first > 0 and use.before(name) and not (use.after(name) and stop == use.count)
            unread |= stop < use.count and use.after(name) and not (use.before(name) and first == 0)
            for also in named[id(model.get_parameter(name))] if unread else ():  # a tied one has two names
                stage.drop(also, use, blank=first > 0 and use.before(name))
    root = stage.root
    root.is_first_stage, root.is_last_stage, root.layers_path = first == 0, stop == use.count, use.path
    root.state_dtype = torch.float32
    root.forward = partial(_forward, root, given)
    return root


def costs(model: nn.Module) -> tuple[tuple[int, ...], int]:
    """Elements of the matrices of each layer, and of those after the layers: what a token is multiplied by."""
    use = use_of(model)
    layers = tuple(_matrices(layer.parameters()) for layer in model.get_submodule(use.path).children())
    return layers, _matrices(model.get_parameter(name) for name in use.read if use.after(name))


def _matrices(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters if parameter.ndim > 1)


def use_of(model: nn.Module) -> LayerUse:
    """Raises RunError if the module cannot be divided into stages."""
    if model not in _known:
        spec = model.spec
        assert isinstance(spec, ModelSpec), "`models/init` sets the spec"
        key = spec, None if spec.module is None else type(model)
        _known[model] = use = _known_specs.get(key) or _look(model)
        if not spec.is_builtin:
            _known_specs[key] = use
    return _known[model]


# --- what runs in a stage ---


class _StageEnd(BaseException):
    """The forward of a stage is over. Not an Exception, which the module may handle itself."""

    def __init__(self, state: Tensor):
        self.state = state


def _forward(stage: Any, given: threading.local, x: Tensor, positions_BS: Tensor, *rest: Any, **further: Any) -> Any:
    """`x`: tokens, or on a later stage the state of the one before."""
    tokens_BS = x
    if not stage.is_first_stage:
        given.state, tokens_BS = x, torch.zeros_like(positions_BS)
    try:
        return type(stage).forward(stage, tokens_BS, positions_BS, *rest, **further)
    except _StageEnd as end:
        return end.state.to(stage.state_dtype)  # in which states travel
    finally:
        given.state = None


def _state_of(use: LayerUse, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    state: Tensor = args[0] if use.argument is None else kwargs[use.argument]
    return state


def _pass_on(use: LayerUse, *args: Any, **kwargs: Any) -> Any:
    return _result(use, _state_of(use, args, kwargs))


def _enter(given: threading.local, use: LayerUse, *args: Any, **kwargs: Any) -> Any:
    return _result(use, given.state)


def _leave(use: LayerUse, *args: Any, **kwargs: Any) -> Any:
    raise _StageEnd(_state_of(use, args, kwargs))


def _result(use: LayerUse, state: Tensor) -> Any:
    return state if use.results is None else (state, *[None] * (use.results - 1))


def _stand_in(layer: nn.Module, forward: Callable[..., Any]) -> nn.Module:
    """Looks like the layer, as the module may read its attributes, but holds no tensors."""
    empty = _copy(layer)
    empty._modules, empty._parameters, empty._buffers = {}, {}, {}
    empty.forward = forward
    empty.is_absent = True  # type: ignore[assignment]
    return empty


def _copy(module: nn.Module) -> nn.Module:
    """The same submodules, parameters and buffers, in tables of its own."""
    made = copy(module)
    for table in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "_forward_hooks", "_forward_pre_hooks"):
        setattr(made, table, type(getattr(module, table))(getattr(module, table)))
    return made


class _PathCopies:
    """A model of which those modules are copies in which something changes, and those that hold them."""

    def __init__(self, model: nn.Module):
        self.root = _copy(model)
        self._copies = {"": self.root}

    def copied(self, path: str) -> nn.Module:
        if path not in self._copies:
            owner, _, name = path.rpartition(".")
            holder = self.copied(owner)
            self._copies[path] = holder._modules[name] = _copy(holder.get_submodule(name))
        return self._copies[path]

    def drop(self, name: str, use: LayerUse, *, blank: bool) -> None:
        """Take a parameter away. `blank`: its module still runs, and returns what nobody reads."""
        path, _, leaf = name.rpartition(".")
        module: Any = self.copied(path)
        value, module._parameters[leaf] = module._parameters[leaf], None
        if not blank or "forward" in vars(module) or not use.called_before(path):
            return
        if isinstance(module, nn.Embedding):
            # The module may still ask for the device of its weight.
            del module._parameters[leaf]
            module.register_buffer(leaf, torch.empty(0, device=value.device, dtype=value.dtype), persistent=False)
            module.reset_buffers = lambda: None  # type: ignore[assignment]
            module.forward = partial(_no_look_up, module.embedding_dim)  # type: ignore[method-assign]
        elif use.kept_shape[path]:
            module.forward = lambda x, *args, **kwargs: x
        else:
            raise RunError(
                f"layout.pipeline cannot divide {type(self.root).__name__}: {name} is read before the layers, by a module that is neither an "
                f"nn.Embedding nor returns a tensor of the shape that it gets, so later stages would need it too: {_REMEDY}."
            )


def _no_look_up(width: int, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    return torch.zeros((), device=ids.device).expand(*ids.shape, width)


# --- the proof ---


class _Watch(TorchFunctionMode):
    """Notes which parameters are read when, and who reads the results of layers."""

    def __init__(self, parameters: Mapping[str, Tensor]):
        super().__init__()
        self.now, self.last = _BEFORE, -1
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self.read: dict[str, set[int]] = {name: set() for name in parameters}
        self.states: dict[int, tuple[int, Tensor]] = {}
        """Results of layers, by identity: the layer's number and the tensor, which must not be freed."""
        self.problem: str | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for value in pytree.tree_leaves((args, kwargs)):
            if isinstance(value, Tensor):
                self._see(value, func)
        return func(*args, **(kwargs or {}))

    def _see(self, value: Tensor, func: Any) -> None:
        # Its shape, dtype and device may be asked for anywhere.
        if getattr(func, "__name__", "") == "__get__" or self.problem is not None:
            return
        if (name := self._names.get(id(value))) is not None:
            self.read[name].add(self.now)
        if (of := self.states.get(id(value))) is not None and of[0] != self.last:
            where = "after the layers" if self.now == _AFTER else f"in layer {self.now}" if self.now >= 0 else "between layers"
            self.problem = f"the result of layer {of[0]} is read again {where} ({getattr(func, '__name__', func)})"


def _look(model: nn.Module) -> LayerUse:
    path = layers_path(model)
    if path is None:
        raise RunError(
            f"layout.pipeline divides a model between its layers, but {type(model).__name__} holds no list of layers: put them into an "
            f"nn.ModuleList, or {_REMEDY}."
        )
    calls, watches = _Calls(), list[_Watch]()
    kept: dict[str, bool] = {}
    layers = list(model.get_submodule(path).children())

    @contextmanager
    def watching(parameters: Mapping[str, Tensor]) -> Iterator[None]:
        watches.append(watch := _Watch(parameters))
        handles = [handle for index, layer in enumerate(layers) for handle in calls.observe(layer, index, watch, len(layers))]
        for name, module in model.named_modules():
            if next(module.parameters(recurse=False), None) is not None and not name.startswith(f"{path}."):
                handles.append(module.register_forward_hook(partial(_note_shape, kept, name, watch)))
        try:
            with watch:
                yield
        finally:
            for handle in handles:
                handle.remove()

    try:
        fake_forward(model, watching)
    except Exception as error:  # custom code may raise anything
        raise RunError(
            f"layout.pipeline cannot divide {type(model).__name__}: its forward does not run on tensors without values "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}): {_REMEDY}."
        ) from error
    watch = watches[0]
    problem = (
        watch.problem or calls.problem(len(layers)) or _misplaced(watch.read, path, len(layers)) or _wrong_state(model, calls)
    )
    if problem is not None:
        raise RunError(f"layout.pipeline cannot divide {type(model).__name__}: {problem}. {_REMEDY.capitalize()}.")
    return LayerUse(
        path=path,
        count=len(layers),
        argument=calls.argument,
        results=calls.results,
        read={name: frozenset(when) for name, when in watch.read.items()},
        kept_shape=kept,
    )


def _note_shape(kept: dict[str, bool], name: str, watch: _Watch, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
    given = args[0] if args else None
    if watch.now == _BEFORE:
        alike = isinstance(given, Tensor) and isinstance(out, Tensor) and given.is_floating_point() and given.shape == out.shape
        kept[name] = alike and kept.get(name, True)


class _Calls:
    """The calls of layers in one forward."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.argument: str | None = None
        self.results: int | None = None
        self.state: Tensor | None = None
        """The result of the last layer that was called."""
        self.wrong: str | None = None

    def observe(self, layer: nn.Module, index: int, watch: _Watch, count: int) -> Iterable[Any]:
        yield layer.register_forward_pre_hook(partial(self._begin, index, watch), with_kwargs=True)
        yield layer.register_forward_hook(partial(self._end, index, watch, count))

    def _begin(self, index: int, watch: _Watch, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.order.append(index)
        watch.now = index
        self.argument = None if args else next((key for key, value in kwargs.items() if isinstance(value, Tensor)), None)
        state = args[0] if args else kwargs.get(self.argument or "")
        others = [value for value in pytree.tree_leaves((args[1:], kwargs)) if isinstance(value, Tensor) and value is not state]
        wrong = None
        if not isinstance(state, Tensor):
            wrong = f"layer {index} is called without a tensor as its first argument"
        elif self.state is not None and state is not self.state:
            wrong = f"layer {index} is not given the result of the layer before it as it is"
        elif any(id(value) in watch.states for value in others):
            wrong = f"layer {index} is given more of an earlier layer than the result of the one before it"
        self.wrong = self.wrong or wrong

    def _end(self, index: int, watch: _Watch, count: int, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        self.results = len(out) if isinstance(out, (tuple, list)) else None
        for value in pytree.tree_leaves(out):
            if isinstance(value, Tensor):
                watch.states[id(value)] = index, value
        state = out[0] if isinstance(out, (tuple, list)) and out else out
        self.state = state if isinstance(state, Tensor) else None
        if self.state is None:
            self.wrong = (
                self.wrong or f"layer {index} returns a {type(out).__name__}, not a tensor or a tuple with one at its beginning"
            )
        watch.last, watch.now = index, _AFTER if index == count - 1 else _BETWEEN

    def problem(self, count: int) -> str | None:
        if self.wrong is not None:
            return self.wrong
        if self.order != list(range(count)):
            twice = next((index for index in range(count) if self.order.count(index) > 1), None)
            if twice is not None:
                return f"layer {twice} is called {self.order.count(twice)} times in one forward"
            return f"its {count} layers are called in the order {self.order}"
        return None


def _misplaced(read: Mapping[str, set[int]], path: str, count: int) -> str | None:
    """A parameter that stages would have to share, other than an embedding that is the head too."""
    for name, when in read.items():
        inside = name.startswith(f"{path}.")
        in_layers = sorted(index for index in when if 0 <= index < count)
        if inside and len(in_layers) > 1:
            return f"{name} is read in layers {', '.join(map(str, in_layers))}"
        if inside and when - set(in_layers):
            return f"{name} is read outside of its layer too"
        if not inside and (in_layers or _BETWEEN in when):
            return f"{name}, which is in no layer, is read {f'in layer {in_layers[0]}' if in_layers else 'between layers'}"
    tied = [name for name, when in read.items() if _BEFORE in when and _AFTER in when]
    return f"{' and '.join(tied)} are both read before and after the layers" if len(tied) > 1 else None


def _wrong_state(model: nn.Module, calls: _Calls) -> str | None:
    spec = model.spec
    assert isinstance(spec, ModelSpec), "`build` sets the spec"
    expected = (*SHAPE, spec.dim)
    if calls.state is not None and tuple(calls.state.shape) != expected:
        return (
            f"its layers return tensors of shape {list(calls.state.shape)} for {SHAPE[1]} positions, but stages exchange "
            f"{list(expected)}, with model.dim = {spec.dim}"
        )
    return None
