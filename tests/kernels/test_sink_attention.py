"""Attention with sinks against the plain formula: one more logit in the softmax, whose value is nothing."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from phalanx.kernels.sink_attention import sink_attention
from phalanx.models.attention import Scope, attend_locally

LENGTH = 19


def reference(tensors: list[Tensor], visible: Tensor, scale: float, cap: float | None) -> Tensor:
    q, k, v, sinks_H = tensors
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).mT * scale
    scores = scores if cap is None else cap * torch.tanh(scores / cap)
    sinks = sinks_H.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    weights = torch.cat((scores.masked_fill(~visible, -torch.inf), sinks), -1).softmax(-1)
    return weights[..., :-1] @ v.repeat_interleave(groups, 1)


def tensors(heads: int, keys: int, width: int, narrow: int) -> list[Tensor]:
    dice = torch.Generator().manual_seed(3)
    sizes = ((3, heads, LENGTH, width), (3, keys, LENGTH, width), (3, keys, LENGTH, narrow), (heads,))
    return [torch.randn(size, generator=dice, dtype=torch.float64) * 2 for size in sizes]


def documents() -> Tensor:
    table = torch.zeros(3, LENGTH, dtype=torch.int32)
    table[1, 7:], table[2, 5:], table[2, 11:] = 1, 1, 2
    return table


@pytest.mark.parametrize(
    ("heads", "window", "packed", "cap"),
    [
        pytest.param(*case, id=f"{case[0][0]}x{case[0][1]}-{case[1]}-{case[2]}-{case[3]}")
        for case in product(((4, 4, 8, 8), (6, 2, 10, 10), (4, 1, 12, 8)), (None, 5), (False, True), (None, 3.0))
    ],
)
def test_result_and_gradients_are_those_of_the_formula(
    heads: tuple[int, int, int, int], window: int | None, packed: bool, cap: float | None
) -> None:
    exact = [x.requires_grad_() for x in tensors(*heads)]
    scope = Scope(documents() if packed else None, window=window)
    visible = scope.mask(LENGTH, exact[0].device)
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if visible is None else visible
    wanted = reference(exact, visible, 0.3, cap)
    gradient = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    given = [x.detach().float().requires_grad_() for x in exact]
    out = attend_locally(*given[:3], scope, 0.3, cap, given[3])
    wanted_all = (wanted, *torch.autograd.grad(wanted, exact, gradient))
    for one, other in zip((out, *torch.autograd.grad(out, given, gradient.float())), wanted_all, strict=True):
        assert one.dtype == torch.float32 and float((one - other).detach().abs().max()) < 3e-6 * float(
            other.detach().abs().max()
        )


def test_a_sink_that_is_far_below_every_score_changes_nothing_and_one_far_above_leaves_nothing() -> None:
    q, k, v, _ = (x.float() for x in tensors(4, 2, 8, 8))
    plain = attend_locally(q, k, v, Scope(None))
    low, high = (attend_locally(q, k, v, Scope(None), None, None, torch.full((4,), x)) for x in (-1e4, 1e4))
    assert torch.allclose(low, plain, atol=1e-6) and not high.any()


def test_one_query_sees_the_keys_of_the_cache_in_its_window() -> None:
    q, k, v, sinks = tensors(4, 2, 8, 8)
    every = attend_locally(q, k, v, Scope(None, window=6), None, None, sinks)
    last = attend_locally(q[:, :, -1:], k, v, Scope(None, window=6), None, None, sinks)
    assert torch.allclose(last, every[:, :, -1:])


def test_the_operation_is_one_that_compilers_can_trust() -> None:
    q, k, v, sinks = (x.requires_grad_() for x in tensors(4, 2, 8, 8))
    torch.library.opcheck(sink_attention, (q, k, v, sinks, None, True, 0.5))
    torch.library.opcheck(sink_attention, (q, k, v, sinks, Scope(documents()).mask(LENGTH, q.device), False, 0.5, 2.0))
