"""A router's scores from bf16 parts against fp64. `tests/gpu/test_kernels` runs the products on tensor cores."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels.router_product import backward, bf16_parts, forward, router_product


@pytest.mark.parametrize(("count", "bits"), [(1, 8), (2, 16), (3, 24)])
def test_parts_add_up_to_the_number(count: int, bits: int) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    total = sum(part.double() for part in bf16_parts(x, count))
    assert ((total - x.double()) / x.double()).abs().max() <= 2.0**-bits


def test_scores_are_exact_to_fp32_and_gradients_to_what_follows() -> None:
    dice = torch.Generator().manual_seed(2)
    x = torch.randn(50, 96, generator=dice).to(torch.bfloat16)
    weight, gradient = torch.randn(12, 96, generator=dice), torch.randn(50, 12, generator=dice)
    exact = x.double() @ weight.double().T
    plain = (router_product(x, weight) - exact).norm()  # fp32 as PyTorch has it
    assert (forward(x, weight) - exact).norm() <= 2 * plain <= 1e-6 * exact.norm()
    of_x, of_weight = backward(gradient, x, weight)
    assert of_x.dtype == torch.bfloat16 and of_weight.dtype == torch.float32
    wanted = gradient.double() @ weight.double()
    assert (of_x - wanted).norm() <= 5e-3 * wanted.norm()
    wanted = gradient.double().T @ x.double()
    assert (of_weight - wanted).norm() <= 1e-5 * wanted.norm()
