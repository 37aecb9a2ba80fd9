"""Linear layers of the blocks in fp8, two to three times as fast on GPUs that support it. `parallel/apply` calls it before parameters
are allocated; the parameters themselves keep their format.

                    "tensor": one scale per tensor          "row": one scale per row along the summed dimension
    forward         x e4m3 · weight e4m3                    x e4m3 · weight e4m3
    input gradient  gradient e5m2 · weight e4m3             gradient e4m3 · weight e4m3
    weight gradient gradient e5m2 · x e4m3                  gradient bf16 · x bf16: its sum runs across the rows

Scales follow from the largest absolute value of each current tensor and are powers of two. So a tensor and a slice of it give the same
fp8 numbers, except for negligible ones, and tensor parallel ranks compute what one device does, without communication. Rounding is
transparent to the gradient (straight-through). Results are bf16.

Weights are rounded from bf16, whatever the layout stores them in. Sharded ones may have been gathered in fp8 (`parallel/fp8_gather`).

Only nn.Linear inside blocks is changed, and on request routed experts (`transforms/fp8_experts`). Router, embedding and head are not.
On CPUs the rounded numbers are multiplied in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx import accelerator
from phalanx.transforms import fp8_experts
from phalanx.transforms.blocks import block_number, blocks, named
from phalanx.transforms.fp8_numbers import E4M3, E5M2, Rounded, Scaling, rounded
from phalanx.transforms.fp8_weight import Weight8

_ALIGN = 16
"""The kernel needs matrices whose sides are multiples of this; others are padded with zeros, which does not change the result."""

# Shapes: M rows of the input, K its width, N rows of the weight; a product is [M, K] · [N, K]ᵀ.


def available(device: torch.device) -> str | None:
    """Why this device cannot compute in fp8; None: it can, or emulates it exactly, as CPUs do."""
    if device.type == "cpu":
        return None
    kind = accelerator.of(device)
    if (capability := kind.capability(device)) == (0, 0):
        return "fp8 is built for NVIDIA GPUs, and emulated on CPUs"
    if capability < (8, 9):
        return (
            f"{kind.name(device)} has compute capability {capability[0]}.{capability[1]}; fp8 needs 8.9 (Ada, Hopper) or newer"
        )
    return None


def apply(
    parts: Sequence[nn.Module],
    scaling: Scaling,
    device: torch.device,
    numbers: range | None = None,
    *,
    experts: bool = False,
) -> str:
    """Make the linear layers inside the blocks compute in fp8; returns a description. `numbers`: blocks of the whole model to which this
    applies, such as all but the first and the last; None: all. `experts`: routed experts too."""
    changed, every = 0, blocks(parts, 'precision.compute = "fp8"')
    owners = {name: block for name, block in every.items() if numbers is None or block_number(name, parts) in numbers}
    for block in owners.values():
        for module in block.modules():
            if type(module) is nn.Linear:
                module.__class__ = Linear8
                module.scaling = scaling  # type: ignore[assignment]
                changed += 1
    layers = fp8_experts.apply(owners, device) if experts else 0
    kind = "forward e4m3, gradients e5m2" if scaling == "tensor" else "e4m3, weight gradients in bf16"
    where = "multiplied in fp32 after rounding, since this is a CPU" if device.type == "cpu" else "torch._scaled_mm"
    if not owners:
        return f"none here: {named(list(every)) or 'a stage without blocks'} in bf16"
    rest = [name for name in every if name not in owners]
    also = f"; routed experts of {layers} layers: e4m3, weight gradients in bf16, one scale per row" if layers else ""
    return (
        f"{changed} linear layers of {named(list(owners))}: {kind}, one power-of-two scale per {scaling}, {where}{also}; "
        f"{named(rest) + ', ' if rest else ''}router{'' if layers else ', routed experts'}, embedding and head in bf16"
    )


class Linear8(nn.Linear):
    """A linear layer that computes in fp8: the same module, parameters and hooks, with another class."""

    scaling: Scaling

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.scaling)


def product_of(module: nn.Module) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """The product (input, weight, bias) of a linear layer, for code that replaces its forward, such as tensor parallelism."""
    return partial(linear, scaling=module.scaling) if isinstance(module, Linear8) else F.linear


def linear(x: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None, scaling: Scaling = "tensor") -> Tensor:
    """F.linear in fp8; the result is bf16."""
    y_MN = _Linear.apply(x.flatten(0, -2), weight_NK, scaling)
    y = y_MN.unflatten(0, x.shape[:-1])
    return y if bias_N is None else y + bias_N.to(y.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, scaling: Scaling) -> Tensor:
        ctx.scaling, ctx.types = scaling, (x_MK.dtype, weight_NK.dtype)
        x = rounded(x_MK, E4M3, scaling)
        # The backward rounds the weight again: a saved fp8 copy would outlive the gathered weight.
        if scaling == "tensor":
            ctx.save_for_backward(x.values, x.scale, weight_NK)
        else:
            ctx.save_for_backward(x_MK.to(torch.bfloat16), weight_NK)
        return multiply(x, rounded_weight(weight_NK, scaling), fast=True)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (gradient_MN,), scaling = gradients, ctx.scaling
        *saved, weight_NK = ctx.saved_tensors
        gradient = rounded(gradient_MN, E5M2 if scaling == "tensor" else E4M3, scaling)
        x_grad = weight_grad = None
        if ctx.needs_input_grad[0]:
            x_grad = multiply(gradient, _transposed(weight_NK, scaling)).to(ctx.types[0])
        if ctx.needs_input_grad[1] and scaling == "tensor":
            weight_grad = multiply(gradient.t(), Rounded(*saved).t()).to(ctx.types[1])
        elif ctx.needs_input_grad[1]:
            with torch.autocast(weight_NK.device.type, enabled=False):
                weight_grad = (gradient_MN.to(torch.bfloat16).t() @ saved[0]).to(ctx.types[1])
        return x_grad, weight_grad, None


def rounded_weight(weight: Tensor, scaling: Scaling) -> Rounded:
    """A weight in fp8, from its values in bf16: those of a master weight in fp32 may round otherwise, and numbers would depend on the layout."""
    if isinstance(weight, Weight8):
        return Rounded(weight.numbers, weight.scale)
    return rounded(weight.to(torch.bfloat16), E4M3, scaling)


def _transposed(weight: Tensor, scaling: Scaling) -> Rounded:
    """The transpose of a weight in fp8."""
    return rounded_weight(weight, scaling).t() if scaling == "tensor" else rounded_weight(weight.t(), scaling)


def multiply(a_MK: Rounded, b_NK: Rounded, fast: bool = False) -> Tensor:
    """[M, K] · [N, K]ᵀ in bf16; `fast`: sums may lose a few bits, which is acceptable in a forward."""
    product = _by_emulation if a_MK.values.device.type == "cpu" else _by_kernel
    return product(a_MK, b_NK, fast)


def _by_emulation(a_MK: Rounded, b_NK: Rounded, fast: bool) -> Tensor:
    with torch.autocast(a_MK.values.device.type, enabled=False):
        sums_MN = a_MK.values.float() @ b_NK.values.float().t()
    return (sums_MN / a_MK.scale / b_NK.scale.reshape(1, -1)).to(torch.bfloat16)


def _by_kernel(a_MK: Rounded, b_NK: Rounded, fast: bool) -> Tensor:
    rows, columns = len(a_MK.values), len(b_NK.values)
    a, b = _padded(a_MK.values), _padded(b_NK.values)
    # Per-row scales need entries for the padded rows and columns too.
    scale_a, scale_b = 1 / a_MK.scale, 1 / b_NK.scale
    if scale_a.ndim:
        scale_a = F.pad(scale_a, (0, 0, 0, len(a) - rows), value=1.0)
        scale_b = F.pad(scale_b, (0, 0, 0, len(b) - columns), value=1.0).t()
    y_MN = torch._scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)
    return y_MN[:rows, :columns]


def _padded(x: Tensor) -> Tensor:
    """Row-major, with both sides padded with zeros."""
    down, right = -x.shape[0] % _ALIGN, -x.shape[1] % _ALIGN
    if down or right:
        # As bytes: zero is zero in every format, and not all operations support fp8.
        x = F.pad(x.view(torch.uint8), (0, right, 0, down)).view(x.dtype)
    return x.contiguous()
