"""How the values of our tensors map to Hugging Face's tensors, and the conversion of a few rows at a time in both directions.
`models/hf_names` makes the table; import, export and `model.from` apply it block by block.

A Hugging Face tensor is treated as a matrix: all dimensions but the last are rows, and each value of a vector is a row. So every read
is one contiguous range of bytes, whatever the two layouts are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64 << 20
"""Bytes to read at a time."""
Rows = Callable[[str, int, int], Tensor]
"""(tensor, first row, last row) to those rows, [rows, width]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFPart:
    """The part of a Hugging Face tensor that fills one of ours, or one expert of it."""

    hf_name: str
    shape: tuple[int, ...]
    """Shape of the whole Hugging Face tensor."""
    rows: tuple[int, int]
    """Range of its rows."""
    columns: tuple[int, int] | None = None
    """Range of its columns; None: all."""
    expert: int | None = None
    """Index in the first dimension of our tensor, if that stacks experts that Hugging Face stores apart."""
    transposed: bool = False
    """The Hugging Face tensor is [in, out], as GPT-2's."""
    pairs: tuple[int, int] | None = None
    """(height, last): of every `height` rows, the `last` ones are interleaved pairs; our tensor stores them as two halves."""

    @property
    def width(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One of our tensors and the Hugging Face tensors that hold its values."""

    name: str
    shape: tuple[int, ...]
    parts: tuple[HFPart, ...]
    exact: bool = False
    """Keep the number format when weights are exported in another one: the bias of a router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A box of one of our tensors that is read in one piece."""

    part: HFPart
    rows: tuple[int, int]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def blocks(entry: Entry, itemsize: int, most: int = BLOCK) -> Iterator[Block]:
    """The boxes of our tensor, each of at most `most` bytes, or of the fewest rows that belong together."""
    for part in entry.parts:
        step = max(1, most // (part.width * itemsize))
        if part.pairs is not None:
            step = max(1, step // part.pairs[0]) * part.pairs[0]
        first, last = part.rows
        for start in range(first, last, step):
            stop = min(start + step, last)
            offsets, sizes = _box(part, start - first, stop - start)
            yield Block(part=part, rows=(start, stop), offsets=offsets, sizes=sizes)


def _box(part: HFPart, start: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    low, high = part.columns or (0, part.width)
    if part.transposed:
        return (0, start), (high - low, count)
    if len(part.shape) == 1:
        return (start,), (count,)
    if part.expert is not None:
        return (part.expert, start, 0), (1, count, high - low)
    return (start, 0), (count, high - low)


def read(block: Block, rows: Rows) -> Tensor:
    """A box of our tensor, from Hugging Face rows."""
    part = block.part
    values = rows(part.hf_name, *block.rows)
    if part.columns is not None:
        values = values[:, slice(*part.columns)]
    if part.pairs is not None:
        values = values[_order(part.pairs, len(values))]
    if part.transposed:
        values = values.T
    return values.contiguous().view(block.sizes)


def to_hf(part: HFPart, ours: Tensor) -> Tensor:
    """Hugging Face rows, [rows, columns], from our tensor, some rows of it, or one of its experts."""
    values = ours.T if part.transposed else ours.reshape(len(ours), -1)
    if part.pairs is not None:
        values = values[torch.argsort(_order(part.pairs, len(values)))]
    return values.contiguous()


@torch.no_grad()
def fill(
    tensors: dict[str, Tensor], table: tuple[Entry, ...], rows: Rows, offsets: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Write Hugging Face values into our tensors in place, box by box, on any device and in any format.

    `offsets`: where a tensor begins in the whole parameter, if it is a slice; values outside the slice are not read.
    """
    for entry in table:
        target = tensors[entry.name]
        first = (offsets or {}).get(entry.name, (0,) * target.ndim)
        for block in blocks(entry, 4):
            overlap = [
                (max(begin, own), min(begin + size, own + length))
                for begin, size, own, length in zip(block.offsets, block.sizes, first, target.shape, strict=True)
            ]
            if any(begin >= end for begin, end in overlap):
                continue
            ours = tuple(slice(begin - own, end - own) for (begin, end), own in zip(overlap, first, strict=True))
            theirs = tuple(slice(begin - at, end - at) for (begin, end), at in zip(overlap, block.offsets, strict=True))
            target[ours] = read(block, rows)[theirs].to(target.dtype)


def _order(pairs: tuple[int, int], count: int) -> Tensor:
    """For each of our rows, the Hugging Face row: the first of every pair, then the second of every pair."""
    height, last = pairs
    plain = torch.arange(height - last)
    rotated = torch.cat((torch.arange(height - last, height, 2), torch.arange(height - last + 1, height, 2)))
    unit = torch.cat((plain, rotated))
    return (torch.arange(0, count, height)[:, None] + unit).flatten()


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor's rows and width."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape), 1)
