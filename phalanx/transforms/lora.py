"""LoRA: freezes the parameters of a model and adds low-rank adapters to its linear layers. `parallel/apply` calls it first, on a model
without memory: to the techniques that follow, the matrices of an adapter are parameters like others, with names for their dimensions.

    y = x·Wᵀ + alpha / rank · (x·Aᵀ)·Bᵀ      A is [rank, in] and random, B is [out, rank] and zero at first

A is cut along "in" and B along "out" wherever W is. So a layer whose columns are divided adds its partial adapter to its partial result,
and no technique needs a message more. Stacked experts have an adapter for each expert, which is added to the matrix before the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.spec.adapted_layers import A, B, is_target
from phalanx.spec.cut_plan import Axes, Dim
from phalanx.spec.errors import RunError
from phalanx.spec.run import Lora
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.transforms.dropout import Dropout, DroppedProduct, layer_key


@dataclass(slots=True)
class Adapters:
    """The adapters of one rank's parts."""

    rank: int
    scale: float
    names: set[str] = field(default_factory=set)
    """Parameters of the adapters: those that are trained."""
    layers: list[str] = field(default_factory=list)
    """Layers that have one."""
    axes: Axes = field(default_factory=dict)
    """The model's table of dimension names, with those of the adapters."""
    enabled: bool = True
    """False: the model computes as if it had no adapters."""
    dropout: Dropout | None = None
    """Of the adapters' inputs."""

    @contextmanager
    def off(self) -> Iterator[None]:
        """Forwards in it are those of the frozen model."""
        self.enabled = False
        try:
            yield
        finally:
            self.enabled = True

    def place_dropout(self, parts: Sequence[nn.Module], slices: Mapping[str, TensorSlice], device: torch.device) -> None:
        """Tell the layers of their masks. `slices`: what this rank has of each parameter."""
        for path, module in ((path, module) for part in parts for path, module in part.named_modules()):
            if f"{path}.{A}" in self.names:
                module.lora_dropout = self.dropout
                module.lora_key = layer_key(path, device)
                read = slices[f"{path}.{A}"]
                if len(read.boxes) > 1:
                    raise RunError(
                        f"lora.dropout is not possible on {path} with layout.tensor: a rank has parts of several segments of its input. "
                        "Set lora.dropout = 0 or layout.tensor = 1."
                    )
                module.lora_first = read.offset[-1]

    def applied(self, parts: Sequence[nn.Module]) -> str:
        """What was done, read from the parameters."""
        sizes = {name: parameter.numel() for part in parts for name, parameter in part.named_parameters()}
        trained = sum(size for name, size in sizes.items() if name in self.names)
        dropout = f", dropout {self.dropout.rate:g}" if self.dropout is not None else ""
        return (
            f"adapters of rank {self.rank} and scale {self.scale:g} on {len(self.layers)} layers{dropout}; {trained:,} of "
            f"{sum(sizes.values()):,} parameters are trained"
        )


def apply(parts: Sequence[nn.Module], lora: Lora, axes: Axes) -> Adapters:
    """Freeze all parameters and add the adapters. A part may have none, such as a pipeline stage without a target."""
    assert lora.rank is not None
    adapters = Adapters(lora.rank, lora.scale, dropout=Dropout(lora.dropout) if lora.dropout else None)
    patterns: dict[str, tuple[Dim, ...]] = {}
    for part in parts:
        part.requires_grad_(False)
        for path, module in part.named_modules():
            adapted = [leaf for leaf in _targets(path, module, lora, axes) if _own(leaf, A) not in module._parameters]
            for leaf in adapted:  # none in a module that two stages share, the second time
                patterns |= _add(adapters, path, module, leaf, axes)
            if adapted and isinstance(module, nn.Linear):
                # A hook: what replaces the product later, such as fp8, replaces that of the frozen matrix alone. And this hook runs before
                # those of tensor parallelism, which sum partial results.
                module.register_forward_hook(AddAdapter(adapters))
            elif adapted:
                module.forward = _with_adapters(module, module.forward, adapted, adapters)
    order = list(axes)
    adapters.axes = dict(sorted(patterns.items(), key=lambda pair: _place(pair[0], order))) | dict(axes)
    return adapters


def layers(model: nn.Module, axes: Axes) -> dict[str, bool]:
    """Every layer that can have an adapter: whether it is a parameter of stacked experts, by name."""
    found: dict[str, bool] = {}
    for path, module in model.named_modules():
        if _is_layer(path, module, axes):
            found[path] = False
        found |= {f"{path}.{leaf}": True for leaf in _stacked(path, module, axes)}
    return found


