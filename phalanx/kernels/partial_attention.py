"""Attention kernels that also return the log-sum-exp of the scores, so that partial results can be combined, and their backwards.
`parallel/context/online_softmax` and `kernels/sink_attention` call them. The fused kernels are torch's own, called by name because no public function returns
their log-sum-exp.

Shapes: q [B, H, S, E], k [B, K, T, E], v [B, K, T, V], out [B, H, S, V], lse [B, H, S]; K divides H.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx import accelerator

_aten = torch.ops.aten
_SCORES = 1 << 22  # elements of the score table that the unfused kernel may hold


class Mask(NamedTuple):
    """Which keys each query sees."""

    visible: Tensor | None
    """[B, 1, S, T], true where a query may see a key."""
    causal: bool
    """Where there is no mask: query i sees keys 0 … i."""
    scale: float
    """Factor of the scores."""
    cap: float | None = None
    """Soft cap of the scores; None: none."""


class Scoring(NamedTuple):
    """What attention does with its scores."""

    scale: float | None = None
    """Their factor; None: 1 / sqrt(width)."""
    cap: float | None = None
    """Their soft cap; None: none."""
    sinks_H: Tensor | None = None
    """A score of each head that no key has; None: none."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype for sums of this dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """(out, lse). For a query that may see no key, lse is minus infinity and out is zero."""
    kernel = _choose(q, v, mask)
    out, lse = _plain(q, k, v, mask) if kernel == "plain" else _fused(kernel, q, k, v, mask)
    if mask.visible is not None:
        # Kernels differ in what they return for such a query: a weight of one and no values, or NaN.
        blind = ~mask.visible.any(-1)
        out, lse = out.masked_fill(blind[..., None], 0.0), lse.masked_fill(blind, -math.inf)
    return out, lse


def backward(
    gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor], mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    """What these keys add to the gradients of q, k and v.

    `result` is (out, lse) over all keys, not only these: with it, each part of the backward is independent.
    """
    kernel = _choose(inputs[0], inputs[2], mask)
    if kernel == "plain":
        return _plain_backward(gradient, inputs, result, mask)
    return _fused_backward(kernel, gradient, inputs, result, mask)


def _choose(q: Tensor, v: Tensor, mask: Mask) -> str:
    if mask.cap is not None:
        return "plain"
    device, half = q.device.type, q.dtype in (torch.float16, torch.bfloat16)
    if device == "cpu" and (half or q.dtype in (torch.float32, torch.float64)):
        return "cpu"
    flat = mask.visible is None and max(q.shape[-1], v.shape[-1]) <= 256
    if device == "cuda" and half and flat and accelerator.of(q.device).capability(q.device) >= (8, 0):
        return "flash"
    if device == "cuda" and (half or q.dtype == torch.float32):
        return "efficient"
    return "plain"


def _fused(kernel: str, q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    visible, causal, scale, _ = mask
    width, length = v.shape[-1], q.shape[2]
    if kernel == "efficient":
        k, v = (_repeat(x, q.shape[1]) for x in (k, v))
    q, k, v = _same_width(q, k, v)
    if kernel == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=_bias(visible, q), scale=scale
        )
    elif kernel == "flash":
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    else:
        out, lse = _aten._scaled_dot_product_efficient_attention(q, k, v, _bias(visible, q), True, 0.0, causal, scale=scale)[:2]
    return out[..., :width], lse[..., :length]


def _fused_backward(
    kernel: str, gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor], mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    (q, k, v), (out, lse), (visible, causal, scale, _) = inputs, result, mask
    widths, heads = (q.shape[-1], k.shape[-1], v.shape[-1]), k.shape[1]
    if kernel == "efficient":
        k, v = (_repeat(x, q.shape[1]) for x in (k, v))
    q, k, v, out, gradient = _same_width(q, k, v, out, gradient)
    if kernel == "cpu":
        gradients = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal, attn_mask=_bias(visible, q), scale=scale
        )
    elif kernel == "flash":
        # Without dropout the kernel does not read its two random-state tensors.
        random = torch.zeros(2, dtype=torch.uint64, device=q.device)
        gradients = _aten._scaled_dot_product_flash_attention_backward(
            *(gradient, q, k, v, out, lse.contiguous(), None, None, q.shape[2], k.shape[2], 0.0, causal, random, random),
            scale=scale,
        )
    else:
        random = torch.zeros((), dtype=torch.int64)
        # This kernel expects rows of `out` with heads adjacent, and reads lse in whole blocks of 32 queries.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        gradients = _aten._scaled_dot_product_efficient_attention_backward(
            *(gradient, q, k, v, _bias(visible, q), out, lse, random, random, 0.0, [True, True, True, False], causal),
            scale=scale,
        )
    dq, dk, dv = (x[..., :width] for x, width in zip(gradients, widths, strict=False))
    return dq, _unrepeat(dk, heads), _unrepeat(dv, heads)


def _same_width(*tensors: Tensor) -> list[Tensor]:
    """Pads with zeros to one width, which the fused kernels need; on GPUs a multiple of 8."""
    width = max(x.shape[-1] for x in tensors)
    if tensors[0].device.type != "cpu":
        width += -width % 8
    return [F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x for x in tensors]


def _bias(visible: Tensor | None, q: Tensor) -> Tensor | None:
    if visible is None:
        return None
    batch, _, rows, columns = visible.shape
    # GPUs need rows that begin at multiples of 16 bytes, and a row per head, which may share memory.
    bias = q.new_full((batch, 1, rows, columns + -columns % 16), -math.inf)[..., :columns].masked_fill_(visible, 0.0)
    return bias.expand(-1, q.shape[1], -1, -1)


def _repeat(x_BKTE: Tensor, heads: int) -> Tensor:
    groups = heads // x_BKTE.shape[1]
    return x_BKTE if groups == 1 else x_BKTE.repeat_interleave(groups, 1)


def _unrepeat(x_BHTE: Tensor, heads: int) -> Tensor:
    if x_BHTE.shape[1] == heads:
        return x_BHTE
    return x_BHTE.unflatten(1, (heads, -1)).sum(2, dtype=wide(x_BHTE.dtype))


def _rows(q: Tensor, k: Tensor) -> list[slice]:
    """The queries in chunks whose scores fit the limit."""
    size = max(1, _SCORES // (q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(first, first + size) for first in range(0, q.shape[2], size)]


def _scores(q: Tensor, k: Tensor, rows: slice, mask: Mask) -> Tensor:
    scores = q[:, :, rows] @ k.mT
    if mask.cap is not None:
        scores = mask.cap * torch.tanh(scores / mask.cap)
    if mask.visible is not None:
        return scores.masked_fill_(~mask.visible[:, :, rows], -math.inf)
    if mask.causal:
        keys = torch.arange(k.shape[2], device=k.device)
        scores.masked_fill_(keys > keys[rows, None], -math.inf)
    return scores


def _plain(q: Tensor, k: Tensor, v: Tensor, mask: Mask) -> tuple[Tensor, Tensor]:
    """For inputs that no fused kernel accepts."""
    q, k, v = q.to(wide(q.dtype)) * mask.scale, *(_repeat(x.to(wide(x.dtype)), q.shape[1]) for x in (k, v))
    outs, lses = [], []
    for rows in _rows(q, k):
        scores = _scores(q, k, rows, mask)
        lse = scores.logsumexp(-1)
        outs.append(scores.sub_(lse[..., None]).exp_() @ v)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def _plain_backward(
    gradient: Tensor, inputs: tuple[Tensor, Tensor, Tensor], result: tuple[Tensor, Tensor], mask: Mask
) -> tuple[Tensor, Tensor, Tensor]:
    (q, k, v), (out, lse) = inputs, result
    heads = k.shape[1]
    gradient, q, out = (x.to(wide(x.dtype)) for x in (gradient, q, out))
    k, v = (_repeat(x.to(wide(x.dtype)), q.shape[1]) for x in (k, v))
    q = q * mask.scale
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in _rows(q, k):
        scores = _scores(q, k, rows, mask)
        # The derivative of a soft cap; of scores that nobody sees, 0.
        slope = None if mask.cap is None else 1 - (scores.clamp(min=-mask.cap) / mask.cap).square_()
        weights = scores.sub_(lse[:, :, rows, None]).exp_()
        dout = gradient[:, :, rows]
        dv += weights.mT @ dout
        weights *= dout @ v.mT - (dout * out[:, :, rows]).sum(-1, keepdim=True)
        if slope is not None:
            weights *= slope
        dq[:, :, rows] = weights @ k * mask.scale
        dk += weights.mT @ q[:, :, rows]
    return dq, _unrepeat(dk, heads), _unrepeat(dv, heads)
