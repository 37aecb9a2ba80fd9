"""The Triton kernels of `kernels/rms_norm`: a program has a token's row in its registers."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def forward_kernel(x, weight, y, roots, width, eps, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    row = _load(x + token * width + column, column < width, MASKED)
    root = 1.0 / tl.sqrt(tl.sum(row * row, 0) / width + eps)
    tl.store(roots + token, root)
    result = row * root * _load(weight + column, column < width, MASKED)
    _store(y + token * width + column, result, column < width, MASKED)


@triton.jit
def backward_kernel(
    gradient, x, weight, roots, of_x, sums, tokens, width, PROGRAMS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program has every PROGRAMS-th token, and writes the sum of its part of the weight's gradient."""
    first = tl.program_id(0)
    column = tl.arange(0, BLOCK)
    factor = _load(weight + column, column < width, MASKED)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for token in range(first, tokens, PROGRAMS):
        place = tl.cast(token, tl.int64) * width + column
        root = tl.load(roots + token)
        normed = _load(x + place, column < width, MASKED) * root
        d = _load(gradient + place, column < width, MASKED)
        total += d * normed
        d = d * factor
        share = tl.sum(d * normed, 0) / width
        _store(of_x + place, root * (d - normed * share), column < width, MASKED)
    at = sums + first.to(tl.int64) * width + column
    _store(at, total, column < width, MASKED)


@triton.jit
def _load(at, inside, MASKED: tl.constexpr):
    x = tl.load(at, mask=inside, other=0.0) if MASKED else tl.load(at)
    return x.to(tl.float32)


@triton.jit
def _store(at, x, inside, MASKED: tl.constexpr):
    if MASKED:
        tl.store(at, x.to(at.dtype.element_ty), mask=inside)
    else:
        tl.store(at, x.to(at.dtype.element_ty))
