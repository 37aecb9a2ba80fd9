"""Which products of queries and keys a rank must compute when a sequence is cut into pieces, and which of them need a mask.
`parallel/context/online_softmax` computes these tiles; this file has only index arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BLOCK = 512  # positions that are classified together when documents decide which keys are visible
_WIDEST = 16  # blocks of keys that one mask may cover: limits its memory for any sequence length
_EMPTY, _MIXED, _FULL = 0, 1, 2


class Tile(NamedTuple):
    """A range of a rank's queries against a range of the keys that it has at the moment, as indices into their tensors."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    """The last keys have the same positions as the queries, so a query sees those up to its own. All other keys come before."""
    masked: bool
    """Whether documents limit visibility too."""


@dataclass(eq=False, slots=True)
class MaskPlan:
    """One batch of sequences of `length` positions, cut into `pieces` of equal length."""

    length: int
    pieces: int
    documents: Tensor | None
    """[B, length] in natural order; None where every sequence is one document."""
    known: npt.NDArray[np.int64] | None = None
    """`documents` on the host; None: a boundary may be anywhere, so every tile needs a mask."""
    _classes: npt.NDArray[np.int8] | None = field(init=False, default=None)
    _tiles: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Tile]] = field(init=False, default_factory=dict)
    _tables: dict[tuple[int, ...], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.documents is not None:
            firsts = [first for first, _ in self._blocks(range(self.pieces))]
            mixed = np.full((len(firsts), len(firsts)), _MIXED, dtype=np.int8)
            self._classes = mixed if self.known is None else _classify(self.known, firsts)

    @property
    def piece(self) -> int:
        return self.length // self.pieces

    def tiles(self, queries: Sequence[int], keys: Sequence[int]) -> list[Tile]:
        """What to compute between the given pieces, both in rising order; the tile with a query's own position comes first."""
        wanted = tuple(queries), tuple(keys)
        if wanted not in self._tiles:
            self._tiles[wanted] = self._plain(*wanted) if self._undivided(*wanted) else self._divided(*wanted)
        return self._tiles[wanted]

    def table(self, pieces: Sequence[int]) -> Tensor | None:
        """Documents of these pieces, [B, positions]."""
        if self.documents is None or len(pieces) == self.pieces:
            return self.documents
        wanted = tuple(pieces)
        if wanted not in self._tables:
            every = self.documents.chunk(self.pieces, dim=1)
            self._tables[wanted] = torch.cat([every[piece] for piece in wanted], dim=1)
        return self._tables[wanted]

    def _plain(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> list[Tile]:
        """Tiles of pieces without a document boundary."""
        size = self.piece
        if queries == keys:
            return [Tile((0, len(queries) * size), (0, len(keys) * size), causal=True, masked=False)]
        tiles: list[Tile] = []
        for place, piece in enumerate(queries):
            rows, before = (place * size, (place + 1) * size), sum(key < piece for key in keys)
            if piece in keys:
                tiles.append(Tile(rows, (before * size, (before + 1) * size), causal=True, masked=False))
            if before:
                last = tiles[-1] if tiles else None
                if last is not None and not last.causal and last.keys == (0, before * size):
                    tiles[-1] = last._replace(queries=(last.queries[0], rows[1]))  # two pieces see the same keys: one tile
                else:
                    tiles.append(Tile(rows, (0, before * size), causal=False, masked=False))
        return tiles

    def _undivided(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> bool:
        if self._classes is None:
            return True
        rows, columns = np.array(self._numbers(queries)), np.array(self._numbers(keys))
        seen = rows[:, None] >= columns
        return bool((self._classes[np.ix_(rows, columns)][seen] == _FULL).all())

    def _divided(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> list[Tile]:
        """Tiles block by block: adjacent keys of one class together, and none where queries and keys share no document."""
        assert self._classes is not None
        columns = list(zip(self._numbers(keys), self._places(keys), strict=True))
        tiles: list[Tile] = []
        for row, rows in zip(self._numbers(queries), self._places(queries), strict=True):
            kinds = self._classes[row]
            seen = [(int(kinds[number]), number == row, place) for number, place in columns if number <= row]
            runs: list[Tile] = []
            # A block that is only causal needs no mask; it gets a tile of its own.
            for (kind, alone), group in groupby(seen, key=lambda block: (block[0], block[1] and block[0] == _FULL)):
                run, masked = list(group), kind == _MIXED
                if kind == _EMPTY:
                    continue
                widest = _WIDEST if masked else len(run)
                for first in range(0, len(run), widest):
                    some = run[first : first + widest]
                    keys_here, causal = (some[0][2][0], some[-1][2][1]), some[-1][1]
                    assert alone or masked or not causal
                    runs.append(Tile(rows, keys_here, causal, masked))
            # The last keys first: they include the query's own position, which it always sees, so its sum is never empty.
            tiles += reversed(runs)
        return tiles

    def _blocks(self, pieces: Sequence[int]) -> list[tuple[int, int]]:
        """(first, end) of each block of the given pieces; a piece's last block may be short."""
        size = self.piece
        return [
            (piece * size + first, piece * size + min(first + _BLOCK, size))
            for piece in pieces
            for first in range(0, size, _BLOCK)
        ]

    def _places(self, pieces: tuple[int, ...]) -> list[tuple[int, int]]:
        """The same in a tensor that holds these pieces concatenated."""
        return self._blocks(range(len(pieces)))

    def _numbers(self, pieces: tuple[int, ...]) -> list[int]:
        each = -(-self.piece // _BLOCK)
        return [piece * each + block for piece in pieces for block in range(each)]


def _classify(documents: npt.NDArray[np.int64], firsts: list[int]) -> npt.NDArray[np.int8]:
    """For each pair of blocks: all positions are of one document, no document occurs in both, or anything else."""
    low, high = (extreme.reduceat(documents, firsts, axis=1) for extreme in (np.minimum, np.maximum))
    one = low == high
    full = one[:, :, None] & one[:, None] & (low[:, :, None] == low[:, None])
    empty = (high[:, :, None] < low[:, None]) | (low[:, :, None] > high[:, None])
    return np.where(full.all(0), _FULL, np.where(empty.all(0), _EMPTY, _MIXED)).astype(np.int8)
