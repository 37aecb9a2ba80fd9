"""The Triton kernel of `kernels/scaled`."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scale_kernel(x, y, factor, count, BLOCK: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * BLOCK
    place = first + tl.arange(0, BLOCK)
    by = tl.load(factor).to(tl.float32)
    # Only loads and stores without a mask are wide ones.
    if first + BLOCK <= count:
        tl.store(y + place, (tl.load(x + place).to(tl.float32) * by).to(y.dtype.element_ty))
    else:
        inside = place < count
        tl.store(y + place, (tl.load(x + place, mask=inside).to(tl.float32) * by).to(y.dtype.element_ty), mask=inside)
