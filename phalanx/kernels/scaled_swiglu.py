"""The middle of routed experts: silu(gate) · up · scale, with one scale per row, and its gradients. One pass over the memory each, where
PyTorch's operations take six and twelve. Each has a plain implementation, for CPUs, and one in Triton; both compute bf16 and fp16 in fp32.
Used by `models/moe`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.triton_support import launches_triton, operation

# Shapes: R rows, F width of an expert.

_TILE = 2048  # elements that a program has in registers at a time


def scaled_swiglu(gate_RF: Tensor, up_RF: Tensor, scales_R: Tensor | None = None) -> Tensor:
    """silu(gate) · up · scale, differentiable. Keeps its arguments for the backward, and nothing else."""
    inner_RF: Tensor = _ScaledSwiGLU.apply(gate_RF, up_RF, scales_R)
    return inner_RF


class _ScaledSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_RF: Tensor, up_RF: Tensor, scales_R: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_RF, up_RF, scales_R)
        return forward(gate_RF, up_RF, scales_R)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        return backward(gradients[0], *ctx.saved_tensors)


def forward(gate_RF: Tensor, up_RF: Tensor, scales_R: Tensor | None) -> Tensor:
    """The result, in the dtype of `gate_RF`."""
    if _launches(gate_RF):
        return _scaled_swiglu(gate_RF, up_RF, scales_R)
    inner_RF = F.silu(_wide(gate_RF)) * _wide(up_RF)
    return (inner_RF if scales_R is None else inner_RF * scales_R[:, None]).to(gate_RF.dtype)


def backward(
    gradient_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, scales_R: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of gate, up and scales, from that of the result."""
    if _launches(gate_RF):
        gate, up, scales = _scaled_swiglu_backward(gradient_RF, gate_RF, up_RF, scales_R)
        return gate, up, None if scales_R is None else scales.to(scales_R.dtype)
    gradient, gate, up = _wide(gradient_RF), _wide(gate_RF), _wide(up_RF)
    share, silu, scales = gate.sigmoid(), F.silu(gate), None
    if scales_R is not None:
        scales = (gradient * silu * up).sum(-1).to(scales_R.dtype)
        gradient = gradient * scales_R[:, None]
    down = gradient * up * (share + silu * (1 - share))
    return down.to(gate_RF.dtype), (gradient * silu).to(up_RF.dtype), scales


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def _launches(x: Tensor) -> bool:
    return launches_triton(x) and x.dtype != torch.float64 and x.numel() > 0


@operation("scaled_swiglu", mutates=())
def _scaled_swiglu(gate_RF: Tensor, up_RF: Tensor, scales_R: Tensor | None) -> Tensor:
    return launch_forward(gate_RF, up_RF, scales_R)


@_scaled_swiglu.register_fake
def _(gate_RF: Tensor, up_RF: Tensor, scales_R: Tensor | None) -> Tensor:
    return torch.empty_like(gate_RF, memory_format=torch.contiguous_format)


@operation("scaled_swiglu_backward", mutates=())
def _scaled_swiglu_backward(
    gradient_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, scales_R: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return launch_backward(gradient_RF, gate_RF, up_RF, scales_R)


@_scaled_swiglu_backward.register_fake
def _(gradient_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, scales_R: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    like = torch.empty_like(gate_RF, memory_format=torch.contiguous_format)
    return like, torch.empty_like(like), like.new_empty(len(like) if scales_R is not None else 0, dtype=torch.float32)


def launch_forward(gate_RF: Tensor, up_RF: Tensor, scales_R: Tensor | None) -> Tensor:
    from phalanx.kernels.scaled_swiglu_triton import forward_kernel

    gate_RF, up_RF = gate_RF.contiguous(), up_RF.contiguous()
    inner_RF = torch.empty_like(gate_RF)
    tile, programs = _tile(gate_RF)
    scales = gate_RF if scales_R is None else scales_R.contiguous()
    forward_kernel[(programs,)](gate_RF, up_RF, scales, inner_RF, *gate_RF.shape, SCALED=scales_R is not None, **tile)
    return inner_RF


def launch_backward(
    gradient_RF: Tensor, gate_RF: Tensor, up_RF: Tensor, scales_R: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Without scales, their gradient is empty."""
    from phalanx.kernels.scaled_swiglu_triton import backward_kernel

    gradient_RF, gate_RF, up_RF = gradient_RF.contiguous(), gate_RF.contiguous(), up_RF.contiguous()
    of_gate, of_up = torch.empty_like(gate_RF), torch.empty_like(gate_RF)
    of_scales = gate_RF.new_empty(len(gate_RF) if scales_R is not None else 0, dtype=torch.float32)
    tile, programs = _tile(gate_RF)
    scales = gate_RF if scales_R is None else scales_R.contiguous()
    backward_kernel[(programs,)](
        gradient_RF, gate_RF, up_RF, scales, of_gate, of_up, of_scales, *gate_RF.shape, SCALED=scales_R is not None, **tile
    )
    return of_gate, of_up, of_scales


def _tile(x_RF: Tensor) -> tuple[dict[str, Any], int]:
    """Rows and columns that a program has in registers at a time, and the number of programs."""
    rows, width = x_RF.shape
    # A divisor of the width, so that no load has a mask; 768 is three times 256.
    block = next((size for size in (256, 128, 64) if width % size == 0), 256)
    together = _TILE // block
    return {"MASKED": width % block > 0, "ROWS": together, "BLOCK": block, "num_warps": 4}, -(-rows // together)
