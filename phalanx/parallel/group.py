"""A group of ranks and its collectives: plain ones, and differentiable ones for use inside a model. Every technique of this room is
built from these.

A *region* is a part of the model in which each rank computes its share from the
whole input (tensor parallelism); outside, all ranks have the same activations, or a slice of the sequence each.

    differentiable         forward           backward
    copy_to_region         copy              all-reduce        from whole activations into a region
    reduce_from_region     all-reduce        copy              out of a region
    gather_to_region       all-gather        reduce-scatter    from slices into a region
    scatter_from_region    reduce-scatter    all-gather        out of a region, to slices
    split                  own chunk         all-gather        each rank continues with its chunk of what all have
    join                   all-gather        own chunk         all ranks continue with the whole, and compute the same from it
    exchange               all-to-all        all-to-all        rows to the ranks that need them, and back
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from phalanx.observe.comm_timer import timed_collective
from phalanx.parallel import overlap
from phalanx.transforms.recompute import summed

# torch 2.13 renames these two and warns of the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Move = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False, slots=True)
class Group:
    """Ranks in order, and this rank's index among them. With a single rank every collective returns its input."""

    ranks: tuple[int, ...]
    index: int
    use: str
    """The technique that it serves."""
    handle: dist.ProcessGroup | None
    via_host: bool = False
    """Whether messages from one rank to one other are copied through host memory. gloo copies tensors of GPUs itself in collectives, but
    hands their addresses to the socket in point-to-point messages, which ends the process."""

    @property
    def size(self) -> int:
        return len(self.ranks)

    # Plain collectives, without gradients.

    def all_reduce(self, values: Tensor) -> Tensor:
        """Sum over the group, in place."""
        if self.handle is not None:
            timed_collective(dist.all_reduce, values, group=self.handle)
        return values

    def all_reduce_max(self, values: Tensor) -> Tensor:
        """Maximum over the group, in place."""
        if self.handle is not None:
            timed_collective(dist.all_reduce, values, op=dist.ReduceOp.MAX, group=self.handle)
        return values

    def start_all_reduce(self, values: Tensor) -> dist.Work | None:
        """Begin to sum over the group, in place. None: the group is one rank and the sum is complete."""
        return None if self.handle is None else dist.all_reduce(values, group=self.handle, async_op=True)

    def start_reduce_scatter(self, part: Tensor, whole: Tensor) -> dist.Work | None:
        """Begin to sum `whole` over the group and write this rank's part into `part`; both are flat."""
        return None if self.handle is None else _reduce_scatter(part, whole, group=self.handle, async_op=True)

    def start_all_gather(self, whole: Tensor, part: Tensor) -> dist.Work | None:
        """Begin to write the parts of all ranks, concatenated, into `whole`; both are flat."""
        return None if self.handle is None else _all_gather(whole, part, group=self.handle, async_op=True)

    def all_gather(self, part: Tensor, dim: int = 0) -> Tensor:
        """The parts of all ranks, concatenated along `dim`. They must have one shape."""
        if self.handle is None:
            return part
        part = part.movedim(dim, 0).contiguous()
        whole = part.new_empty(self.size * part.shape[0], *part.shape[1:])
        timed_collective(_all_gather, whole, part, group=self.handle)
        return whole.movedim(0, dim)

    def reduce_scatter(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This rank's chunk along `dim` of the sum over the group. The group's size must divide the length."""
        if self.handle is None:
            return whole
        whole = whole.movedim(dim, 0).contiguous()
        part = whole.new_empty(whole.shape[0] // self.size, *whole.shape[1:])
        timed_collective(_reduce_scatter, part, whole, group=self.handle)
        return part.movedim(0, dim)

    def own_chunk(self, whole: Tensor, dim: int = 0) -> Tensor:
        """This rank's chunk along `dim` of a tensor that all ranks have."""
        return whole.chunk(self.size, dim)[self.index] if self.size > 1 else whole

    def all_to_all(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send sent[i] rows to the i-th rank and receive received[i] from it, in rank order."""
        if self.handle is None:
            return rows
        out = rows.new_empty(sum(received), *rows.shape[1:])
        rows = rows.contiguous()  # stays until the message has left
        overlap.exchange(dist.all_to_all_single, out, rows, list(received), list(sent), group=self, handle=self.handle)
        return out

    # Point-to-point messages. `dist.isend` and `dist.irecv` take these tensors.

    def outgoing(self, tensor: Tensor) -> Tensor:
        """A tensor as it is sent to one rank. The host waits for the device where it is a copy."""
        return tensor.to("cpu", copy=True).contiguous() if self.via_host else tensor.contiguous()

    def incoming(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for a tensor of one rank; `received` gives the tensor."""
        return torch.empty(shape, dtype=dtype, device="cpu" if self.via_host else device)

    def received(self, incoming: Tensor, device: torch.device) -> Tensor:
        """The tensor on this rank's device, once it has arrived."""
        return incoming.to(device, copy=True) if self.via_host else incoming

    # Differentiable: see the table above.

    def copy_to_region(self, x: Tensor) -> Tensor:
        return self._differentiable(x, lambda x: x.view_as(x), self._summed)

    def reduce_from_region(self, x: Tensor) -> Tensor:
        return self._differentiable(x, lambda x: summed(self._summed, x), lambda dx: dx)

    def gather_to_region(self, x: Tensor, dim: int) -> Tensor:
        return self._differentiable(x, lambda x: self.all_gather(x, dim), lambda dx: self.reduce_scatter(dx, dim))

    def scatter_from_region(self, x: Tensor, dim: int) -> Tensor:
        def scatter(x: Tensor) -> Tensor:
            return summed(lambda x: self.reduce_scatter(x, dim), x)

        return self._differentiable(x, scatter, lambda dx: self.all_gather(dx, dim))

    def split(self, x: Tensor, dim: int) -> Tensor:
        return self._differentiable(x, lambda x: self.own_chunk(x, dim).clone(), lambda dx: self.all_gather(dx, dim))

    def join(self, x: Tensor, dim: int) -> Tensor:
        return self._differentiable(x, lambda x: self.all_gather(x, dim), lambda dx: self.own_chunk(dx, dim).clone())

    def exchange(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        there, back = (sent, received), (received, sent)
        return self._differentiable(x, lambda x: self.all_to_all(x, *there), lambda dx: self.all_to_all(dx, *back))

    def _differentiable(self, x: Tensor, forward: Move, backward: Move) -> Tensor:
        return x if self.size == 1 else _Differentiable.apply(x, forward, backward)

    def _summed(self, x: Tensor) -> Tensor:
        """Not in place: the tensor belongs to autograd."""
        return self.all_reduce(x.contiguous().clone())


class _Differentiable(torch.autograd.Function):
    """Applies one function to values in the forward and another to gradients in the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Move, backward: Move) -> Tensor:
        ctx.apply_backward = backward
        y = forward(x)
        # The compiler of torch 2.11 drops the gradient of a result that was last written in place, as messages write theirs.
        return y.view_as(y) if is_compiling() else y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return ctx.apply_backward(gradients[0]), None, None
