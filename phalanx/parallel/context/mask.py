"""Who sees what when a sequence lies in pieces: which products of queries and keys have to be computed, and which of them need a
mask. `parallel/context/online_softmax` computes what this lists; here are only numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_BLOCK = 512  # positions that are looked at together when documents decide what is seen
_WIDEST = 16  # blocks of keys that one mask may cover: bounds its memory, however long the sequence
_EMPTY, _MIXED, _FULL = 0, 1, 2


class Call(NamedTuple):
    """Some queries of a rank against some keys that it has at the moment, each a range of places in their tensors."""

    queries: tuple[int, int]
    keys: tuple[int, int]
    causal: bool
    """The last keys are those of the same positions as the queries: each query sees those not after it. All others are before."""
    masked: bool
    """Documents decide too."""


@dataclass(eq=False, slots=True)
class View:
    """One batch of sequences of `length` positions, cut into `pieces` of equal length."""

    length: int
    pieces: int
    documents: Tensor | None
    """[B, length] in natural order, or None where every sequence is one document."""
    _classes: npt.NDArray[np.int8] | None = field(init=False, default=None)
    _calls: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Call]] = field(init=False, default_factory=dict)
    _tables: dict[tuple[int, ...], Tensor] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        if self.documents is not None:
            # The one time that the host waits for the table: a view serves all blocks of a model.
            self._classes = _classify(self.documents.cpu().numpy(), [first for first, _ in self._blocks(range(self.pieces))])

    @property
    def piece(self) -> int:
        return self.length // self.pieces

    def calls(self, queries: Sequence[int], keys: Sequence[int]) -> list[Call]:
        """What to compute between the given pieces, both in rising order; every query's own position comes first."""
        wanted = tuple(queries), tuple(keys)
        if wanted not in self._calls:
            self._calls[wanted] = self._plain(*wanted) if self._undivided(*wanted) else self._divided(*wanted)
        return self._calls[wanted]

    def table(self, pieces: Sequence[int]) -> Tensor | None:
        """Documents of the positions of these pieces, [B, positions]."""
        if self.documents is None or len(pieces) == self.pieces:
            return self.documents
        wanted = tuple(pieces)
        if wanted not in self._tables:
            every = self.documents.chunk(self.pieces, dim=1)
            self._tables[wanted] = torch.cat([every[piece] for piece in wanted], dim=1)
        return self._tables[wanted]

    def _plain(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> list[Call]:
        """No document ends here."""
        size = self.piece
        if queries == keys:
            return [Call((0, len(queries) * size), (0, len(keys) * size), causal=True, masked=False)]
        calls: list[Call] = []
        for place, piece in enumerate(queries):
            rows, before = (place * size, (place + 1) * size), sum(key < piece for key in keys)
            if piece in keys:
                calls.append(Call(rows, (before * size, (before + 1) * size), causal=True, masked=False))
            if before:
                last = calls[-1] if calls else None
                if last is not None and not last.causal and last.keys == (0, before * size):
                    calls[-1] = last._replace(queries=(last.queries[0], rows[1]))  # the same for two pieces: once for both
                else:
                    calls.append(Call(rows, (0, before * size), causal=False, masked=False))
        return calls

    def _undivided(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> bool:
        if self._classes is None:
            return True
        rows, columns = np.array(self._numbers(queries)), np.array(self._numbers(keys))
        seen = rows[:, None] >= columns
        return bool((self._classes[np.ix_(rows, columns)][seen] == _FULL).all())

    def _divided(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> list[Call]:
        """Block by block: neighbouring keys of a kind together, and nothing where no query shares a document with a key."""
        assert self._classes is not None
        columns = list(zip(self._numbers(keys), self._places(keys), strict=True))
        calls: list[Call] = []
        for row, rows in zip(self._numbers(queries), self._places(queries), strict=True):
            kinds = self._classes[row]
            seen = [(int(kinds[number]), number == row, place) for number, place in columns if number <= row]
            runs: list[Call] = []
            # What stands alone is a block that is causal and nothing else; the kernels know that without a mask.
            for (kind, alone), group in groupby(seen, key=lambda one: (one[0], one[1] and one[0] == _FULL)):
                run, masked = list(group), kind == _MIXED
                if kind == _EMPTY:
                    continue
                widest = _WIDEST if masked else len(run)
                for first in range(0, len(run), widest):
                    some = run[first : first + widest]
                    keys_here, causal = (some[0][2][0], some[-1][2][1]), some[-1][1]
                    assert alone or masked or not causal
                    runs.append(Call(rows, keys_here, causal, masked))
            # The last keys first: there is the query's own position, which it always sees. From then on its sum has a size.
            calls += reversed(runs)
        return calls

    def _blocks(self, pieces: Sequence[int]) -> list[tuple[int, int]]:
        """First and last position of each block of the given pieces; a piece's last block may be short."""
        size = self.piece
        return [
            (piece * size + first, piece * size + min(first + _BLOCK, size))
            for piece in pieces
            for first in range(0, size, _BLOCK)
        ]

    def _places(self, pieces: tuple[int, ...]) -> list[tuple[int, int]]:
        """Where those blocks lie in a tensor that holds these pieces one behind the other."""
        return self._blocks(range(len(pieces)))

    def _numbers(self, pieces: tuple[int, ...]) -> list[int]:
        each = -(-self.piece // _BLOCK)
        return [piece * each + block for piece in pieces for block in range(each)]


def _classify(documents: npt.NDArray[np.int64], firsts: list[int]) -> npt.NDArray[np.int8]:
    """For each pair of blocks whether all positions of both are of one document, or surely none of one is of the other's."""
    low, high = (extreme.reduceat(documents, firsts, axis=1) for extreme in (np.minimum, np.maximum))
    one = low == high
    full = one[:, :, None] & one[:, None] & (low[:, :, None] == low[:, None])
    empty = (high[:, :, None] < low[:, None]) | (low[:, :, None] > high[:, None])
    return np.where(full.all(0), _FULL, np.where(empty.all(0), _EMPTY, _MIXED)).astype(np.int8)
