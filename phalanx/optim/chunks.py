"""Many tensors as a few chunks of bounded size: for optimizers that cannot have everything in memory, or in fp32, at once.

A tensor may be cut between chunks. Fused kernels compute the last few elements, those that do not fill a vector, with other
instructions, whose results differ in the last bit. Cut at multiples of 64, every element is computed as in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

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
