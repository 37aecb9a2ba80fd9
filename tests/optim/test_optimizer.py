from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import get_args, get_type_hints

import pytest
import torch
from optim.holding import ADAMW, MUON, NO, ONE, YES, everything, give_gradients, holding, read, values
from ranks import copied, differing, tiny_run
from torch import nn

from phalanx.optim.offload_stores import split_chunks
from phalanx.optim.optimizer import (
    Optimizer,
    OptimizerKind,
    OptimizerSetup,
    ParamOptimizer,
    State,
    StateBytes,
    Update,
    optimizer_kind,
)
from phalanx.parallel.sharded_model import OwnedParam, ParamShard
from phalanx.spec.errors import RunError
from phalanx.spec.run import OPTIMIZERS, Precision
from phalanx.spec.run import Optimizer as OptimizerSpec

BF16 = Precision(optimizer="bf16")


def torchs(held: list[OwnedParam], **options: bool) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        [
            {"params": [one.value for one in held if one.value.ndim == 2], "weight_decay": 0.2},
            {"params": [one.value for one in held if one.value.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.85, 0.97),
        eps=1e-7,
        **options,
    )


def test_adamw_clipped_by_the_divisor_equals_torchs_own() -> None:
    ours, theirs = holding(), holding()
    optimizer, reference = Optimizer(ours, ADAMW), torchs(theirs, foreach=False, fused=False)
    clipped = 0
    for step in range(20):
        rate, scale, mean_over = 0.01 / (1 + step), 0.02 if step % 3 else 1.0, 0.5 + step / 20
        give_gradients(ours, step, scale)
        give_gradients(theirs, step, scale)
        # Ours: one division takes the mean and clips. Theirs: the mean first, then torch's own clipping.
        norm = (
            torch.linalg.vector_norm(torch.cat([one.gradient.flatten() for one in ours if one.gradient is not None]))
            / mean_over
        )
        optimizer.step(rate, mean_over * (norm / 3.0).clamp(min=1.0), NO)
        for one in theirs:
            assert one.gradient is not None
            one.value.grad = one.gradient / mean_over
        clipped += bool(nn.utils.clip_grad_norm_([one.value for one in theirs], 3.0) > 3.0)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    assert 0 < clipped < 20  # both kinds of steps were compared
    found = everything(ours, optimizer.state())
    for one in theirs:
        torch.testing.assert_close(found[one.name], one.value.detach(), atol=1e-6, rtol=1e-6)
        for key in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(found[f"{one.name}/{key}"], reference.state[one.value][key], atol=1e-7, rtol=1e-5)


def test_adamw_equals_torchs_fused_adamw_bit_for_bit() -> None:
    ours, theirs = holding(), holding()
    optimizer, reference = Optimizer(ours, ADAMW), torchs(theirs, fused=True)
    reference.grad_scale, reference.found_inf = torch.tensor(1.7), NO  # type: ignore[attr-defined]
    for step in range(10):
        give_gradients(ours, step)
        give_gradients(theirs, step)
        optimizer.step(1e-3, torch.tensor(1.7), NO)
        for one in theirs:
            one.value.grad = one.gradient
        reference.step()
    expected = values(theirs) | {
        f"{one.name}/{key}": state for one in theirs for key, state in reference.state[one.value].items()
    }
    assert differing(everything(ours, optimizer.state()), expected) == []


def test_weight_decay_applies_to_matrices_only() -> None:
    held = holding()
    before = copied(values(held))
    for one in held:
        one.gradient = torch.zeros_like(one.value)
    Optimizer(held, ADAMW).step(0.01, ONE, NO)
    for one in held:
        factor = 1 - 0.01 * 0.2 if one.value.ndim == 2 else 1.0
        torch.testing.assert_close(one.value.detach(), before[one.name] * factor, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("precision", [Precision(), BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("spec", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1.0])
def test_a_skipped_step_changes_nothing(spec: OptimizerSpec, poison: float, precision: Precision) -> None:
    held = holding()
    optimizer = Optimizer(held, spec, precision=precision)
    for step in range(3):
        give_gradients(held, step)
        optimizer.step(0.01, ONE, NO)
    before = everything(held, optimizer.state())
    give_gradients(held, 3)
    for one in held:
        assert one.gradient is not None
        one.gradient[0] *= poison
    optimizer.step(0.01, torch.tensor(poison), YES)
    assert differing(before, everything(held, optimizer.state())) == []
    # The step after it is the one that would have been taken, had there been none between.
    other = holding()
    without = Optimizer(other, spec, precision=precision)
    for step in (0, 1, 2, 4):
        give_gradients(other, step)
        without.step(0.01, ONE, NO)
    give_gradients(held, 4)
    optimizer.step(0.01, ONE, NO)
    assert differing(everything(held, optimizer.state()), everything(other, without.state())) == []


@pytest.mark.parametrize("spec", [ADAMW, MUON], ids=["adamw", "muon"])
def test_states_exist_before_the_first_step_and_writing_into_them_restores(spec: OptimizerSpec) -> None:
    one = holding()
    first = Optimizer(one, spec)
    names = list(first.state())
    for step in range(3):
        give_gradients(one, step)
        first.step(0.01, ONE, NO)
    assert list(first.state()) == names
    two = holding(seed=1)
    second = Optimizer(two, spec)
    with torch.no_grad():
        for name, tensor in (values(two) | second.state()).items():
            assert isinstance(tensor, torch.Tensor)
            tensor.copy_(everything(one, first.state())[name])
    for held, optimizer in ((one, first), (two, second)):
        give_gradients(held, 3)
        optimizer.step(0.01, ONE, NO)
    assert differing(everything(one, first.state()), everything(two, second.state())) == []


def test_gradients_in_bf16_step_as_the_same_numbers_in_fp32_do() -> None:
    wide, narrow = big(), big()
    one, two = Optimizer(wide, ADAMW), Optimizer(narrow, ADAMW)
    for step in range(4):
        give_gradients(narrow, step, dtype=torch.bfloat16)
        for a, b in zip(wide, narrow, strict=True):
            assert b.gradient is not None
            a.gradient = b.gradient.float()
        one.step(0.01, torch.tensor(1.3), NO)
        two.step(0.01, torch.tensor(1.3), NO)
    assert differing(everything(wide, one.state()), everything(narrow, two.state())) == []


def big() -> list[OwnedParam]:
    """Larger than a portion, and cut at odd places: tensors of lengths that no vector divides."""
    dice = torch.Generator().manual_seed(5)
    shapes = {"a": (37,), "b": (701, 503), "c": (3,), "d": (4, 5, 7), "e": (0, 12), "f": (1021,)}
    found = []
    for name, shape in shapes.items():
        value = nn.Parameter(torch.randn(shape, generator=dice))
        found.append(OwnedParam(name, value, ParamShard.full(value)))
    return found


def test_chunks_hold_every_element_once_and_are_cut_at_strides() -> None:
    lengths = [5, 0, 1000, 64, 63, 4096, 1]
    for limit, multiple in ((64, 64), (256, 64), (2048, 2048), (5000, 2048), (1 << 20, 64)):
        cut = split_chunks(lengths, limit, multiple)
        covered: dict[int, list[int]] = {index: [] for index in range(len(lengths))}
        for portion in cut:
            assert portion.size <= max(limit, multiple)
            assert portion.size % multiple == 0
            taken = [range(part.start, part.start + part.length) for part in portion.runs]
            assert all(a.stop <= b.start for a, b in pairwise(taken))
            assert not taken or taken[-1].stop <= portion.size
            for part in portion.runs:
                assert part.first % 64 == part.start % 64 == 0
                covered[part.index] += range(part.first, part.first + part.length)
        assert covered == {index: list(range(length)) for index, length in enumerate(lengths)}


def test_moments_in_bf16_are_half_as_large_and_follow_those_in_fp32() -> None:
    """A least-squares problem of a hundred steps, in which nothing but the moments' format differs."""
    dice = torch.Generator().manual_seed(2)
    inputs = torch.randn(256, 24, generator=dice)
    targets = inputs @ torch.randn(24, 8, generator=dice)
    losses: dict[str, list[float]] = {}
    for name, precision in (("fp32", Precision()), ("bf16", BF16)):
        weight = nn.Parameter(torch.zeros(24, 8))
        held = [OwnedParam("weight", weight, ParamShard.full(weight))]
        optimizer = Optimizer(held, OptimizerSpec(weight_decay=0.0), precision=precision)
        assert optimizer.bytes().device == 24 * 8 * 2 * (4 if name == "fp32" else 2)
        assert {state.dtype for key, state in optimizer.state().items() if "exp" in key} == {
            getattr(torch, f"{'float32' if name == 'fp32' else 'bfloat16'}")
        }
        assert name.replace("fp", "float").replace("bf", "bfloat") in optimizer.applied
        losses[name] = []
        for _ in range(100):
            loss = (inputs @ weight - targets).square().mean()
            losses[name].append(loss.item())
            held[0].gradient = torch.autograd.grad(loss, weight)[0]
            optimizer.step(0.05, ONE, NO)
    assert losses["fp32"][-1] < 0.1 * losses["fp32"][0]
    assert losses["bf16"] != losses["fp32"]
    # bf16 has eight bits: moments are off by 2^-9 at most, and more where their memory is longer than that.
    assert all(abs(a - b) <= 0.02 * losses["fp32"][0] for a, b in zip(losses["bf16"], losses["fp32"], strict=True))


def test_one_step_with_moments_in_bf16_is_an_fp32_step_whose_moments_are_then_rounded() -> None:
    wide, narrow = holding(), holding()
    one, two = Optimizer(wide, ADAMW), Optimizer(narrow, ADAMW, precision=BF16)
    for step in range(3):
        for held, optimizer in ((wide, one), (narrow, two)):
            give_gradients(held, step)
            optimizer.step(0.01, ONE, NO)
        for name, state in one.state().items():  # the reference rounds after each step too
            assert isinstance(state, torch.Tensor)
            if "exp" in name:
                state.copy_(state.bfloat16())
    found, expected = everything(narrow, two.state()), everything(wide, one.state())
    assert differing({name: state.float() for name, state in found.items()}, expected) == []


def test_a_parameter_without_gradient_stays_and_an_empty_part_counts_its_steps() -> None:
    held = big()
    optimizer = Optimizer(held, ADAMW)
    give_gradients(held, 0)
    held[1].gradient = held[4].gradient = None
    before = everything(held, optimizer.state())
    optimizer.step(0.01, ONE, NO)
    changed = differing(before, everything(held, optimizer.state()))
    assert not any(name.startswith("b") for name in changed)
    assert {"a", "c", "d", "f", "e/step"} <= set(changed)


def test_muon_with_offload_is_refused_when_the_run_file_is_read() -> None:
    with pytest.raises(RunError) as caught:
        tiny_run("optimizer.name=muon", "memory.offload=cpu")
    assert "optimizer.name" in str(caught.value)
    assert "memory.offload" in str(caught.value)


def test_every_name_of_the_run_file_is_a_registered_optimizer() -> None:
    names = get_args(get_type_hints(OptimizerSpec)["name"])
    assert OPTIMIZERS.keys() == set(names)
    assert {name: optimizer_kind(name).label for name in names} == {"adamw": "AdamW", "muon": "Muon"}


class Sign(ParamOptimizer):
    """The smallest optimizer: steps by the sign of the gradient and has no state."""

    def __init__(self, params: Sequence[OwnedParam], setup: OptimizerSetup):
        self._params = params

    @torch.no_grad()
    def step(self, update: Update) -> None:
        for param in self._params:
            if param.gradient is not None and not update.skip.item():
                param.value.sub_(update.learning_rate * param.gradient.sign())

    def state(self) -> dict[str, State]:
        return {}

    def bytes(self) -> StateBytes:
        return StateBytes()

    @property
    def applied(self) -> str:
        return f"{len(self._params)} parameters"


def test_a_new_optimizer_is_one_module_with_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("phalanx.optim.sign")
    module.KIND = OptimizerKind("Sign", Sign, lambda param: param.name.startswith("blocks."))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "phalanx.optim.sign", module)
    held = holding()
    before = read(values(held))
    optimizer = Optimizer(held, replace(ADAMW, name="sign"))  # type: ignore[arg-type]
    give_gradients(held, 0)
    optimizer.step(0.5, ONE, NO)
    own = next(one for one in held if one.name.startswith("blocks."))
    assert own.gradient is not None and torch.equal(own.value, before[own.name] - 0.5 * own.gradient.sign())
    assert list(optimizer.parts) == ["AdamW", "Sign"] and "Sign: " in optimizer.applied
    assert {name.rpartition("/")[0] for name in optimizer.state()} == {
        one.name for one in held if not one.name.startswith("blocks.")
    }
