"""The Triton kernel of `kernels/fused_adamw`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from phalanx.kernels.triton_access import load, store

ELEMENT = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def adamw_kernel(
    pointers,
    blocks,
    sizes,
    roots,
    divisor,
    skip,
    beta1,
    beta2,
    rest1,
    rest2,
    eps,
    kept,
    count,
    GRADIENT: tl.constexpr,
    MOMENT: tl.constexpr,
    WEIGHT: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per block of a parameter. Rows of `pointers`: values, gradients, means, squares, weights. For each parameter, `sizes`: the
    learning rate over the correction of the mean; `roots`: of the correction of the square. `rest1`: 1 - beta1. `kept`: 1 - learning rate
    · weight decay."""
    if tl.load(skip) != 0:
        return
    entry = blocks + tl.program_id(0).to(tl.int64) * 3
    which = tl.load(entry)
    first = tl.multiple_of(tl.load(entry + 1), BLOCK)
    left = tl.load(entry + 2) - first
    column = pointers + which
    value_at = tl.multiple_of(tl.load(column).to(tl.pointer_type(tl.float32)), ALIGN) + first
    gradient_at = tl.multiple_of(tl.load(column + count).to(tl.pointer_type(GRADIENT)), ALIGN) + first
    mean_at = tl.multiple_of(tl.load(column + 2 * count).to(tl.pointer_type(MOMENT)), ALIGN) + first
    square_at = tl.multiple_of(tl.load(column + 3 * count).to(tl.pointer_type(MOMENT)), ALIGN) + first
    weight_at = value_at
    if WEIGHT is not None:
        weight_at = tl.multiple_of(tl.load(column + 4 * count).to(tl.pointer_type(WEIGHT)), ALIGN) + first
    size = tl.load(sizes + which)
    root = tl.load(roots + which)
    scale = tl.load(divisor)
    # Only loads and stores without a mask are wide ones.
    if left >= BLOCK:
        _update(
            value_at, gradient_at, mean_at, square_at, weight_at, left, size, root, scale, beta1, beta2, rest1, rest2, eps, kept,
            WEIGHT, False, BLOCK,
        )  # fmt: skip
    else:
        _update(
            value_at, gradient_at, mean_at, square_at, weight_at, left, size, root, scale, beta1, beta2, rest1, rest2, eps, kept,
            WEIGHT, True, BLOCK,
        )  # fmt: skip


@triton.jit
def _update(
    value_at, gradient_at, mean_at, square_at, weight_at, left, size, root, scale, beta1, beta2, rest1, rest2, eps, kept,
    WEIGHT: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.arange(0, BLOCK)
    value = load(value_at + place, place < left, MASKED)
    gradient = load(gradient_at + place, place < left, MASKED) / scale
    mean = beta1 * load(mean_at + place, place < left, MASKED) + rest1 * gradient
    square = beta2 * load(square_at + place, place < left, MASKED) + rest2 * gradient * gradient
    value = kept * value - size * mean / (tl.sqrt(square) / root + eps)
    store(value_at + place, value, place < left, MASKED)
    store(mean_at + place, mean, place < left, MASKED)
    store(square_at + place, square, place < left, MASKED)
    if WEIGHT is not None:
        store(weight_at + place, value, place < left, MASKED)
