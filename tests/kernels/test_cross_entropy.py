"""Cross-entropy and its gradient in place of the logits, against torch's own. `tests/gpu/test_kernels` runs the Triton kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from phalanx.kernels.cross_entropy import ELSEWHERE, IGNORED, cross_entropy_, log_sum_exp, softmax_gradient_


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_those_of_torch(dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(11, 37, generator=dice)).to(dtype)
    targets = torch.randint(37, (11,), generator=dice)
    targets[[2, 7]] = IGNORED
    exact = logits.double().requires_grad_()
    losses = F.cross_entropy(exact, targets, reduction="none", ignore_index=IGNORED)
    losses.sum().backward()
    whole, target = cross_entropy_(logits, targets)
    torch.testing.assert_close(
        (whole - target)[targets != IGNORED].double(), losses.detach()[targets != IGNORED], rtol=1e-6, atol=1e-6
    )
    near = 1e-6 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(logits.double(), exact.grad, rtol=near, atol=near)
    assert not logits[[2, 7]].any(), "tokens that do not count have no gradient"


def test_columns_of_two_ranks_give_what_all_columns_do() -> None:
    dice = torch.Generator().manual_seed(2)
    logits, targets = torch.randn(9, 20, generator=dice), torch.randint(20, (9,), generator=dice)
    targets[4] = IGNORED
    halves = [logits[:, :12].clone(), logits[:, 12:].clone()]
    columns = [
        torch.where(targets == IGNORED, IGNORED, torch.where((local >= 0) & (local < half.shape[1]), local, ELSEWHERE))
        for half, local in zip(halves, (targets, targets - 12), strict=True)
    ]
    (first, here), (second, there) = (log_sum_exp(half, own) for half, own in zip(halves, columns, strict=True))
    whole = torch.logaddexp(first, second)
    for half, own in zip(halves, columns, strict=True):
        softmax_gradient_(half, own, whole)
    wanted, target = cross_entropy_(logits, targets)
    torch.testing.assert_close(whole, wanted)
    torch.testing.assert_close(here + there, target)
    torch.testing.assert_close(torch.cat(halves, dim=1), logits)
