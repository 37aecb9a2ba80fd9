"""The part of a tensor that one rank holds, as a plain value: from parameter to optimizer to checkpoint to proof. Knows no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
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
        common = []
        for first, length, begin, count in zip(self.offset, self.shape, other.offset, other.shape, strict=True):
            start, stop = max(first, begin), min(first + length, begin + count)
            if start >= stop:  # planning a load asks this of every box of a checkpoint
                return None
            common.append((start, stop - start))
        offset, shape = zip(*common, strict=True) if common else ((), ())
        return Box(offset, shape)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """One box of a tensor, or several that lie end to end along `dim` in the rank's local tensor.

    Several boxes occur where a matrix is fused: of [q|k|v], a tensor-parallel rank holds a few rows of each third.
    """

    whole: tuple[int, ...]
    """Shape of the whole tensor."""
    boxes: tuple[Box, ...]
    dim: int = 0
    """The dimension along which several boxes are concatenated."""

    @classmethod
    def full(cls, shape: Sequence[int]) -> Self:
        """All of a tensor."""
        return cls.of(shape, (0,) * len(shape), shape)

    @classmethod
    def of(cls, whole: Sequence[int], offset: Sequence[int], shape: Sequence[int]) -> Self:
        """One box."""
        return cls(tuple(whole), (Box(tuple(offset), tuple(shape)),))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        first = self.boxes[0].shape
        if len(self.boxes) == 1:
            return first
        return (*first[: self.dim], sum(box.shape[self.dim] for box in self.boxes), *first[self.dim + 1 :])

    @property
    def offset(self) -> tuple[int, ...]:
        """Where the first box begins in the whole."""
        return self.boxes[0].offset

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def empty(self) -> bool:
        return self.numel == 0

    def narrow(self, dim: int, first: int, length: int) -> Self:
        """The part between `first` and `first + length` of the local tensor along `dim`."""
        if len(self.boxes) == 1 or dim != self.dim:
            return replace(self, boxes=tuple(box.narrow(dim, first, length) for box in self.boxes))
        parts, begin = [], 0
        for box in self.boxes:
            low, high = max(first, begin), min(first + length, begin + box.shape[dim])
            if high > low:
                parts.append(box.narrow(dim, low - begin, high - low))
            begin += box.shape[dim]
        return replace(self, boxes=tuple(parts) or (self.boxes[0].narrow(dim, 0, 0),))

    def cut(self, dim: int, index: int, count: int) -> Self:
        """The index-th of `count` chunks along `dim`, as torch.chunk and FSDP2 cut: equal but for the last ones, which may be empty."""
        return self.narrow(dim, *chunk(self.shape[dim], index, count))

    def cut_segments(self, dim: int, sizes: Sequence[int], index: int, count: int) -> Self:
        """The index-th of `count` chunks of every segment of a fused dimension; `sizes` are the segments' lengths."""
        assert len(self.boxes) == 1 and sum(sizes) == self.shape[dim], f"segments {sizes} of {self}"
        boxes, begin = [], 0
        for size in sizes:
            first, length = chunk(size, index, count)
            boxes.append(self.boxes[0].narrow(dim, begin + first, length))
            begin += size
        return replace(self, boxes=tuple(boxes), dim=dim)

    def regions(self) -> Iterator[tuple[Box, Box]]:
        """(box in the whole tensor, the same box in the local tensor), in local order."""
        begin = 0
        for box in self.boxes:
            local = [0] * len(self.whole)
            if local:
                local[self.dim] = begin
                begin += box.shape[self.dim]
            yield box, Box(tuple(local), box.shape)

    def overlaps(self, other: TensorSlice) -> Iterator[tuple[Box, Box]]:
        """(region of this local tensor, the same region of the other's), for everything that both hold."""
        for mine, my_local in self.regions():
            for theirs, their_local in other.regions():
                if (common := mine.overlap(theirs)) is not None:
                    yield _shift(common, mine, my_local), _shift(common, theirs, their_local)


def _shift(common: Box, outer: Box, local: Box) -> Box:
    """A part of the whole tensor in the coordinates of the local one, given a box of the whole and the same box of the local tensor."""
    offset = (a - b + c for a, b, c in zip(common.offset, outer.offset, local.offset, strict=True))
    return Box(tuple(offset), common.shape)


def chunk(length: int, index: int, count: int) -> tuple[int, int]:
    """(first, length) of the index-th of `count` chunks."""
    size = -(-length // count)
    first = min(index * size, length)
    return first, min(size, length - first)
