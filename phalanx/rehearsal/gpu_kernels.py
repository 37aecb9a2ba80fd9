"""The kernels that torch would run on a GPU: which attention kernel it chooses, and the memory that kernels allocate for themselves.
`rehearsal/fake_gpu` uses the first in place of torch's own choice, which asks the real device; `rehearsal/op_tracker` the second.

What attention saves for the backward depends on the kernel: from one number per query to the whole table of scores. The rules are those
of torch 2.11 to 2.13 (aten/src/ATen/native/transformers/cuda/sdp_utils.cpp), checked on an H200. Memory inside kernels appears in no
operation, yet it can be the peak; its formulas were measured on an H200 with torch 2.11. CPUs have none.
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
    """What libraries ask about a GPU."""

    name: str
    capability: tuple[int, int]
    processors: int = 132
    """Number of streaming multiprocessors, over which sums of many rows are spread."""

    @property
    def workspace(self) -> int:
        """Bytes that cuBLAS allocates for each thread that computes matrix products."""
        return 32 << 20 if self.capability >= (9, 0) else (4096 * 2 + 16 * 8) << 10


CARDS = {
    "v100": Card("Tesla V100", (7, 0), 80),
    "a100": Card("NVIDIA A100", (8, 0), 108),
    "h100": Card("NVIDIA H100", (9, 0), 132),
    "h200": Card("NVIDIA H200", (9, 0), 132),
    "b200": Card("NVIDIA B200", (10, 0), 148),
}


def card(name: str) -> Card:
    """The GPU with this catalogue key or driver name; an unknown GPU counts as a Hopper."""
    low = name.lower()
    aliases = {"h800": "h100", "gb200": "b200", "l40": "a100"}
    key = next((key for key in (*CARDS, *aliases) if key in low), "h100")
    return CARDS[aliases.get(key, key)]


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalDevice:
    """The device that the rehearsed rank runs on."""

    card: Card | None
    """The GPU; None: a CPU."""
    capacity: int | None = None
    """Bytes of the device that this rank may use; None: no limit."""
    node: int = 8
    """Number of devices of a host."""
    island: int = 8
    """Number of devices that share fast links."""

    def tier(self, ranks: list[int]) -> str:
        """The slowest links between these ranks."""
        for name, size in (("node", self.node), ("island", self.island)):
            if min(ranks) // size == max(ranks) // size:
                return name
        return "across"


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


def choosing_attention(real: Callable[..., Tensor], card: Card, on_gpu: Callable[[Tensor], bool]) -> Callable[..., Tensor]:
    """A replacement of F.scaled_dot_product_attention that chooses the kernel as the GPU `card` would."""

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **how: Any) -> Tensor:
        if not on_gpu(query):
            return real(query, key, value, attn_mask, *rest, **how)
        how = dict(zip(("dropout_p", "is_causal"), rest, strict=False)) | how
        if torch.is_autocast_enabled("cpu"):
            low = torch.get_autocast_dtype("cpu")
            query, key, value = (x.to(low) for x in (query, key, value))
            if attn_mask is not None and attn_mask.is_floating_point():
                attn_mask = attn_mask.to(low)
        widths, grouped = (query.shape[-1], value.shape[-1]), query.shape[1] != key.shape[1]
        way = kernel(card, query.dtype, widths=widths, masked=attn_mask is not None, grouped=grouped)
        with torch.autocast("cpu", enabled=False):
            bias = _bias(attn_mask, query)
            return _attend((query, key, value), bias, how.get("is_causal", False), how.get("scale"), way)

    return attend


def _bias(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """A boolean mask as numbers to add, as torch converts it."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    zero, never = (torch.scalar_tensor(number, dtype=q.dtype, device=q.device) for number in (0.0, -math.inf))
    return torch.where(mask, zero, never)


def _attend(qkv: tuple[Tensor, Tensor, Tensor], bias: Tensor | None, causal: bool, scale: float | None, way: str) -> Tensor:
    q, k, v = qkv
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
    return _aten._scaled_dot_product_attention_math(q, k, v, bias, 0.0, causal, scale=scale, enable_gqa=grouped)[0]


_FEW = 3072
"""Up to this many tokens, the backward of an embedding does not sort."""
_SUMMED = 10
"""Rows that it sums at a time."""

Formula = Callable[[tuple[Any, ...], int], int]
"""(arguments of the operation, number of the GPU's multiprocessors) → bytes."""


def workspace_bytes(func: Any, args: tuple[Any, ...], processors: int) -> int:
    """Bytes that the kernel of this operation allocates besides its results and frees before it returns."""
    formula = FORMULAS.get(func)
    return 0 if formula is None else formula(args, processors)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _if_broadcast(gradient: Tensor) -> int:
    """A gradient that is broadcast is copied first."""
    return _bytes(gradient) if 0 in gradient.stride() else 0


def _if_grouped(q: Tensor, k: Tensor, v: Tensor) -> int:
    """With grouped heads, the gradients of keys and values of every query head."""
    return (_bytes(k) + _bytes(v)) // k.shape[1] * q.shape[1] if q.shape[1] != k.shape[1] else 0


def _cudnn_backward(args: tuple[Any, ...], _: int) -> int:
    """The queries' gradient in fp32, and one number per query."""
    gradient, q, k, v = args[:4]
    return q.numel() * 4 + q.numel() // q.shape[-1] * 4 + _if_grouped(q, k, v) + _if_broadcast(gradient)


def _flash_backward(args: tuple[Any, ...], _: int) -> int:
    _, q, k, v = args[:4]
    rows = -(-q.shape[2] // 128) * 128
    return q.shape[0] * q.shape[1] * rows * (-(-q.shape[3] // 32) * 32 + 1) * 4 + _if_grouped(q, k, v)


def _efficient_backward(args: tuple[Any, ...], _: int) -> int:
    gradient, q = args[:2]
    return q.numel() * 4 + 2 * (q.numel() // q.shape[-1]) * 4 + _if_broadcast(gradient)


def _embedding_backward(args: tuple[Any, ...], _: int) -> int:
    gradient, indices, rows = args[:3]
    tokens = indices.numel()
    if tokens <= _FEW:
        return 0
    return (tokens // _SUMMED + min(tokens, rows)) * gradient.shape[-1] * 4 + 48 * tokens


def _sum(args: tuple[Any, ...], processors: int) -> int:
    """The sum over all rows of a matrix, such as the gradient of a bias, has partial sums of many blocks."""
    x, dims = args[0], args[1]
    if x.ndim != 2 or list(dims or ()) != [0] or not x.is_contiguous() or x.shape[0] < 256:
        return 0
    blocks = max(1, min(-(-x.shape[0] // 256), -(-processors // -(-x.shape[1] // 512))))
    return 4 * x.shape[1] * blocks * 512 if blocks > 1 else 0


FORMULAS: dict[Any, Formula] = {
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
    _aten.logsumexp.default: lambda args, _: _bytes(args[0]),
    _aten._softmax_backward_data.default: lambda args, _: _bytes(args[0]),
    _aten._safe_softmax.default: lambda args, _: args[0].numel(),
    _aten.sum.dim_IntList: _sum,
    _aten.sort.stable: lambda args, _: 2 * _bytes(args[0]) + args[0].numel() * 20,
}
