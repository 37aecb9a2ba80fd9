"""Rows of routed tokens: the sum of each token's rows, wherever they lie, and the gradients of experts without rows. Each function has a plain
implementation, for CPUs, and one in Triton. Used by `models/moe`."""

from __future__ import annotations

from functools import reduce
from operator import add

import torch
from torch import Tensor

from phalanx.kernels.triton_support import launches_triton, operation

# Shapes: T tokens, K rows of each, R = T · K rows, D width, E experts.

_CHUNK = 65536  # elements of one program that zeroes
_BLOCK = 4096  # of them at a time


def gather_sum(parts: list[Tensor], places_R: Tensor, copies: int) -> Tensor:
    """For each token the sum of rows places[token · K] … places[token · K + K - 1] of all parts, [T, D]. Several parts are read as their sum."""
    if launches_triton(parts[0]) and parts[0].dtype != torch.float64 and parts[0].numel() > 0:
        return _gather_sum(parts, places_R, copies)
    rows = reduce(add, parts)[places_R]
    return rows.unflatten(0, (-1, copies)).sum(1) if copies > 1 else rows


def zero_unused_(gradient: Tensor, counts_E: Tensor) -> Tensor:
    """Zero the gradients of the experts without rows, in place; those of the others are not touched."""
    if launches_triton(gradient) and gradient[0].is_contiguous() and gradient.numel() > 0:
        _zero_unused_(gradient, counts_E)
        return gradient
    return gradient.masked_fill_((counts_E == 0).view(-1, *[1] * (gradient.ndim - 1)), 0)


@operation("gather_sum", mutates=())
def _gather_sum(parts: list[Tensor], places_R: Tensor, copies: int) -> Tensor:
    return launch_gather_sum(parts, places_R, copies)


@_gather_sum.register_fake
def _(parts: list[Tensor], places_R: Tensor, copies: int) -> Tensor:
    return parts[0].new_empty(len(places_R) // copies, parts[0].shape[1])


@operation("zero_unused_", mutates=("gradient",))
def _zero_unused_(gradient: Tensor, counts_E: Tensor) -> None:
    launch_zero_unused(gradient, counts_E)


@_zero_unused_.register_fake
def _(gradient: Tensor, counts_E: Tensor) -> None:
    return None


def launch_gather_sum(parts: list[Tensor], places_R: Tensor, copies: int) -> Tensor:
    from phalanx.kernels.routed_rows_triton import gather_sum_kernel

    first, second = parts[0].contiguous(), parts[-1].contiguous()
    assert len(parts) <= 2, "of one or two products"
    tokens, width = len(places_R) // copies, first.shape[1]
    out_TD = first.new_empty(tokens, width)
    # A divisor of the width, so that no load has a mask.
    block = next((size for size in (2048, 1024, 512) if width % size == 0), 1024)
    gather_sum_kernel[(tokens, -(-width // block))](
        first,
        second,
        places_R.contiguous(),
        out_TD,
        width,
        COPIES=copies,
        TWO=len(parts) == 2,
        MASKED=width % block > 0,
        BLOCK=block,
        num_warps=block // 512,
    )
    return out_TD


def launch_zero_unused(gradient: Tensor, counts_E: Tensor) -> None:
    from phalanx.kernels.routed_rows_triton import zero_unused_kernel

    each = gradient[0].numel()
    grid = (len(gradient), -(-each // _CHUNK))
    zero_unused_kernel[grid](gradient, counts_E, each, gradient.stride(0), CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=4)
