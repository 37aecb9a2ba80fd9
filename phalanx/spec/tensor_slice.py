"""The part of a tensor that one rank holds, as a plain value: from parameter to optimizer to checkpoint to proof. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

Index = tuple[slice, ...]
"""Indexes a tensor: one slice per dimension."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangular region of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def index(self) -> Index:
        """Selects the box from the whole tensor."""
        return tuple(slice(first, first + length) for first, length in zip(self.offset, self.shape, strict=True))

    def narrow(self, dim: int, first: int, length: int) -> Self:
        """The part of the box between `first` and `first + length` along `dim`, counted from the box's own beginning."""
        offset = (*self.offset[:dim], self.offset[dim] + first, *self.offset[dim + 1 :])
        return replace(self, offset=offset, shape=(*self.shape[:dim], length, *self.shape[dim + 1 :]))

    def overlap(self, other: Box) -> Box | None:
        """The region that both cover; None if there is none."""
        first = tuple(map(max, self.offset, other.offset))
        last = tuple(min(a + m, b + n) for a, m, b, n in zip(self.offset, self.shape, other.offset, other.shape, strict=True))
        shape = tuple(end - begin for begin, end in zip(first, last, strict=True))
        return Box(first, shape) if all(length > 0 for length in shape) else None

    def local(self, region: Box) -> Box:
        """A region of the whole tensor, counted from the box's own beginning."""
        return Box(tuple(a - b for a, b in zip(region.offset, self.offset, strict=True)), region.shape)


@dataclass(frozen=True, slots=True)
class TensorSlice(Box):
    """A box of a tensor, and the shape of the whole tensor."""

    whole: tuple[int, ...]

    @classmethod
    def full(cls, shape: Sequence[int]) -> Self:
        """All of a tensor."""
        return cls.of(shape, (0,) * len(shape), shape)

    @classmethod
    def of(cls, whole: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> Self:
        return cls(tuple(offset), tuple(shape), tuple(whole))

    def cut(self, dim: int, index: int, count: int) -> Self:
        """The index-th of `count` chunks along `dim`, as torch.chunk and FSDP2 cut: equal but for the last ones, which may be empty."""
        return self.narrow(dim, *chunk(self.shape[dim], index, count))


def chunk(length: int, index: int, count: int) -> tuple[int, int]:
    """(first, length) of the index-th of `count` chunks."""
    size = -(-length // count)
    first = min(index * size, length)
    return first, min(size, length - first)
