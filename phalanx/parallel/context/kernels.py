"""Attention between some queries and some keys that also says how much weight it found, so that parts can be put together, and its
backward. `parallel/context/online_softmax` calls it; the fused kernels are torch's own, called by name because no public function gives
their log-sum-exp.

Shapes: q [B, H, S, E], k [B, K, T, E], v [B, K, T, V], out [B, H, S, V], lse [B, H, S]; K divides H.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten
_SCORES = 1 << 22  # elements that the kernel without fusion may keep of a table of scores


class Mask(NamedTuple):
    """Which keys each query sees."""

    mask: Tensor | None
    """[B, 1, S, T], true where a query may see a key."""
    causal: bool
    """Where there is no mask: query i sees keys 0 … i."""
    scale: float
    """What scores are multiplied by."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """What sums of numbers of this format are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(q: Tensor, k: Tensor, v: Tensor, sight: Mask) -> tuple[Tensor, Tensor]:
    """(out, lse). A query that may see no key has the weight of nothing: lse is minus infinity and out zero."""
    kernel = _choose(q, v, sight)
    out, lse = _plain(q, k, v, sight) if kernel == "plain" else _fused(kernel, q, k, v, sight)
    if sight.mask is not None:
        # Kernels differ in what they return for such a query: a weight of one with the values of nothing, or no number at all.
        blind = ~sight.mask.any(-1)
        out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -math.inf)
    return out, lse


def backward(
    gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor], sight: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys add to the gradients of q, k and v.

    `result` is (out, lse) over all keys, not over these alone: with it each part of the backward stands by itself.
    """
    kernel = _choose(inputs[0], inputs[2], sight)
    if kernel == "plain":
        return _plain_backward(gradient, inputs, result, sight)
    return _fused_backward(kernel, gradient, inputs, result, sight)


def _choose(q: Tensor, v: Tensor, sight: Mask) -> str:
    device, half = q.device.type, q.dtype in (torch.float16, torch.bfloat16)
    if device == "cpu" and (half or q.dtype in (torch.float32, torch.float64)):
        return "cpu"
    flat = sight.mask is None and max(q.shape[-1], v.shape[-1]) <= 256
    if device == "cuda" and half and flat and torch.cuda.get_device_capability(q.device) >= (8, 0):
        return "flash"
    if device == "cuda" and (half or q.dtype == torch.float32):
        return "efficient"
    return "plain"


def _fused(kernel: str, q: Tensor, k: Tensor, v: Tensor, sight: Mask) -> tuple[Tensor, Tensor]:
    mask, causal, scale = sight
    width, length = v.shape[-1], q.shape[2]
    if kernel == "efficient":
        k, v = (_repeat(x, q.shape[1]) for x in (k, v))
    q, k, v = _same_width(q, k, v)
    if kernel == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_bias(mask, q), scale=scale
        )
    elif kernel == "flash":
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    else:
        out, lse = _aten._scaled_dot_product_efficient_attention(q, k, v, _bias(mask, q), True, 0.0, causal, scale=scale)[:2]
    return out[..., :width], lse[..., :length]


def _fused_backward(
    kernel: str, gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor], sight: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    (q, k, v), (out, lse), (mask, causal, scale) = inputs, result, sight
    widths, heads = (q.shape[-1], k.shape[-1], v.shape[-1]), k.shape[1]
    if kernel == "efficient":
        k, v = (_repeat(x, q.shape[1]) for x in (k, v))
    q, k, v, out, gradient = _same_width(q, k, v, out, gradient)
    if kernel == "cpu":
        found = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal, attn_mask=_bias(mask, q), scale=scale
        )
    elif kernel == "flash":
        # Nothing is dropped, so the kernel does not look at its two tensors for random numbers.
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)
        found = _aten._scaled_dot_product_flash_attention_backward(
            *(gradient, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, random, random),
            scale=scale,
        )
    else:
        random = torch.zeros((), dtype=torch.int64)
        # This kernel takes rows of `out` to lie head behind head, and reads lse in whole blocks of 32 queries.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        found = _aten._scaled_dot_product_efficient_attention_backward(
            *(gradient, q, k, v, _bias(mask, q), out, lse, random, random, 0.0, [True, True, True, False], causal),
            scale=scale,
        )
    dq, dk, dv = (x[..., :width] for x, width in zip(found, widths, strict=False))
    return dq, _unrepeat(dk, heads), _unrepeat(dv, heads)


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """The fused kernels want one width, on GPUs a multiple of 8; channels of zeros change nothing."""
    width = max(x.shape[-1] for x in tensors)
    if tensors[0].device.type != "cpu":
        width += -width % 8
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    if mask is None:
        return None
    batch, _, rows, columns = mask.shape
    # GPUs want rows that begin at multiples of 16 bytes, and one row per head, which need not be another place in memory.
    bias = q.new_full((batch, 1, rows, columns + -columns % 16), -math.inf)[..., :columns].masked_fill_(mask, 0.0)
    return bias.expand(-1, q.shape[1], -1, -1)


def _repeat(x_BKTE: Tensor, heads: int) -> Tensor:
    groups = heads // x_BKTE.shape[1]
    return x_BKTE if groups == 1 else x_BKTE.repeat_interleave(groups, 1)


def _unrepeat(x_BHTE: Tensor, heads: int) -> Tensor:
    if x_BHTE.shape[1] == heads:
        return x_BHTE
    return x_BHTE.unflatten(1, (heads, -1)).sum(2, dtype=wide(x_BHTE.dtype))


def _rows(q: Tensor, k: Tensor) -> list[slice]:
    """The queries in stretches whose scores fit into what may be kept of them."""
    size = max(1, _SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(first, first + size) for first in range(0, q.shape[2], size)]


def _scores(q: Tensor, k: Tensor, rows: slice, sight: Mask) -> Tensor:
    scores = q[:, :, rows] @ k.mT
    if sight.mask is not None:
        return scores.masked_fill_(~sight.mask[:, :, rows], -math.inf)
    if sight.causal:
        keys = torch.arange(k.shape[2], device=k.device)
        scores.masked_fill_(keys > keys[rows, None], -math.inf)
    return scores


def _plain(q: Tensor, k: Tensor, v: Tensor, sight: Mask) -> tuple[Tensor, Tensor]:
    """For what no fused kernel takes."""
    q, k, v = q.to(wide(q.dtype)) * sight.scale, *(_repeat(x.to(wide(x.dtype)), q.shape[1]) for x in (k, v))
    outs, lses = [], []
    for rows in _rows(q, k):
        scores = _scores(q, k, rows, sight)
        lse = scores.logsumexp(-1)
        outs.append(scores.sub_(lse[..., None]).exp_() @ v)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _plain_backward(
    gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor], sight: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    (q, k, v), (out, lse) = inputs, result
    heads = k.shape[1]
    gradient, q, out = (x.to(wide(x.dtype)) for x in (gradient, q, out))
    k, v = (_repeat(x.to(wide(x.dtype)), q.shape[1]) for x in (k, v))
    q = q * sight.scale
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in _rows(q, k):
        weights = _scores(q, k, rows, sight).sub_(lse[:, :, rows, None]).exp_()
        given = gradient[:, :, rows]
        dv += weights.mT @ given
        weights *= given @ v.mT - (given * out[:, :, rows]).sum(-1, keepdim=True)
        dq[:, :, rows] = weights @ k * sight.scale
        dk += weights.mT @ q[:, :, rows]
    return dq, _unrepeat(dk, heads), _unrepeat(dv, heads)
