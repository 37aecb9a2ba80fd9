"""Which of torch's attention kernels a GPU would take: what is kept for the backward hangs on it, from one number per query to a whole
table of scores. `rehearsal/fake_gpu` puts it in place of torch's own choice, which asks the device that is really there.

The rules are those of torch 2.11 to 2.13 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), checked on an H200 over widths,
masks, formats and grouped heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Card:
    """As much of a GPU as libraries ask for."""

    name: str
    capability: tuple[int, int]
    processors: int = 132
    """Streaming multiprocessors: sums over many rows are spread over them."""

    @property
    def workspace(self) -> int:
        """Bytes that cuBLAS keeps for each thread that multiplies."""
        return 32 << 20 if self.capability >= (9, 0) else (4096 * 2 + 16 * 8) << 10


NONE = Card("", (0, 0), 0)


CARDS = {
    "v100": Card("Tesla V100", (7, 0), 80),
    "a100": Card("NVIDIA A100", (8, 0), 108),
    "h100": Card("NVIDIA H100", (9, 0), 132),
    "h200": Card("NVIDIA H200", (9, 0), 132),
    "b200": Card("NVIDIA B200", (10, 0), 148),
}


def card(name: str) -> Card:
    """By the catalogue's key or the driver's name; a GPU that is not known is taken for a Hopper."""
    low = name.lower()
    aliases = {"h800": "h100", "gb200": "b200", "l40": "a100"}
    key = next((key for key in (*CARDS, *aliases) if key in low), "h100")
    return CARDS[aliases.get(key, key)]


def kernel(card: Card, dtype: torch.dtype, *, widths: tuple[int, int], masked: bool, grouped: bool) -> str:
    """ "cudnn", "flash", "efficient" or "math", in the order in which torch tries them."""
    half, whole = dtype in (torch.float16, torch.bfloat16), all(width % 8 == 0 for width in widths)
    widest = max(widths)
    if half and card.capability >= (9, 0) and whole and widest <= 256:
        return "cudnn"
    if half and card.capability >= (8, 0) and not masked and widest <= 256 and widths[0] == widths[1]:
        return "flash"
    aligned = all(width % (8 if half else 4) == 0 for width in widths) and (
        dtype != torch.bfloat16 or card.capability >= (8, 0)
    )
    if not grouped and aligned and dtype in (torch.float16, torch.bfloat16, torch.float32):
        return "efficient"
    return "math"


def chosen(real: Callable[..., Tensor], card: Card, on_gpu: Callable[[Tensor], bool]) -> Callable[..., Tensor]:
    """In place of F.scaled_dot_product_attention."""

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **how: Any) -> Tensor:
        if not on_gpu(query):
            return real(query, key, value, attn_mask, *rest, **how)
        how = dict(zip(("dropout_p", "is_causal"), rest, strict=False)) | how
        if torch.is_autocast_enabled("cpu"):
            low = torch.get_autocast_dtype("cpu")
            query, key, value = (x.to(low) for x in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(low)
        way = _choice(card, query, key, value, attn_mask)
        with torch.autocast("cpu", enabled=False):
            bias = _bias(attn_mask, query)
            return _attend((query, key, value), bias, how.get("is_causal", False), how.get("scale"), way)

    return attend


def _choice(card: Card, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str:
    widths, grouped = (q.shape[-1], v.shape[-1]), q.shape[1] != k.shape[1]
    return kernel(card, q.dtype, widths=widths, masked=mask is not None, grouped=grouped)


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """As torch does with a mask of true and false."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, never = (torch.scalar_tensor(number, dtype=q.dtype, device=q.device) for number in (0.0, -math.inf))
    return torch.where(mask, zero, never)


def _attend(qkv: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, causal: bool, scale: float | None, way: str) -> Tensor:
    q, k, v = qkv
    out: Any
    if way == "cudnn":
        return _aten._scaled_dot_product_cudnn_attention(q, k, v, bias, True, 0.0, causal, scale=scale)[0]
    if way == "flash":
        width = q.shape[-1]
        scale = width**-0.5 if scale is None else scale
        q, k, v = (F.pad(x, (0, -width % 8)) if width % 8 else x for x in qkv)
        return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[0][..., :width]
    if way == "efficient":
        if bias is not None:
            bias = bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        return _aten._scaled_dot_product_efficient_attention(q, k, v, bias, True, 0.0, causal, scale=scale)[0]
    grouped = q.shape[1] != k.shape[1]
    out, _ = _aten._scaled_dot_product_attention_math(q, k, v, bias, 0.0, causal, scale=scale, enable_gqa=grouped)
    return out
