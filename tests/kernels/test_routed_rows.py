"""Sums of a token's rows, and gradients of experts without rows. `tests/gpu/test_kernels` runs the Triton kernels."""

from __future__ import annotations

import pytest
import torch

from phalanx.kernels.routed_rows import gather_sum, zero_unused_


@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("count", [1, 2])
def test_each_token_gets_the_sum_of_its_rows(copies: int, count: int) -> None:
    dice = torch.Generator().manual_seed(1)
    parts = [torch.randn(7 * copies, 10, generator=dice) for _ in range(count)]
    places = torch.randperm(7 * copies, generator=dice)
    found = gather_sum(parts, places, copies)
    wanted = torch.zeros(7, 10, dtype=torch.float64)
    for token in range(7):
        for row in places[token * copies : (token + 1) * copies].tolist():
            for part in parts:
                wanted[token] += part[row]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


def test_only_the_gradients_of_experts_without_rows_are_zeroed() -> None:
    gradient = torch.ones(4, 3, 5)
    gradient[[1, 3]] = torch.nan  # not written
    assert zero_unused_(gradient, torch.tensor([2, 0, 1, 0])) is gradient
    assert gradient[:, 0, 0].tolist() == [1, 0, 1, 0] and gradient.sum() == 30
