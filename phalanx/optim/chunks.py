"""Many tensors as a few portions of bounded size: what an optimizer works through where it cannot have all of something at once.

A tensor may be cut between portions. The fused kernels compute the last few numbers of a run, those that do not fill a vector,
with other instructions than the rest, whose results differ in the last bit: cut at multiples of 64, every number is computed
as in the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

STRIDE = 64
"""Numbers between which a tensor may be cut, and at which every part begins in its portion."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A run of numbers of one tensor, seen flat."""

    index: int
    """Which tensor."""
    first: int
    length: int
    at: int
    """Where it begins in the portion."""

    def of(self, flat: Tensor) -> Tensor:
        """Out of the tensor."""
        return flat.narrow(0, self.first, self.length)

    def within(self, portion: Tensor) -> Tensor:
        """Out of a buffer that holds the portion."""
        return portion.narrow(0, self.at, self.length)


@dataclass(frozen=True, slots=True)
class Portion:
    slices: tuple[Slice, ...]
    size: int
    """Numbers that it takes up, with the gaps between tensors."""


def portions(lengths: Sequence[int], limit: int, multiple: int = STRIDE) -> list[Portion]:
    """Tensors of these lengths, in order, `limit` numbers at most at a time; each portion takes up a multiple of `multiple`.

    A tensor is cut only where its portion is full, so portions laid end to end hold each tensor in one piece.
    """
    assert multiple % STRIDE == 0
    limit = max(limit // multiple, 1) * multiple
    found: list[Portion] = []
    slices: list[Slice] = []
    used = 0
    for index, length in enumerate(lengths):
        first = 0
        while first < length:
            if used == limit:
                found.append(Portion(tuple(slices), used))
                slices, used = [], 0
            taken = min(length - first, limit - used)
            slices.append(Slice(index, first, taken, used))
            first += taken
            used += _up(taken, STRIDE)
    if slices:
        found.append(Portion(tuple(slices), _up(used, multiple)))
    return found


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
