"""Attention of one rank's queries to keys that arrive in parts: partial results are combined as if the softmax were taken over all
keys at once. `parallel/context/context_parallel` calls it with a transport that brings keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.parallel.context.kernels import Mask, backward, forward, wide
from phalanx.parallel.context.mask import MaskPlan, Tile

Visit = Callable[[Sequence[int], Tensor, Tensor], None]
"""Called with the numbers of the pieces that arrived, and their keys and values."""

VisitBack = Callable[[Sequence[int], tuple[Tensor, Tensor], tuple[Tensor, Tensor]], None]
"""The same with (keys, values) and their gradients, to which it adds."""


class KVTransport(Protocol):
    """Brings the keys and values of all ranks to this rank's queries. The first visit has those of its own positions."""

    pieces: tuple[int, ...]
    """Pieces of the sequence that this rank's queries come from, in rising order."""

    def forward(self, k: Tensor, v: Tensor, visit: Visit) -> None:
        """Bring every rank's keys and values here."""

    def backward(self, k: Tensor, v: Tensor, visit: VisitBack) -> tuple[Tensor, Tensor]:
        """Bring them again; return the gradients of this rank's own keys and values, summed over all ranks in full precision."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a forward and its backward share."""

    transport: KVTransport
    mask: MaskPlan
    scale: float


def attend(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, task: Task) -> Tensor:
    """Differentiable in all three."""
    return _Attend.apply(q_BHSE, k_BKSE, v_BKSE, task)


class _Attend(torch.autograd.Function):
    """Saves its inputs, its result and one number per query; the backward brings the other ranks' keys and values again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, task: Task) -> Tensor:
        out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=wide(q.dtype), device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=wide(q.dtype), device=q.device)
        documents = task.mask.table(task.transport.pieces)

        def visit(pieces: Sequence[int], k: Tensor, v: Tensor) -> None:
            theirs = task.mask.table(pieces)
            for tile in task.mask.tiles(task.transport.pieces, pieces):
                rows, keys = slice(*tile.queries), slice(*tile.keys)
                part = forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], _mask(tile, documents, theirs, task.scale))
                _add(out[:, :, rows], lse[:, :, rows], *part)

        with torch.autocast(q.device.type, enabled=False):
            task.transport.forward(k, v, visit)
        result = out.to(q.dtype)
        ctx.task = task
        ctx.save_for_backward(q, k, v, result, lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        task: Task = ctx.task
        documents = task.mask.table(task.transport.pieces)
        dq = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)

        def visit(pieces: Sequence[int], kv: tuple[Tensor, Tensor], dkv: tuple[Tensor, Tensor]) -> None:
            theirs = task.mask.table(pieces)
            for tile in task.mask.tiles(task.transport.pieces, pieces):
                rows, keys = slice(*tile.queries), slice(*tile.keys)
                inputs = q[:, :, rows], kv[0][:, :, keys], kv[1][:, :, keys]
                result = out[:, :, rows], lse[:, :, rows]
                dq_part, dk_part, dv_part = backward(
                    gradient[:, :, rows], inputs, result, _mask(tile, documents, theirs, task.scale)
                )
                dq[:, :, rows] += dq_part
                dkv[0][:, :, keys] += dk_part
                dkv[1][:, :, keys] += dv_part

        with torch.autocast(q.device.type, enabled=False):
            dk, dv = task.transport.backward(k, v, visit)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _mask(tile: Tile, queries_BS: Tensor | None, keys_BT: Tensor | None, scale: float) -> Mask:
    if not tile.masked:
        return Mask(None, tile.causal, scale)
    assert queries_BS is not None
    assert keys_BT is not None
    mask_BST = queries_BS[:, slice(*tile.queries), None] == keys_BT[:, None, slice(*tile.keys)]
    if tile.causal:
        mask_BST[:, :, -mask_BST.shape[1] :].tril_()
    return Mask(mask_BST[:, None], False, scale)


def _add(out: Tensor, lse: Tensor, more: Tensor, its_lse: Tensor) -> None:
    """Combine the result over more keys with the result so far, in place."""
    both = torch.logaddexp(lse, its_lse)
    out.mul_((lse - both).exp_()[..., None]).add_(more * (its_lse - both).exp_()[..., None])
    lse.copy_(both)
