"""Loads and stores that the Triton kernels share: in fp32 inside, in the tensor's own format outside. Only those without a mask are wide ones."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load(at, inside, MASKED: tl.constexpr):
    x = tl.load(at, mask=inside, other=0.0) if MASKED else tl.load(at)
    return x.to(tl.float32)


@triton.jit
def store(at, x, inside, MASKED: tl.constexpr):
    if MASKED:
        tl.store(at, x.to(at.dtype.element_ty), mask=inside)
    else:
        tl.store(at, x.to(at.dtype.element_ty))
