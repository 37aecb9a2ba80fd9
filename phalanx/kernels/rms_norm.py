"""RMS norm of a bf16 or fp16 residual stream on GPUs: one pass over the memory reads it, computes in fp32 and writes the same format, and one pass does so for the
gradients. PyTorch casts to fp32 and back in passes of their own, and keeps the fp32 input. Used by `models/layers`, where nothing is compiled:
a compiler fuses the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.triton_support import launches_triton, operation

# Shapes: T tokens, D width.

_MAX_WIDTH = 16384  # a program has a row in its registers
_PROGRAMS = 512  # of the backward: each sums the weight's gradient over its rows. Fixed, so that sums do not depend on the GPU.


def supports(x: Tensor, weight_D: Tensor) -> bool:
    """Whether the kernels take a tensor and a weight; others go through PyTorch's norm."""
    return (
        launches_triton(x)
        and x.dtype in (torch.bfloat16, torch.float16)
        and weight_D.dtype == torch.float32
        and x.numel() > 0
        and len(weight_D) <= _MAX_WIDTH
    )


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """x / √(mean(x²) + eps) · weight over the last dimension, in the dtype of x, differentiable. Keeps x for the backward."""
    y: Tensor = _RMSNorm.apply(x, weight_D, eps)
    return y


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y_TD, roots_T = _rms_norm(x.reshape(-1, x.shape[-1]), weight_D, eps)
        ctx.save_for_backward(x, weight_D, roots_T)
        return y_TD.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, roots_T = ctx.saved_tensors
        width = x.shape[-1]
        of_x, of_weight = _rms_norm_backward(gradients[0].reshape(-1, width), x.reshape(-1, width), weight_D, roots_T)
        return of_x.view_as(x), of_weight, None


@operation("rms_norm", mutates=())
def _rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return launch_forward(x_TD, weight_D, eps)


@_rms_norm.register_fake
def _(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format), x_TD.new_empty(len(x_TD), dtype=torch.float32)


@operation("rms_norm_backward", mutates=())
def _rms_norm_backward(gradient_TD: Tensor, x_TD: Tensor, weight_D: Tensor, roots_T: Tensor) -> tuple[Tensor, Tensor]:
    return launch_backward(gradient_TD, x_TD, weight_D, roots_T)


@_rms_norm_backward.register_fake
def _(gradient_TD: Tensor, x_TD: Tensor, weight_D: Tensor, roots_T: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format), torch.empty_like(weight_D)


def launch_forward(x_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The result, and 1 / √(mean(x²) + eps) of each token."""
    from phalanx.kernels.rms_norm_triton import forward_kernel

    x_TD = x_TD.contiguous()
    y_TD, roots_T = torch.empty_like(x_TD), x_TD.new_empty(len(x_TD), dtype=torch.float32)
    forward_kernel[(len(x_TD),)](x_TD, weight_D, y_TD, roots_T, x_TD.shape[1], eps, **_row(x_TD.shape[1]))
    return y_TD, roots_T


def launch_backward(gradient_TD: Tensor, x_TD: Tensor, weight_D: Tensor, roots_T: Tensor) -> tuple[Tensor, Tensor]:
    from phalanx.kernels.rms_norm_triton import backward_kernel

    gradient_TD, x_TD = gradient_TD.contiguous(), x_TD.contiguous()
    tokens, width = x_TD.shape
    programs = min(_PROGRAMS, tokens)
    of_x, sums_PD = torch.empty_like(x_TD), x_TD.new_empty((programs, width), dtype=torch.float32)
    backward_kernel[(programs,)](
        gradient_TD, x_TD, weight_D, roots_T, of_x, sums_PD, tokens, width, PROGRAMS=programs, **_row(width)
    )
    return of_x, sums_PD.sum(0)


def _row(width: int) -> dict[str, Any]:
    block = max(64, 1 << (width - 1).bit_length())
    return {"MASKED": block != width, "BLOCK": block, "num_warps": min(max(block // 512, 1), 16)}
