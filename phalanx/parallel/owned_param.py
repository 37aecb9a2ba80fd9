"""What a rank holds of each parameter: the slice, the mesh axes that hold the rest, and the tensor that the optimizer updates.

`parallel/apply` starts from whole parameters and every technique cuts them further; gradients, optimizers, checkpoints and
verification read the result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from phalanx.spec.tensor_slice import TensorSlice


@dataclass(frozen=True, slots=True)
class ParamShard:
    """This rank's shard of a parameter or of its optimizer state: which slice it is, and how the ranks share the parameter."""

    slice: TensorSlice
    split: tuple[str, ...] = ()
    """Mesh axes whose ranks hold other slices."""
    partial: tuple[str, ...] = ()
    """Mesh axes, other than those of data parallelism, over which gradients must be summed."""
    expert: bool = False
    """Whether it belongs to routed experts, which have mesh axes of their own."""
    counted: bool = True
    """False for the second copy of a tied embedding: sums over all parameters skip it."""

    @classmethod
    def full(cls, tensor: Tensor) -> Self:
        """An undivided parameter."""
        return cls(TensorSlice.full(tensor.shape))

    def cut(self, dim: int, index: int, count: int, axis: str) -> Self:
        """The index-th of `count` chunks along `dim`, divided over a mesh axis. Trailing chunks may be shorter or empty."""
        return replace(self, slice=self.slice.cut(dim, index, count), split=(*self.split, axis))


@dataclass(slots=True)
class OwnedParam:
    """A tensor that this rank's optimizer updates: its shard of one parameter, in full precision."""

    name: str
    value: nn.Parameter
    """A plain tensor on the device, never a DTensor. It may share memory with the model's parameter."""
    shard: ParamShard
    gradient: Tensor | None = None
    """Has the same shape; complete after `ShardedModel.finish`. May have a lower precision."""


def extract(part: TensorSlice, whole: Tensor) -> Tensor:
    """The local tensor of a slice, read from the whole tensor: a view if the slice is one box."""
    boxes = [whole[box.index] for box in part.boxes]
    return boxes[0] if len(boxes) == 1 else torch.cat(boxes, part.dim)


def replace_parameter(module: nn.Module, name: str, shape: tuple[int, ...]) -> None:
    """Change the shape of a parameter that has no memory yet."""
    old = module.get_parameter(name)
    assert old.is_meta, f"{name} has memory already: cut it first"
    new = nn.Parameter(torch.empty(shape, dtype=old.dtype, device="meta"), requires_grad=old.requires_grad)
    module.register_parameter(name, new)
