"""A tensor times one number that the device has: torch's product reads and writes element by element where a factor is a tensor. Used by
`parallel/vocab_parallel`, whose gradients are as large as the head."""

from __future__ import annotations

import torch
from torch import Tensor

from phalanx.kernels.triton_support import launches_triton, operation

_BLOCK = 4096


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x · factor in the dtype of x. The factor keeps its own: on GPUs, torch's product rounds it to 16 bits where x has them."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return x * factor
    return _scaled(x, factor) if launches_triton(x) and x.is_contiguous() else (x.float() * factor).to(x.dtype)


@operation("scaled", mutates=())
def _scaled(x: Tensor, factor: Tensor) -> Tensor:
    from phalanx.kernels.scaled_triton import scale_kernel

    y = torch.empty_like(x)
    scale_kernel[(-(-x.numel() // _BLOCK),)](x, y, factor, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return y


@_scaled.register_fake
def _(x: Tensor, factor: Tensor) -> Tensor:
    return torch.empty_like(x)
