"""The two halves of a backward against the whole of it, for graphs of every kind that a stage may have."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from phalanx.parallel.pipeline.split_backward import backward_input, backward_weight


class Twice(torch.autograd.Function):
    """x · w with a backward in Python, which counts its calls."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        Twice.calls += 1
        x, w = ctx.saved_tensors
        return gradients[0] @ w.T, x.flatten(0, 1).T @ gradients[0].flatten(0, 1)


class Stage(nn.Module):
    def __init__(self, body: Callable[[Stage, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.norm, self.table = nn.LayerNorm(6), nn.Embedding(9, 6)
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


def shared(stage: Stage, x: Tensor) -> Tensor:
    """A weight used twice, one use behind the other."""
    return stage.two(torch.tanh(stage.one(stage.two(x))))


def tied(stage: Stage, x: Tensor) -> Tensor:
    """A side branch that does not come from the input, and its table again as the head."""
    side = stage.norm(stage.table(torch.arange(5)))
    return F.linear(stage.one(torch.cat((x, side.expand(2, -1, -1)), 1)), stage.table.weight)


BODIES: dict[str, Callable[[Stage, Tensor], Tensor]] = {
    "plain": lambda stage, x: x + stage.two(F.silu(stage.one(stage.norm(x)))),
    "shared": shared,
    "tied": tied,
    "python": lambda stage, x: Twice.apply(stage.one(x), stage.two.weight),
    "recomputed": lambda stage, x: checkpoint(BODIES["plain"], stage, x, use_reentrant=False),
    "autocast": lambda stage, x: _autocast(stage, x),
    "frozen": lambda stage, x: stage.two(stage.one.requires_grad_(False)(x)),
    "compiled": lambda stage, x: stage.two(_compiled()(stage, x)),
    "untouched": lambda stage, x: stage.one(torch.zeros_like(x)) + 0 * x,
}


@cache
def _compiled() -> Callable[[Stage, Tensor], Tensor]:
    return torch.compile(BODIES["plain"], backend="aot_eager")


def _autocast(stage: Stage, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return BODIES["plain"](stage, x)


@pytest.mark.parametrize("name", BODIES)
def test_halves_are_the_whole(name: str) -> None:
    whole, split = Stage(BODIES[name]), Stage(BODIES[name])
    for m in range(3):  # gradients add up
        x = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(m))
        expected, given = x.clone().requires_grad_(), x.clone().requires_grad_()
        output = whole(expected)
        gradient = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).to(output.dtype)
        output.backward(gradient)
        rest = backward_input(get_gradient_edge(split(given)), gradient, given)
        assert given.grad is not None and expected.grad is not None
        torch.testing.assert_close(given.grad, expected.grad, rtol=1e-6, atol=1e-7)
        backward_weight(rest)
        assert not rest
    for (key, one), (_, other) in zip(whole.named_parameters(), split.named_parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None), key
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, rtol=1e-5, atol=1e-6)


def test_matrices_wait_for_the_second_half() -> None:
    stage = Stage(BODIES["plain"])
    given = torch.randn(2, 5, 6).requires_grad_()
    rest = backward_input(get_gradient_edge(stage(given)), torch.ones(2, 5, 6), given)
    assert stage.one.weight.grad is None and stage.two.weight.grad is None
    assert stage.norm.weight.grad is not None and stage.one.bias.grad is not None  # cheap, so at once
    backward_weight(rest)
    assert stage.one.weight.grad is not None and stage.two.weight.grad is not None


def test_a_backward_in_python_is_called_once() -> None:
    stage, given = Stage(BODIES["python"]), torch.randn(2, 5, 6).requires_grad_()
    before = Twice.calls
    backward_weight(backward_input(get_gradient_edge(stage(given)), torch.ones(2, 5, 6), given))
    assert Twice.calls == before + 1


def test_a_recomputed_block_is_computed_once_for_each_half() -> None:
    calls = []

    def body(stage: Stage, x: Tensor) -> Tensor:
        calls.append(1)
        return BODIES["plain"](stage, x)

    stage, given = Stage(body), torch.randn(2, 5, 6).requires_grad_()
    output = checkpoint(stage, given, use_reentrant=False)
    backward_weight(backward_input(get_gradient_edge(output), torch.ones(2, 5, 6), given))
    assert len(calls) == 3


def test_hooks_of_weights_are_called() -> None:
    stage, given, called = Stage(BODIES["plain"]), torch.randn(2, 5, 6).requires_grad_(), []
    for name, parameter in stage.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: called.append(name))
    backward_weight(backward_input(get_gradient_edge(stage(given)), torch.ones(2, 5, 6), given))
    assert sorted(called) == ["norm.bias", "norm.weight", "one.bias", "one.weight", "two.weight"]
