"""Attention of one rank's queries to keys that arrive in parts: which products of queries and keys to compute, which of them need a
mask, and how partial results are combined as if the softmax were taken over all keys at once. `parallel/context/context_parallel` calls
it with a transport that brings keys and values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.partial_attention import Mask, Scoring, backward, forward, wide
from phalanx.kernels.sink_attention import sink_gradient, with_sinks

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
    """Whether documents or a window limit visibility too."""


class MaskPlan:
    """One batch of sequences of `length` positions, cut into `pieces` of equal length."""

    def __init__(
        self,
        length: int,
        pieces: int,
        documents: Tensor | None,
        known: npt.NDArray[np.int64] | None = None,
        window: int | None = None,
    ):
        """`documents`: [B, length] in natural order; None where every sequence is one document. `known`: `documents` on the host; None:
        a boundary may be anywhere, so every tile needs a mask. `window`: the most keys that a query sees; None: no limit."""
        self.length, self.pieces, self.documents = length, pieces, documents
        self.window = None if window is None or window >= length else window
        self._piece = length // pieces
        blocks = self._blocks(range(pieces))
        firsts = [first for first, _ in blocks]
        alike = np.full((len(firsts), len(firsts)), _FULL if documents is None else _MIXED, dtype=np.int8)
        self._classes = alike if known is None else _classify(known, firsts)
        if self.window is not None:
            self._classes = np.minimum(self._classes, _classify_window(blocks, self.window))
        self._tiles: dict[tuple[tuple[int, ...], tuple[int, ...]], list[Tile]] = {}
        self._tables: dict[tuple[int, ...], Tensor] = {}

    def tiles(self, queries: Sequence[int], keys: Sequence[int]) -> list[Tile]:
        """What to compute between the given pieces, both in rising order; the tile with a query's own position comes first."""
        wanted = tuple(queries), tuple(keys)
        if wanted not in self._tiles:
            self._tiles[wanted] = self._plain(*wanted) if self._undivided(*wanted) else self._divided(*wanted)
        return self._tiles[wanted]

    @property
    def is_plain(self) -> bool:
        """Whether only the order of positions decides what a query sees."""
        return self.documents is None and self.window is None

    def table(self, pieces: Sequence[int]) -> Tensor | None:
        """Documents of these pieces, [B, positions]."""
        if self.documents is None or len(pieces) == self.pieces:
            return self.documents
        wanted = tuple(pieces)
        if wanted not in self._tables:
            every = self.documents.chunk(self.pieces, dim=1)
            self._tables[wanted] = torch.cat([every[piece] for piece in wanted], dim=1)
        return self._tables[wanted]

    def products(
        self, own: Sequence[int], scoring: tuple[float, float | None], device: torch.device, pieces: Sequence[int]
    ) -> Iterator[tuple[slice, slice, Mask]]:
        """`Products` of the queries of a rank's own pieces; `scoring`: factor and soft cap of the scores."""
        for tile in self.tiles(own, pieces):
            visible_B1ST = self._visible(tile, own, pieces, device) if tile.masked else None
            yield slice(*tile.queries), slice(*tile.keys), Mask(visible_B1ST, tile.causal and not tile.masked, *scoring)

    def _visible(self, tile: Tile, own: Sequence[int], pieces: Sequence[int], device: torch.device) -> Tensor:
        """[B or 1, 1, S, T], true where a query of the tile sees a key of it."""
        queries, keys = slice(*tile.queries), slice(*tile.keys)
        documents_BS, documents_BT = self.table(own), self.table(pieces)
        if documents_BS is None or documents_BT is None:
            shape = (1, 1, queries.stop - queries.start, keys.stop - keys.start)
            visible_B1ST = torch.ones(shape, dtype=torch.bool, device=device)
        else:
            visible_B1ST = documents_BS[:, None, queries, None] == documents_BT[:, None, None, keys]
        if self.window is not None:
            distance_ST = self._positions(own, device)[queries, None] - self._positions(pieces, device)[keys]
            visible_B1ST &= distance_ST < self.window
        if tile.causal:
            visible_B1ST[..., -visible_B1ST.shape[2] :].tril_()
        return visible_B1ST

    def _positions(self, pieces: Sequence[int], device: torch.device) -> Tensor:
        """Positions of these pieces in the sequence."""
        within = torch.arange(self._piece, device=device)
        return torch.cat([within + piece * self._piece for piece in pieces])

    def _plain(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> list[Tile]:
        """Tiles of pieces without a document boundary or the end of a window."""
        size = self._piece
        if queries == keys:
            return [Tile((0, len(queries) * size), (0, len(keys) * size), causal=True, masked=False)]
        tiles: list[Tile] = []
        for place, piece in enumerate(queries):
            rows, before = (place * size, (place + 1) * size), sum(key < piece for key in keys)
            if piece in keys:
                tiles.append(Tile(rows, (before * size, (before + 1) * size), causal=True, masked=False))
            if before:
                if tiles and not tiles[-1].causal and tiles[-1].keys == (0, before * size):  # two pieces see the same keys
                    tiles[-1] = tiles[-1]._replace(queries=(tiles[-1].queries[0], rows[1]))
                else:
                    tiles.append(Tile(rows, (0, before * size), causal=False, masked=False))
        return tiles

    def _undivided(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> bool:
        rows, columns = np.array(self._numbers(queries)), np.array(self._numbers(keys))
        seen = rows[:, None] >= columns
        return bool((self._classes[np.ix_(rows, columns)][seen] == _FULL).all())

    def _divided(self, queries: tuple[int, ...], keys: tuple[int, ...]) -> list[Tile]:
        """Tiles block by block: adjacent keys of one class together, and none where queries and keys share no document or window."""
        # Places are those in a tensor that holds these pieces concatenated.
        columns = list(zip(self._numbers(keys), self._blocks(range(len(keys))), strict=True))
        tiles: list[Tile] = []
        for row, rows in zip(self._numbers(queries), self._blocks(range(len(queries))), strict=True):
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
        size = self._piece
        return [
            (piece * size + first, piece * size + min(first + _BLOCK, size))
            for piece in pieces
            for first in range(0, size, _BLOCK)
        ]

    def _numbers(self, pieces: tuple[int, ...]) -> list[int]:
        each = -(-self._piece // _BLOCK)
        return [piece * each + block for piece in pieces for block in range(each)]


def _classify(documents: npt.NDArray[np.int64], firsts: list[int]) -> npt.NDArray[np.int8]:
    """For each pair of blocks: all positions are of one document, no document occurs in both, or anything else."""
    low, high = (extreme.reduceat(documents, firsts, axis=1) for extreme in (np.minimum, np.maximum))
    one = low == high
    full = one[:, :, None] & one[:, None] & (low[:, :, None] == low[:, None])
    empty = (high[:, :, None] < low[:, None]) | (low[:, :, None] > high[:, None])
    return np.where(full.all(0), _FULL, np.where(empty.all(0), _EMPTY, _MIXED)).astype(np.int8)


def _classify_window(blocks: list[tuple[int, int]], window: int) -> npt.NDArray[np.int8]:
    """For each block of queries (row) and of keys (column): every query sees every key, none sees any, or anything else; causality aside."""
    first, end = np.array(blocks).T
    nearest, farthest = first[:, None] - (end - 1), (end - 1)[:, None] - first
    return np.where(farthest < window, _FULL, np.where(nearest >= window, _EMPTY, _MIXED)).astype(np.int8)


Part = tuple[Sequence[int], Tensor, Tensor]
"""The numbers of the pieces that arrived, and their keys and values."""

VisitBack = Callable[[Part, Tensor, Tensor], None]
"""Adds to the gradients of a part's keys and values."""


Products = Callable[[Sequence[int]], Iterator[tuple[slice, slice, Mask]]]
"""What to compute with the keys of these pieces: (queries, keys, mask)."""


class KVTransport:
    """Brings the keys and values of all ranks to this rank's queries; the first part has those of its own positions. This one is for
    keys and values that are all here already."""

    pieces: tuple[int, ...] = (0,)
    """Pieces of the sequence that this rank's queries come from, in rising order."""
    count = 1
    """Pieces of the whole sequence."""

    def forward(self, k: Tensor, v: Tensor) -> Iterator[Part]:
        """Bring every rank's keys and values here."""
        yield self.pieces, k, v

    def backward(self, k: Tensor, v: Tensor, visit: VisitBack) -> tuple[Tensor, Tensor]:
        """Bring them again; return the gradients of this rank's own keys and values, summed over all ranks in full precision."""
        dk, dv = (torch.zeros(x.shape, dtype=wide(x.dtype), device=x.device) for x in (k, v))
        visit((self.pieces, k, v), dk, dv)
        return dk, dv


def attend(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, transport: KVTransport, plan: MaskPlan, scoring: Scoring) -> Tensor:
    """Differentiable in the first three, and in the sinks."""
    scale, cap, sinks_H = scoring
    scale = q_BHSE.shape[-1] ** -0.5 if scale is None else scale
    products = partial(plan.products, transport.pieces, (scale, cap), q_BHSE.device)
    return _Attend.apply(q_BHSE, k_BKSE, v_BKSE, sinks_H, (transport, products))


class _Attend(torch.autograd.Function):
    """Saves its inputs, its result and one number per query; the backward brings the other ranks' keys and values again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, how: tuple[KVTransport, Products]) -> Tensor:
        transport, products = how
        out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=wide(q.dtype), device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=wide(q.dtype), device=q.device)
        with torch.autocast(q.device.type, enabled=False):
            for pieces, k_part, v_part in transport.forward(k, v):
                for rows, keys, mask in products(pieces):
                    more = forward(q[:, :, rows], k_part[:, :, keys], v_part[:, :, keys], mask)
                    _add(out[:, :, rows], lse[:, :, rows], *more)
            if sinks is not None:  # one more part, of no value
                lse, factor = with_sinks(lse, sinks)
                out *= factor[..., None]
        result = out.to(q.dtype)
        ctx.transport, ctx.products = transport, products
        ctx.save_for_backward(q, k, v, sinks, result, lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dq = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)

        def visit(part: Part, dk: Tensor, dv: Tensor) -> None:
            pieces, k, v = part
            for rows, keys, mask in ctx.products(pieces):
                inputs, result = (q[:, :, rows], k[:, :, keys], v[:, :, keys]), (out[:, :, rows], lse[:, :, rows])
                gradients = backward(gradient[:, :, rows], inputs, result, mask)
                for total, where, more in zip((dq, dk, dv), (rows, keys, keys), gradients, strict=True):
                    total[:, :, where] += more

        with torch.autocast(q.device.type, enabled=False):
            dk, dv = ctx.transport.backward(k, v, visit)
            dsinks = None if sinks is None else sink_gradient(gradient, out, lse, sinks)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None


def _add(out: Tensor, lse: Tensor, more: Tensor, its_lse: Tensor) -> None:
    """Combine the result over more keys with the result so far, in place."""
    both = torch.logaddexp(lse, its_lse)
    out.mul_((lse - both).exp_()[..., None]).add_(more * (its_lse - both).exp_()[..., None])
    lse.copy_(both)
