"""The Triton kernel of `kernels/cross_entropy`: one program per token walks over its row of the logits once, or twice for the gradient."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_kernel(
    logits,
    columns,
    whole,
    target,
    width,
    stride,
    GIVEN: tl.constexpr,
    GRADIENT: tl.constexpr,
    IGNORED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """GIVEN: `whole` is an input. GRADIENT: it takes the place of the logits."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * stride
    column = tl.load(columns + row)
    offsets = tl.arange(0, BLOCK)
    if GIVEN:
        total = tl.load(whole + row)
    else:
        largest = -float("inf")
        sum_ = 0.0
        for first in range(0, width, BLOCK):
            x = tl.load(base + first + offsets, mask=first + offsets < width, other=-float("inf")).to(tl.float32)
            new = tl.maximum(largest, tl.max(x, 0))
            sum_ = sum_ * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
            largest = new
        total = largest + tl.log(sum_)
        tl.store(whole + row, total)
        here = column >= 0
        tl.store(target + row, tl.load(base + column, mask=here, other=0.0).to(tl.float32))
    if GRADIENT:
        counts = column != IGNORED
        for first in range(0, width, BLOCK):
            place = first + offsets
            inside = place < width
            x = tl.load(base + place, mask=inside, other=-float("inf")).to(tl.float32)
            share = tl.exp(x - total) - tl.where(place == column, 1.0, 0.0)
            tl.store(base + place, tl.where(counts, share, 0.0).to(logits.dtype.element_ty), mask=inside)
