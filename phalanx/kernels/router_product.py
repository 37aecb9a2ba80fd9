"""The scores of a router, as exact as in fp32, from tensor cores: their fp32 product is ten times slower than their bf16 product, and a router's
input is bf16 where the model computes in bf16. The fp32 weight is the sum of three bf16 matrices; products of bf16 numbers are exact in fp32,
in which they are added. On CPUs and in other dtypes it is PyTorch's product in fp32. Used by `models/moe`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from phalanx.kernels.triton_support import operation

# Shapes: T tokens, D width, E experts.


def router_product(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """x · weightᵀ in fp32, differentiable."""
    if x_TD.is_cuda and x_TD.dtype == torch.bfloat16 and x_TD.numel() > 0:
        logits_TE: Tensor = _RouterProduct.apply(x_TD, weight_ED)
        return logits_TE
    return F.linear(x_TD.float(), weight_ED.float())


class _RouterProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_ED: Tensor) -> Tensor:
        ctx.save_for_backward(x_TD, weight_ED)
        return _router_product(x_TD, weight_ED)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return _router_product_backward(gradients[0], *ctx.saved_tensors)


@operation("router_product", mutates=())
def _router_product(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return forward(x_TD, weight_ED)


@_router_product.register_fake
def _(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    return x_TD.new_empty((len(x_TD), len(weight_ED)), dtype=torch.float32)


@operation("router_product_backward", mutates=())
def _router_product_backward(gradient_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    return backward(gradient_TE, x_TD, weight_ED)


@_router_product_backward.register_fake
def _(gradient_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_TD, memory_format=torch.contiguous_format), torch.empty_like(weight_ED)


FORWARD, BACKWARD = torch.ops.phalanx.router_product, torch.ops.phalanx.router_product_backward
"""As torch's dispatcher knows them."""


def forward(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    parts = bf16_parts(weight_ED, 1 if weight_ED.dtype == torch.bfloat16 else 3)
    return _product(x_TD, torch.cat(parts).t()).view(len(x_TD), len(parts), -1).sum(1)


def backward(gradient_TE: Tensor, x_TD: Tensor, weight_ED: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of x is bf16, and so are its factors; that of the weight has 16 bits of each gradient of a score."""
    parts = bf16_parts(gradient_TE, 2)
    of_weight_ED = _product(torch.cat(parts, dim=1).t(), x_TD).view(2, *weight_ED.shape).sum(0)
    return parts[0] @ weight_ED.to(torch.bfloat16), of_weight_ED.to(weight_ED.dtype)


def bf16_parts(x: Tensor, count: int) -> list[Tensor]:
    """Numbers in bf16 whose sum is x: to 8 bits with one part, 16 with two, 24 with three."""
    parts, rest = [x.to(torch.bfloat16)], x.float()
    for _ in range(count - 1):
        rest = rest - parts[-1].float()
        parts.append(rest.to(torch.bfloat16))
    return parts


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of bf16 matrices, with a result in fp32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()
