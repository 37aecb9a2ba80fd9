"""torch's fused AdamW kernel, which divides gradients and skips a step by itself, without waiting for the host; and chunks of bounded size,
for optimizers that cannot have all tensors in memory, or in fp32, at once.

A tensor may be cut between chunks. Fused kernels compute the last few elements, those that do not fill a vector, with other
instructions, whose results differ in the last bit. Cut at multiples of 64, every element is computed as in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx.optim.optimizer import Update
from phalanx.parallel.sharded_model import OwnedParam
from phalanx.spec.run import Optimizer as OptimizerSpec

MOMENTS = ("exp_avg", "exp_avg_sq")


KernelRow = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""One tensor's value, gradient, two moments, and number of steps, which counts the present one already."""


def fused_adamw(rows: list[KernelRow], weight_decay: float, update: Update) -> None:
    """torch.optim.AdamW(fused=True) on fp32 tensors. Leaves gradients divided."""
    if not rows:
        return
    values, gradients, means, squares, steps = map(list, zip(*rows, strict=True))
    torch._fused_adamw_(
        values,
        gradients,
        means,
        squares,
        [],
        steps,
        lr=update.learning_rate,
        beta1=update.spec.beta1,
        beta2=update.spec.beta2,
        weight_decay=weight_decay,
        eps=update.spec.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=update.divisor,
        found_inf=update.skip,
    )


def weight_decay(param: OwnedParam, spec: OptimizerSpec) -> float:
    """Matrices decay, norms and biases do not; the shape of the whole parameter decides, not that of the shard."""
    return spec.weight_decay if len(param.shard.slice.whole) >= 2 else 0.0


STRIDE = 64
"""Tensors are cut at multiples of this many elements, and every run begins at a multiple in its chunk."""


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive elements of one flattened tensor."""

    index: int
    """Index of the tensor."""
    first: int
    length: int
    start: int
    """Where the run begins in its chunk."""

    def of(self, flat: Tensor) -> Tensor:
        """The run in its tensor."""
        return flat.narrow(0, self.first, self.length)

    def within(self, buffer: Tensor) -> Tensor:
        """The run in a buffer that holds its chunk."""
        return buffer.narrow(0, self.start, self.length)


@dataclass(frozen=True, slots=True)
class Chunk:
    runs: tuple[Run, ...]
    size: int
    """Elements, with the gaps between tensors."""


def split_chunks(lengths: Sequence[int], limit: int, multiple: int = STRIDE) -> list[Chunk]:
    """Splits tensors of these lengths, in order, into chunks of at most `limit` elements, each a multiple of `multiple`.

    A tensor is cut only where its chunk is full, so in a sequence of chunks each tensor is contiguous.
    """
    assert multiple % STRIDE == 0
    limit = max(limit // multiple, 1) * multiple
    chunks: list[Chunk] = []
    runs: list[Run] = []
    used = 0
    for index, length in enumerate(lengths):
        first = 0
        while first < length:
            if used == limit:
                chunks.append(Chunk(tuple(runs), used))
                runs, used = [], 0
            taken = min(length - first, limit - used)
            runs.append(Run(index, first, taken, used))
            first += taken
            used += _round_up(taken, STRIDE)
    if runs:
        chunks.append(Chunk(tuple(runs), _round_up(used, multiple)))
    return chunks


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
