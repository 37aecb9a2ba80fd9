"""Where each parameter's part lies in the whole, and who else holds it. Techniques narrow it as they are applied; gradients,
optimizer, checkpoints and proofs read it. What a rank holds of a parameter is always one box of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ParamShard:
    """One parameter's (or state's) part on this rank."""

    whole: tuple[int, ...]
    """Shape of the whole."""
    offset: tuple[int, ...]
    """Where this rank's box begins."""
    shape: tuple[int, ...]
    """Of the box."""
    partial: tuple[str, ...] = ()
    """Mesh axes whose ranks each add a part of the gradient, beside those that see other samples."""
    split: tuple[str, ...] = ()
    """Mesh axes that hold other boxes of it."""
    expert: bool = False
    """It belongs to routed experts, which lie on the ranks in their own way."""
    counted: bool = True
    """False on a rank whose copy only mirrors another stage's (tied embeddings): sums over all parameters leave it out."""

    @classmethod
    def all(cls, tensor: Tensor) -> Self:
        """The whole of it."""
        return cls(whole=tuple(tensor.shape), offset=(0,) * tensor.ndim, shape=tuple(tensor.shape))

    def cut(self, dim: int, index: int, count: int, axis: str) -> Self:
        """The index-th of `count` parts along `dim`, as torch.chunk and FSDP2 cut: all but the last ones equal, perhaps none left."""
        first, length = chunk(self.shape[dim], index, count)
        offset = (*self.offset[:dim], self.offset[dim] + first, *self.offset[dim + 1 :])
        shape = (*self.shape[:dim], length, *self.shape[dim + 1 :])
        return replace(self, offset=offset, shape=shape, split=(*self.split, axis))

    def of(self, whole: Tensor) -> Tensor:
        """The box out of a whole tensor, as a view."""
        return whole[tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))]


def chunk(length: int, index: int, count: int) -> tuple[int, int]:
    """(first, length) of the index-th of `count` parts."""
    size = -(-length // count)
    first = min(index * size, length)
    return first, min(size, length - first)


@dataclass(slots=True)
class OwnedParam:
    """What the optimizer works on: this rank's own part of one parameter, in full precision."""

    name: str
    value: nn.Parameter
    """A plain tensor on the device, never a DTensor; it may share its memory with the model's parameter."""
    shard: ParamShard
    gradient: Tensor | None = field(default=None)
    """Of the same shape, complete after `Placed.finish`; perhaps in a lower precision."""


def replace_parameter(module: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """Give a parameter that has no memory yet the shape of this rank's part."""
    old = module.get_parameter(name)
    assert old.is_meta, f"{name} has memory already: cut it first"
    new = nn.Parameter(torch.empty(shape, dtype=old.dtype, device="meta"), requires_grad=old.requires_grad)
    module.register_parameter(name, new)
