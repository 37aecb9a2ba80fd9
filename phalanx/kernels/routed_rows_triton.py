"""The Triton kernels of `kernels/routed_rows`."""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.triton_access import load, store


@triton.jit
def gather_sum_kernel(
    first, second, places, out, width,
    COPIES: tl.constexpr, TWO: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program adds some columns of one token's rows, in their order. TWO: rows are sums of those of `first` and `second`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for copy in tl.static_range(COPIES):
        place = tl.load(places + token * COPIES + copy).to(tl.int64) * width + column
        total += load(first + place, column < width, MASKED)
        if TWO:
            total += load(second + place, column < width, MASKED)
    store(out + token * width + column, total, column < width, MASKED)


@triton.jit
def zero_unused_kernel(gradient, counts, each, stride, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """A program zeroes a chunk of one expert's gradient, or does nothing if the expert has rows."""
    expert = tl.program_id(0).to(tl.int64)
    if tl.load(counts + expert) == 0:
        begin = tl.program_id(1).to(tl.int64) * CHUNK
        zeros = tl.zeros((BLOCK,), dtype=gradient.dtype.element_ty)
        for first in range(0, CHUNK, BLOCK):
            place = begin + first + tl.arange(0, BLOCK)
            tl.store(gradient + expert * stride + place, zeros, mask=place < each)
