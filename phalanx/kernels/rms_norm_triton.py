"""The Triton kernels of `kernels/rms_norm`: a program has a token's row in its registers."""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.triton_access import load, store


@triton.jit
def forward_kernel(x, weight, y, roots, width, eps, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    row = load(x + token * width + column, column < width, MASKED)
    root = 1.0 / tl.sqrt(tl.sum(row * row, 0) / width + eps)
    tl.store(roots + token, root)
    result = row * root * load(weight + column, column < width, MASKED)
    store(y + token * width + column, result, column < width, MASKED)


@triton.jit
def backward_kernel(
    gradient, x, weight, roots, of_x, sums, tokens, width, PROGRAMS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program has every PROGRAMS-th token, and writes the sum of its part of the weight's gradient."""
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    factor = load(weight + column, column < width, MASKED)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for token in range(first, tokens, PROGRAMS):
        place = tl.cast(token, tl.int64) * width + column
        root = tl.load(roots + token)
        normed = load(x + place, column < width, MASKED) * root
        d = load(gradient + place, column < width, MASKED)
        total += d * normed
        d = d * factor
        share = tl.sum(d * normed, 0) / width
        store(of_x + place, root * (d - normed * share), column < width, MASKED)
    at = sums + first.to(tl.int64) * width + column
    store(at, total, column < width, MASKED)
