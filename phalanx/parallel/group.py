"""Some ranks that work together, and what they can do with a tensor: plain collectives, and the same as parts of a model whose
backward is the fitting other one. Every technique of this room is built from these.

    forward        backward
    copy           all-reduce        into a region where each rank computes a part from the whole
    reduce         copy              out of it
    gather         reduce-scatter    into such a region from slices
    scatter        all-gather        out of it, to slices
    part           all-gather        each rank goes on with its slice of what all have
    join           part              all go on with the whole, and do the same with it
    exchange       exchange          rows to the ranks that want them, and back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from phalanx.observe.comm_timer import timed_collective

# torch 2.13 has new names for these two, and warns of the old ones.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Group:
    """The ranks, in order, and which of them this one is. A group of one does nothing, at no cost."""

    ranks: tuple[int, ...]
    index: int
    use: str
    """The technique it serves."""
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    # Plain collectives, without gradients.

    def sum(self, values: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Over the group, in place."""
        if self.handle is not None:
            timed_collective(dist.all_reduce, values, op=operation, group=self.handle)
        return values

    def start_all_reduce(self, values: Tensor) -> dist.Work | None:
        """Begin to sum over the group, in place."""
        return None if self.handle is None else dist.all_reduce(values, group=self.handle, async_op=True)

    def start_reduce_scatter(self, part: Tensor, whole: Tensor) -> dist.Work | None:
        """Begin to sum `whole` over the group and to write this rank's part of it into `part`; both flat. Alone, they are one."""
        return None if self.handle is None else _reduce_scatter(part, whole, group=self.handle, async_op=True)

    def start_all_gather(self, whole: Tensor, part: Tensor) -> dist.Work | None:
        """Begin to write the parts of all, one behind the other, into `whole`; both flat. Alone, they are one."""
        return None if self.handle is None else _all_gather(whole, part, group=self.handle, async_op=True)

    def gathered(self, part: Tensor, dim: int = 0) -> Tensor:
        """The parts of all, one behind the other along `dim`; they must be of one shape."""
        if self.handle is None:
            return part
        part = part.movedim(dim, 0).contiguous()
        whole = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        timed_collective(_all_gather, whole, part, group=self.handle)
        return whole.movedim(0, dim)

    def scattered(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This rank's part, along `dim`, of the sum over the group; the group's size must divide it."""
        if self.handle is None:
            return whole
        whole = whole.movedim(dim, 0).contiguous()
        part = whole.new_empty(whole.shape[0] // self.size, *whole.shape[1:])
        timed_collective(_reduce_scatter, part, whole, group=self.handle)
        return part.movedim(0, dim)

    def own(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This rank's part along `dim` of what all have."""
        return whole.chunk(self.size, dim)[self.index] if self.size > 1 else whole

    def exchanged(self, rows: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        """Send given[i] rows to the i-th rank and take taken[i] from it, in the order of ranks."""
        if self.handle is None:
            return rows
        out = rows.new_empty(sum(taken), *rows.shape[1:])
        timed_collective(dist.all_to_all_single, out, rows.contiguous(), list(taken), list(given), group=self.handle)
        return out

    # The same inside a model.

    def copy(self, x: Tensor) -> Tensor:
        return self._there_and_back(x, lambda x: x.view_as(x), self._summed)

    def reduce(self, x: Tensor) -> Tensor:
        return self._there_and_back(x, self._summed, lambda gradient: gradient)

    def gather(self, x: Tensor, dim: int) -> Tensor:
        return self._there_and_back(x, lambda x: self.gathered(x, dim), lambda gradient: self.scattered(gradient, dim))

    def scatter(self, x: Tensor, dim: int) -> Tensor:
        return self._there_and_back(x, lambda x: self.scattered(x, dim), lambda gradient: self.gathered(gradient, dim))

    def part(self, x: Tensor, dim: int) -> Tensor:
        return self._there_and_back(x, lambda x: self.own(x, dim).clone(), lambda gradient: self.gathered(gradient, dim))

    def join(self, x: Tensor, dim: int) -> Tensor:
        return self._there_and_back(x, lambda x: self.gathered(x, dim), lambda gradient: self.own(gradient, dim).clone())

    def exchange(self, x: Tensor, given: Sequence[int], taken: Sequence[int]) -> Tensor:
        return self._there_and_back(
            x, lambda x: self.exchanged(x, given, taken), lambda gradient: self.exchanged(gradient, taken, given)
        )

    def _there_and_back(self, x: Tensor, there: Move, back: Move) -> Tensor:
        return x if self.size == 1 else _ThereAndBack.apply(x, there, back)

    def _summed(self, x: Tensor) -> Tensor:
        """Not in place: what it is given belongs to autograd."""
        return self.sum(x.contiguous().clone())


class _ThereAndBack(torch.autograd.Function):
    """What goes forward with the values, and what goes backward with their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradients[0]), None, None
