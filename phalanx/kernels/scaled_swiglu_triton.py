"""The Triton kernels of `kernels/scaled_swiglu`. A program has some rows, and walks over their columns. Rows past the end are the last row
again: to write it twice costs less than a mask in every load."""

from __future__ import annotations

import triton
import triton.language as tl

from phalanx.kernels.triton_access import load, store


@triton.jit
def forward_kernel(
    gate, up, scales, inner, rows, width,
    SCALED: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1)
    start = row.to(tl.int64)[:, None] * width
    if SCALED:
        scale = tl.load(scales + row).to(tl.float32)[:, None]
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        place = start + column
        g = load(gate + place, column < width, MASKED)
        result = g * tl.sigmoid(g) * load(up + place, column < width, MASKED)
        if SCALED:
            result = result * scale
        store(inner + place, result, column < width, MASKED)


@triton.jit
def backward_kernel(
    gradient, gate, up, scales, of_gate, of_up, of_scales, rows, width,
    SCALED: tl.constexpr, MASKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row's gradient of the scale is a sum over one program's columns, so it does not depend on timing."""
    row = tl.minimum(tl.program_id(0) * ROWS + tl.arange(0, ROWS), rows - 1)
    start = row.to(tl.int64)[:, None] * width
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    if SCALED:
        scale = tl.load(scales + row).to(tl.float32)[:, None]
    for first in range(0, width, BLOCK):
        column = first + tl.arange(0, BLOCK)[None, :]
        place = start + column
        d = load(gradient + place, column < width, MASKED)
        g = load(gate + place, column < width, MASKED)
        u = load(up + place, column < width, MASKED)
        share = tl.sigmoid(g)
        silu = g * share
        if SCALED:
            total += d * silu * u
            d = d * scale
        store(of_up + place, d * silu, column < width, MASKED)
        store(of_gate + place, d * u * (share + silu * (1.0 - share)), column < width, MASKED)
    if SCALED:
        tl.store(of_scales + row, tl.sum(total, 1))
