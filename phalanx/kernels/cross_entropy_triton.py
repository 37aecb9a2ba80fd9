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
    full = width // BLOCK * BLOCK
    if GIVEN:
        total = tl.load(whole + row)
    else:
        largest = -float("inf")
        sum_ = 0.0
        # Only loads and stores without a mask are wide ones, so the rest of a row that fills no block comes by itself.
        for first in range(0, full, BLOCK):
            x = tl.load(base + first + offsets).to(tl.float32)
            new = tl.maximum(largest, tl.max(x, 0))
            sum_ = sum_ * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
            largest = new
        if full < width:
            x = tl.load(base + full + offsets, mask=full + offsets < width, other=-float("inf")).to(tl.float32)
            new = tl.maximum(largest, tl.max(x, 0))
            sum_ = sum_ * tl.exp(largest - new) + tl.sum(tl.exp(x - new), 0)
            largest = new
        total = largest + tl.log(sum_)
        tl.store(whole + row, total)
        here = column >= 0
        tl.store(target + row, tl.load(base + column, mask=here, other=0.0).to(tl.float32))
    if GRADIENT:
        counts = column != IGNORED
        for first in range(0, full, BLOCK):
            place = first + offsets
            share = _share(tl.load(base + place), place, column, total, counts)
            tl.store(base + place, share.to(logits.dtype.element_ty))
        if full < width:
            place = full + offsets
            inside = place < width
            share = _share(tl.load(base + place, mask=inside, other=-float("inf")), place, column, total, counts)
            tl.store(base + place, share.to(logits.dtype.element_ty), mask=inside)


@triton.jit
def _share(x, place, column, total, counts):
    """The probability, less 1 for the target; 0 for a token that does not count."""
    return tl.where(counts, tl.exp(x.to(tl.float32) - total) - tl.where(place == column, 1.0, 0.0), 0.0)
