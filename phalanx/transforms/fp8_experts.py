"""Routed experts in fp8: the grouped product of stacked weights, in which each row is multiplied by the matrix of its expert. `transforms/fp8`
gives it to layers of experts, as what their `multiply` calls.

    forward         rows e4m3 · weight e4m3         a scale per row of either
    input gradient  gradient e4m3 · weight e4m3     a scale per row of the gradient, and per column of the weight: the sum runs across its rows
    weight gradient gradient bf16 · rows bf16       its sum runs across the rows, whose scales differ

Scales are per row whatever `precision.fp8_scaling` says, because the kernel of GPUs takes no others. They are powers of two, as those of linear
layers. An expert's rows need no padding: only the weight gradient sums over them, and it is not in fp8.
On CPUs the rounded numbers are multiplied in fp32, one expert after the other.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from phalanx import accelerator
from phalanx.spec.errors import RunError
from phalanx.transforms.fp8_numbers import E4M3, Rounded, rounded

_ALIGN = 16
"""The kernel needs widths of multiples of this."""
_CAPABILITIES = ((9, 0), (10, 0))
"""Of the GPUs that torch has the kernel for."""

# Shapes: R rows sorted by expert, E experts, K their width, N rows of each matrix.


def available(device: torch.device) -> str | None:
    """Why this device cannot multiply stacked weights in fp8; None: it can, or emulates it, as CPUs do."""
    if device.type == "cpu":
        return None
    kind = accelerator.of(device)
    if (capability := kind.capability(device)) not in _CAPABILITIES:
        return f"{kind.name(device)} has compute capability {capability[0]}.{capability[1]}; the grouped product in fp8 needs 9.0 or 10.0"
    return None


def apply(blocks: dict[str, nn.Module], device: torch.device) -> int:
    """Make the routed experts of these blocks compute in fp8; returns how many layers have them."""
    if reason := available(device):
        raise RunError([f"precision.fp8_experts = true is not available: {reason}; remove precision.fp8_experts."])
    count = 0
    for name, block in blocks.items():
        for module in block.modules():
            if not hasattr(module, "multiply"):
                continue
            sizes = {size for weight in module.parameters() for size in weight.shape[1:]}
            if device.type != "cpu" and any(size % _ALIGN for size in sizes):
                raise RunError(
                    [
                        f"precision.fp8_experts = true needs experts whose widths are multiples of {_ALIGN}, but those of {name} are {sorted(sizes)} on "
                        "a rank: choose model.moe.ffn, model.dim and layout.expert_tensor so, or remove precision.fp8_experts."
                    ]
                )
            module.multiply = multiply_experts  # type: ignore[assignment]
            count += 1
    return count


def multiply_experts(x_RK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
    """Each row times the transpose of its expert's matrix, [R, N] in bf16. Expert e has the rows up to `ends_E`[e]."""
    return _Experts.apply(x_RK, weight_ENK, ends_E)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_RK: Tensor, weight_ENK: Tensor, ends_E: Tensor) -> Tensor:
        ctx.types = (x_RK.dtype, weight_ENK.dtype)
        half = weight_ENK.to(torch.bfloat16)
        # The backward rounds the weight again, along its other side.
        ctx.save_for_backward(x_RK.to(torch.bfloat16), weight_ENK, ends_E)
        return multiply(rounded(x_RK, E4M3, "row"), rounded(half, E4M3, "row"), ends_E, fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient_RN,) = gradients
        x_RK, weight_ENK, ends_E = ctx.saved_tensors
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            weight = rounded(weight_ENK.to(torch.bfloat16).transpose(1, 2), E4M3, "row")
            x_grad = multiply(rounded(gradient_RN, E4M3, "row"), weight, ends_E).to(ctx.types[0])
        if ctx.needs_input_grad[1]:
            weight_grad = _outer(gradient_RN.to(torch.bfloat16).contiguous(), x_RK, ends_E).to(ctx.types[1])
        return x_grad, weight_grad, None


def multiply(a_RK: Rounded, b_ENK: Rounded, ends_E: Tensor, fast: bool = False) -> Tensor:
    """Rows times the transposes of their experts' matrices, in bf16; scales are [R, 1] and [E, N, 1]. `fast`: see `transforms/fp8`."""
    if a_RK.values.device.type == "cpu":
        return _by_emulation(a_RK, b_ENK, ends_E)
    return torch._scaled_grouped_mm(
        a_RK.values.contiguous(),
        b_ENK.values.contiguous().transpose(1, 2),
        (1 / a_RK.scale).flatten(),
        (1 / b_ENK.scale).flatten(1).contiguous(),
        offs=ends_E,
        out_dtype=torch.bfloat16,
        use_fast_accum=fast,
    )


def _by_emulation(a_RK: Rounded, b_ENK: Rounded, ends_E: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        if is_fake(ends_E):  # how many rows an expert gets is unknown there; the products are as many
            sums_RN, scales_RN = a_RK.values.float() @ b_ENK.values[0].float().t(), b_ENK.scale[0].t()
            return (sums_RN / a_RK.scale / scales_RN).to(torch.bfloat16)
        counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
        parts = [
            (rows.float() @ matrix.float().t()) / scale_R / scale_N.t()
            for rows, scale_R, matrix, scale_N in zip(
                a_RK.values.split(counts), a_RK.scale.split(counts), b_ENK.values, b_ENK.scale, strict=True
            )
        ]
        return torch.cat(parts).to(torch.bfloat16)


def _outer(gradient_RN: Tensor, x_RK: Tensor, ends_E: Tensor) -> Tensor:
    """The gradients of the matrices, [E, N, K] in bf16. A GPU may leave those of experts without rows unwritten."""
    with torch.autocast(x_RK.device.type, enabled=False):
        if x_RK.device.type != "cpu" or is_fake(ends_E):
            return F.grouped_mm(gradient_RN.t(), x_RK, offs=ends_E)
        counts = ends_E.diff(prepend=ends_E.new_zeros(1)).tolist()
        return torch.stack([g.t() @ x for g, x in zip(gradient_RN.split(counts), x_RK.split(counts), strict=True)])
