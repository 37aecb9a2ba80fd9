"""Memory that kernels take for themselves and give back before they return: no operation shows it, and it can be the peak. The
formulas were read off an H200 with torch 2.11, operation by operation. `rehearsal/op_tracker` asks for them; on CPUs there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
_FEW = 3072
"""Tokens up to which an embedding's backward sorts nothing."""
_SUMMED = 10
"""Rows that it adds up at a time."""

Formula = Callable[[tuple[Any, ...], int], int]
"""From an operation's arguments and the GPU's multiprocessors to bytes."""


def hidden(func: Any, args: tuple[Any, ...], processors: int) -> int:
    """Bytes that the kernel of this operation has beside its arguments and results."""
    formula = FORMULAS.get(func)
    return 0 if formula is None else formula(args, processors)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _dense(tensor: Tensor) -> bool:
    return 0 not in tensor.stride()


def _cudnn_backward(args: tuple[Any, ...], _: int) -> int:
    """The queries' gradient in fp32, a number per query, keys' and values' gradients for every query head where heads are grouped."""
    gradient, q, k, v = args[:4]
    found = q.numel() * 4 + q.numel() // q.shape[-1] * 4
    if q.shape[1] != k.shape[1]:
        found += (_bytes(k) + _bytes(v)) // k.shape[1] * q.shape[1]
    return found if _dense(gradient) else found + _bytes(gradient)


def _flash_backward(args: tuple[Any, ...], _: int) -> int:
    _, q, k, v = args[:4]
    rows = -(-q.shape[2] // 128) * 128
    found = q.shape[0] * q.shape[1] * rows * (-(-q.shape[3] // 32) * 32 + 1) * 4
    if q.shape[1] != k.shape[1]:
        found += (_bytes(k) + _bytes(v)) // k.shape[1] * q.shape[1]
    return found


def _efficient_backward(args: tuple[Any, ...], _: int) -> int:
    gradient, q = args[:2]
    found = q.numel() * 4 + 2 * (q.numel() // q.shape[-1]) * 4
    return found if _dense(gradient) else found + _bytes(gradient)


def _embedding_backward(args: tuple[Any, ...], _: int) -> int:
    gradient, indices, rows = args[:3]
    tokens = indices.numel()
    if tokens <= _FEW:
        return 0
    return (tokens // _SUMMED + min(tokens, rows)) * gradient.shape[-1] * 4 + 48 * tokens


def _sum(args: tuple[Any, ...], processors: int) -> int:
    """Over all rows of a matrix, as a bias's gradient is: partial sums of many blocks."""
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
