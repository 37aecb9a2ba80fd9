"""How one of our tensors lies in Hugging Face's: small frozen values, and what turns a few rows of theirs into a part of ours and
back. `models/hf_names` makes the table of them; whoever reads or writes a folder applies it block by block.

Their tensors are seen as matrices: all dimensions but the last are rows, and of a vector each value is a row. So whatever is
read is one run of bytes, however the two sides are laid out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 64 << 20
"""Bytes of theirs that are read at a time."""
Rows = Callable[[str, int, int], Tensor]
"""(tensor, first row, last row) to those rows, [rows, width]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A part of one of their tensors that fills ours, or one expert's place in ours."""

    theirs: str
    shape: tuple[int, ...]
    """Of their whole tensor."""
    rows: tuple[int, int]
    """Which of their rows."""
    columns: tuple[int, int] | None = None
    """Which of their columns; None: all."""
    expert: int | None = None
    """Index in the first dimension of ours, where that stacks what they keep apart."""
    turned: bool = False
    """Theirs is [in, out], as GPT-2's."""
    pairs: tuple[int, int] | None = None
    """(height, last): in each `height` rows the `last` ones are neighbouring pairs that ours keeps in two halves."""

    @property
    def width(self) -> int:
        return self.shape[-1] if len(self.shape) > 1 else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One of our tensors and where its values are."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    exact: bool = False
    """Kept in the format it has when weights are written in another: the bias of a router."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A box of one of our tensors that is read at once."""

    piece: Piece
    rows: tuple[int, int]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def blocks(entry: Entry, itemsize: int, most: int = BLOCK) -> Iterator[Block]:
    """The boxes that make up our tensor, each of at most `most` bytes of theirs, or of the fewest rows that belong together."""
    for piece in entry.pieces:
        step = max(1, most // (piece.width * itemsize))
        if piece.pairs is not None:
            step = max(1, step // piece.pairs[0]) * piece.pairs[0]
        first, last = piece.rows
        for start in range(first, last, step):
            stop = min(start + step, last)
            offsets, sizes = _box(piece, start - first, stop - start)
            yield Block(piece=piece, rows=(start, stop), offsets=offsets, sizes=sizes)


def _box(piece: Piece, start: int, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    low, high = piece.columns or (0, piece.width)
    if piece.turned:
        return (0, start), (high - low, count)
    if len(piece.shape) == 1:
        return (start,), (count,)
    if piece.expert is not None:
        return (piece.expert, start, 0), (1, count, high - low)
    return (start, 0), (count, high - low)


def read(block: Block, rows: Rows) -> Tensor:
    """A box of ours, out of their rows."""
    piece = block.piece
    part = rows(piece.theirs, *block.rows)
    if piece.columns is not None:
        part = part[:, slice(*piece.columns)]
    if piece.pairs is not None:
        part = part[_order(piece.pairs, len(part))]
    if piece.turned:
        part = part.T
    return part.contiguous().view(block.sizes)


def theirs(piece: Piece, ours: Tensor) -> Tensor:
    """Their rows, [rows, columns], out of our tensor or some rows of it, or out of one expert's place in it."""
    part = ours.T if piece.turned else ours.reshape(len(ours), -1)
    if piece.pairs is not None:
        part = part[torch.argsort(_order(piece.pairs, len(part)))]
    return part.contiguous()


@torch.no_grad()
def fill(
    tensors: dict[str, Tensor], table: tuple[Entry, ...], rows: Rows, offsets: Mapping[str, tuple[int, ...]] | None = None
) -> None:
    """Write their values into tensors of ours that are already in place, whatever their device and format, box by box.

    `offsets`: where ours begin in the whole, for those that are a part of it; what lies outside is not read.
    """
    for entry in table:
        target = tensors[entry.name]
        first = (offsets or {}).get(entry.name, (0,) * target.ndim)
        for block in blocks(entry, 4):
            meets = [
                (max(begin, own), min(begin + size, own + length))
                for begin, size, own, length in zip(block.offsets, block.sizes, first, target.shape, strict=True)
            ]
            if any(begin >= end for begin, end in meets):
                continue
            ours = tuple(slice(begin - own, end - own) for (begin, end), own in zip(meets, first, strict=True))
            theirs = tuple(slice(begin - at, end - at) for (begin, end), at in zip(meets, block.offsets, strict=True))
            target[ours] = read(block, rows)[theirs].to(target.dtype)


def _order(pairs: tuple[int, int], count: int) -> Tensor:
    """For each of our rows, theirs: first the firsts of all pairs, then the seconds."""
    height, last = pairs
    plain = torch.arange(height - last)
    turned = torch.cat((torch.arange(height - last, height, 2), torch.arange(height - last + 1, height, 2)))
    one = torch.cat((plain, turned))
    return (torch.arange(0, count, height)[:, None] + one).flatten()


def matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """A tensor's rows and width."""
    return (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape), 1)
