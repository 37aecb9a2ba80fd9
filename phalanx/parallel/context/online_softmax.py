"""Attention of one rank's queries to keys that come in parts, by whatever way: the parts' results are put together as if the
softmax had been taken over all keys at once. `parallel/context/context_parallel` gives it a way for keys and values to come; `parallel/context/ring` is one.
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
from phalanx.parallel.context.mask import Call, View

Visit = Callable[[Sequence[int], Tensor, Tensor], None]
"""Called with the numbers of the pieces that have come, and their keys and values."""

VisitBack = Callable[[Sequence[int], tuple[Tensor, Tensor], tuple[Tensor, Tensor]], None]
"""The same with keys and values as a pair, and their gradients, to which it adds."""


class KVTransport(Protocol):
    """How this rank's queries meet the keys of all. The first visit brings those of its own positions."""

    pieces: tuple[int, ...]
    """Of the sequence, in rising order: those of this rank's queries."""

    def there(self, k: Tensor, v: Tensor, visit: Visit) -> None:
        """Bring every rank's keys and values here."""

    def back(self, k: Tensor, v: Tensor, visit: VisitBack) -> tuple[Tensor, Tensor]:
        """Bring them again, and gather from all ranks the gradients of this rank's own, summed in full precision."""


@dataclass(frozen=True, slots=True)
class Task:
    """What does not change between a forward and its backward."""

    carrier: KVTransport
    view: View
    scale: float


def attend(q_BHSE: Tensor, k_BKSE: Tensor, v_BKSE: Tensor, task: Task) -> Tensor:
    """Differentiable in all three."""
    return _Attend.apply(q_BHSE, k_BKSE, v_BKSE, task)


class _Attend(torch.autograd.Function):
    """Keeps what it was given, its result and one number per query; keys and values of others are brought again."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, task: Task) -> Tensor:
        out = torch.zeros(*q.shape[:3], v.shape[-1], dtype=wide(q.dtype), device=q.device)
        lse = torch.full(q.shape[:3], -math.inf, dtype=wide(q.dtype), device=q.device)
        documents = task.view.table(task.carrier.pieces)

        def visit(pieces: Sequence[int], k: Tensor, v: Tensor) -> None:
            theirs = task.view.table(pieces)
            for call in task.view.calls(task.carrier.pieces, pieces):
                rows, keys = slice(*call.queries), slice(*call.keys)
                part = forward(q[:, :, rows], k[:, :, keys], v[:, :, keys], _sight(call, documents, theirs, task.scale))
                _add(out[:, :, rows], lse[:, :, rows], *part)

        with torch.autocast(q.device.type, enabled=False):
            task.carrier.there(k, v, visit)
        result = out.to(q.dtype)
        ctx.task = task
        ctx.save_for_backward(q, k, v, result, lse)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse = ctx.saved_tensors
        task: Task = ctx.task
        documents = task.view.table(task.carrier.pieces)
        dq = torch.zeros(q.shape, dtype=wide(q.dtype), device=q.device)

        def visit(pieces: Sequence[int], kv: tuple[Tensor, Tensor], dkv: tuple[Tensor, Tensor]) -> None:
            theirs = task.view.table(pieces)
            for call in task.view.calls(task.carrier.pieces, pieces):
                rows, keys = slice(*call.queries), slice(*call.keys)
                inputs = q[:, :, rows], kv[0][:, :, keys], kv[1][:, :, keys]
                result = out[:, :, rows], lse[:, :, rows]
                found = backward(gradient[:, :, rows], inputs, result, _sight(call, documents, theirs, task.scale))
                dq[:, :, rows] += found[0]
                dkv[0][:, :, keys] += found[1]
                dkv[1][:, :, keys] += found[2]

        with torch.autocast(q.device.type, enabled=False):
            dk, dv = task.carrier.back(k, v, visit)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None


def _sight(call: Call, queries_BS: Tensor | None, keys_BT: Tensor | None, scale: float) -> Mask:
    if not call.masked:
        return Mask(None, call.causal, scale)
    assert queries_BS is not None
    assert keys_BT is not None
    mask_BST = queries_BS[:, slice(*call.queries), None] == keys_BT[:, None, slice(*call.keys)]
    if call.causal:
        mask_BST[:, :, -mask_BST.shape[1] :].tril_()
    return Mask(mask_BST[:, None], False, scale)


def _add(out: Tensor, lse: Tensor, more: Tensor, its_lse: Tensor) -> None:
    """Take the result over some more keys into the result so far, in place."""
    both = torch.logaddexp(lse, its_lse)
    out.mul_((lse - both).exp_()[..., None]).add_(more * (its_lse - both).exp_()[..., None])
    lse.copy_(both)
