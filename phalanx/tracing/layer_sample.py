"""A copy of a model on fake tensors with one layer of each kind, to trace in its place: layers that are alike are divided alike."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


@dataclass(frozen=True, slots=True)
class Sample:
    """What is traced, and what it stands for."""

    model: nn.Module
    mode: FakeTensorMode
    weights: dict[str, int]
    """How many layers a layer of the copy stands for, by its path."""
    alike: dict[str, tuple[str, ...]]
    """The paths of all layers of the kind of a layer of the copy, its own included."""

    def names(self, name: str) -> list[str]:
        """A parameter or module of the copy, in all layers of its kind."""
        for layer, paths in self.alike.items():
            if name == layer or name.startswith(f"{layer}."):
                return [path + name[len(layer) :] for path in paths]
        return [name]


def sample(model: nn.Module, trim: bool = True) -> Sample:
    """Fake tensors of the same sizes on the CPU in place of all tensors; repeated layers left out, and never copied: there may be a hundred."""
    weights: dict[str, int] = {}
    alike: dict[str, tuple[str, ...]] = {}
    left_out: dict[int, nn.Module] = {}
    for path in _layer_lists(model):
        layers = dict(model.get_submodule(path).named_children())
        for first, *others in layer_kinds(layers) if trim else ([key] for key in layers):
            weights[f"{path}.{first}"] = 1 + len(others)
            alike[f"{path}.{first}"] = tuple(f"{path}.{key}" for key in (first, *others))
            left_out |= {id(layers[key]): _LeftOut() for key in others}
    for path in alike:
        left_out.pop(id(model.get_submodule(path)), None)  # one layer under two names
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    memo: dict[int, Any] = dict(left_out)
    with mode:
        for tensor in _tensors(model, left_out):
            if id(tensor) not in memo:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                is_parameter = isinstance(tensor, nn.Parameter)
                memo[id(tensor)] = nn.Parameter(fake, requires_grad=tensor.requires_grad) if is_parameter else fake
    twin = copy.deepcopy(model, memo)
    for path in _layer_lists(model):
        held = twin.get_submodule(path)._modules
        for key in [key for key, layer in held.items() if isinstance(layer, _LeftOut)]:
            del held[key]
    return Sample(twin, mode, weights, alike)


def layer_kinds(layers: Mapping[str, nn.Module]) -> list[list[str]]:
    """The names of layers that are alike, in order; kinds in the order of their first layers."""
    kinds: dict[Any, list[str]] = {}
    numbers = set.intersection(*(_numbers(layer, key) for key, layer in layers.items()))
    for key, layer in layers.items():
        kinds.setdefault(_signature(layer, numbers), []).append(key)
    return list(kinds.values())


class _LeftOut(nn.Module):
    """In the place of a layer of which another is a copy."""


def _tensors(model: nn.Module, left_out: Mapping[int, nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers outside of some layers."""
    pending, seen = [model], set(left_out)
    while pending:
        module = pending.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield from (tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None)
            pending += [child for child in module._modules.values() if child is not None]


def _layer_lists(model: nn.Module) -> list[str]:
    """Paths of lists of at least two layers, outermost only."""
    found: list[str] = []
    for path, module in model.named_modules():
        is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1
        if is_list and not any(path.startswith(f"{outer}.") for outer in found) and any(True for _ in module.parameters()):
            found.append(path)
    return found


def _numbers(layer: nn.Module, key: str) -> set[tuple[str, str]]:
    """Attributes of a layer's modules that equal its place in the list."""
    return {
        (path, name)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if type(value) is int and str(value) == key
    }


def _signature(layer: nn.Module, numbers: set[tuple[str, str]]) -> Any:
    """What makes a layer differ from others: its modules, the shapes of its parameters, and its settings, its own number aside."""
    parts: list[Any] = []
    for path, module in layer.named_modules():
        plain = {
            name: value
            for name, value in vars(module).items()
            if isinstance(value, (int, float, str, bool, type(None), tuple))
            and not name.startswith("_")
            and (path, name) not in numbers
        }
        parts.append((path, type(module).__qualname__, repr(sorted(plain.items()))))
    parts += [(name, tuple(p.shape), str(p.dtype)) for name, p in layer.named_parameters()]
    return tuple(parts)


def pattern(name: str) -> str:
    """The name of a parameter or module with the numbers of layers left out."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name)