def _targets(path: str, module: nn.Module, lora: Lora, axes: Axes) -> list[str]:
    """The parameters of a module that get an adapter."""
    if _is_layer(path, module, axes):
        return ["weight"] if is_target(path, lora.targets) else []
    return [leaf for leaf in _stacked(path, module, axes) if is_target(f"{path}.{leaf}", lora.targets, stacked=True)]


def _is_layer(path: str, module: nn.Module, axes: Axes) -> bool:
    """Whether a module is a linear layer that can have an adapter. An output head cannot: others read its weight without calling it."""
    return isinstance(module, nn.Linear) and _match(f"{path}.weight", axes)[1][:1] != ("vocab",)


def _stacked(path: str, module: nn.Module, axes: Axes) -> list[str]:
    """The parameters of a module that hold a matrix of each expert, without adapters."""
    parameters = [leaf for leaf, parameter in module.named_parameters(recurse=False) if parameter.ndim == 3]
    matrices = [leaf for leaf in parameters if not leaf.endswith((A, B))]
    return [leaf for leaf in matrices if _match(f"{path}.{leaf}", axes)[1][:1] == ("expert",)]


def _match(name: str, axes: Axes) -> tuple[str, tuple[Dim, ...]]:
    return next(((pattern, dims) for pattern, dims in axes.items() if fnmatchcase(name, pattern)), ("", ()))


def _own(leaf: str, matrix: str) -> str:
    """The name of an adapter's matrix in the module of its layer."""
    return matrix if leaf == "weight" else f"{leaf}_{matrix}"


def _add(adapters: Adapters, path: str, module: nn.Module, leaf: str, axes: Axes) -> dict[str, tuple[Dim, ...]]:
    """Give a module the two matrices of an adapter; returns the names of their dimensions, by pattern."""
    pattern, (*expert_dim, out_dim, in_dim) = _match(f"{path}.{leaf}", axes)
    *experts, out, in_ = module.get_parameter(leaf).shape
    shapes = {A: (*experts, adapters.rank, in_), B: (*experts, out, adapters.rank)}
    dims = {A: (*expert_dim, "rank", in_dim), B: (*expert_dim, out_dim, "rank")}
    patterns = {}
    for matrix in (A, B):
        own = _own(leaf, matrix)
        module.register_parameter(own, nn.Parameter(torch.empty(shapes[matrix], device="meta")))
        adapters.names.add(f"{path}.{own}")
        patterns[pattern.removesuffix(leaf) + own if pattern.endswith(leaf) else f"{path}.{own}"] = dims[matrix]
    adapters.layers.append(path if leaf == "weight" else f"{path}.{leaf}")
    return patterns


def _place(pattern: str, order: Sequence[str]) -> int:
    """Where a pattern of adapters belongs: in the order of the patterns that it was made from; whole names first."""
    for matrix in (A, B):
        stem = pattern.removesuffix(matrix)
        if stem != pattern:
            made_from = [stem + "weight", stem.removesuffix("_")]
            return next((order.index(known) for known in made_from if known in order), -1)
    return -1


@dataclass(frozen=True, eq=False)
class AddAdapter:
    """After a linear layer: adds the product of its adapter."""

    adapters: Adapters

    def __call__(self, module: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
        if not self.adapters.enabled:
            return y
        x, dropout = args[0], self.adapters.dropout
        keys = None if dropout is None else dropout.keys_of(x)
        if dropout is None or keys is None:
            low: Any = F.linear(x, module.lora_a)  # type: ignore[arg-type]  # named by A and B
        else:
            dtype = compute_dtype(x)
            a: Any = module.lora_a
            low = DroppedProduct.apply(x.to(dtype), a.to(dtype), keys, module.lora_key, (module.lora_first, dropout.rate))
        return y + self.adapters.scale * F.linear(low, module.lora_b)  # type: ignore[arg-type]


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of a matrix product under autocast."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def _with_adapters(
    module: nn.Module, forward: Callable[..., Any], names: Sequence[str], adapters: Adapters
) -> Callable[..., Any]:
    """The forward of stacked experts, in which their matrices have the adapters added. The sums live until the backward."""

    def with_adapters(*args: Any, **kwargs: Any) -> Any:
        if not adapters.enabled:
            return forward(*args, **kwargs)
        own: dict[str, Any] = module._parameters
        frozen = {name: own[name] for name in names}
        try:
            for name, weight in frozen.items():
                own[name] = weight + adapters.scale * torch.matmul(own[_own(name, B)], own[_own(name, A)])
            return forward(*args, **kwargs)
        finally:
            own.update(frozen)

    return with_adapters
