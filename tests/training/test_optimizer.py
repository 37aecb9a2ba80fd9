from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from ranks import copied, differing
from torch import Tensor, nn

from phalanx.models.init import build, materialize
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Optimizer as OptimizerSpec
from phalanx.training.optimizer import Optimizer

ADAMW = OptimizerSpec(learning_rate=0.01, weight_decay=0.2, beta1=0.85, beta2=0.97, eps=1e-7)
MUON = replace(ADAMW, name="muon", momentum=0.9)
MODEL = ModelSpec(vocab=20, dim=12, layers=2, heads=2, ffn=20, norm="layer", bias=True)
ONE, NO = torch.tensor(1.0), torch.tensor(0.0)
YES = torch.tensor(1.0)

Named = dict[str, nn.Parameter]


def parameters(seed: int = 0) -> Named:
    model = materialize(build(MODEL), seed, torch.device("cpu"))
    dice = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():  # biases too: what is zero shows no decay
            p.copy_(0.3 * torch.randn(p.shape, generator=dice))
    return dict(model.named_parameters())


def set_gradients(named: Named, step: int, scale: float = 1.0) -> None:
    dice = torch.Generator().manual_seed(1000 + step)
    for p in named.values():
        p.grad = scale * torch.randn(p.shape, generator=dice)


def test_adamw_clipped_by_the_divisor_equals_torchs_own() -> None:
    ours, theirs = parameters(), parameters()
    optimizer = Optimizer(ours.items(), ADAMW)
    reference = torch.optim.AdamW(
        [
            {"params": [p for p in theirs.values() if p.ndim == 2], "weight_decay": 0.2},
            {"params": [p for p in theirs.values() if p.ndim == 1], "weight_decay": 0.0},
        ],
        betas=(0.85, 0.97),
        eps=1e-7,
        foreach=False,
        fused=False,
    )
    clipped = 0
    for step in range(20):
        rate, scale, mean_over = 0.01 / (1 + step), 0.02 if step % 3 else 1.0, 0.5 + step / 20
        set_gradients(ours, step, scale)
        set_gradients(theirs, step, scale)
        # Ours: one division takes the mean and clips. Theirs: the mean first, then torch's own clipping.
        norm = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in ours.values() if p.grad is not None])) / mean_over
        optimizer.step(rate, mean_over * (norm / 3.0).clamp(min=1.0), NO)
        for p in theirs.values():
            assert p.grad is not None
            p.grad /= mean_over
        clipped += bool(nn.utils.clip_grad_norm_(theirs.values(), 3.0) > 3.0)
        for group in reference.param_groups:
            group["lr"] = rate
        reference.step()
    assert 0 < clipped < 20  # both kinds of steps were compared
    for name, p in ours.items():
        torch.testing.assert_close(p, theirs[name], atol=1e-6, rtol=1e-6)
        state = reference.state[theirs[name]]
        for key in ("step", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state()[f"{name}/{key}"], state[key], atol=1e-7, rtol=1e-5)


def test_only_matrices_decay() -> None:
    named = parameters()
    before = copied(named)  # type: ignore[arg-type]
    for p in named.values():
        p.grad = torch.zeros_like(p)
    Optimizer(named.items(), ADAMW).step(0.01, ONE, NO)
    for name, p in named.items():
        factor = 1 - 0.01 * 0.2 if p.ndim == 2 else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("spec", [ADAMW, MUON], ids=["adamw", "muon"])
@pytest.mark.parametrize("poison", [math.nan, math.inf, 1.0])
def test_a_refused_step_changes_nothing_at_all(spec: OptimizerSpec, poison: float) -> None:
    named = parameters()
    optimizer = Optimizer(named.items(), spec)
    for step in range(3):
        set_gradients(named, step)
        optimizer.step(0.01, ONE, NO)
    before = copied(dict(named) | optimizer.state())
    set_gradients(named, 3)
    for p in named.values():
        assert p.grad is not None
        p.grad[0] *= poison
    optimizer.step(0.01, torch.tensor(poison), YES)
    assert differing(before, dict(named) | optimizer.state()) == []
    # The step after it is the one that would have been taken, had there been none between.
    other = parameters()
    without = Optimizer(other.items(), spec)
    for step in (0, 1, 2, 4):
        set_gradients(other, step)
        without.step(0.01, ONE, NO)
    set_gradients(named, 4)
    optimizer.step(0.01, ONE, NO)
    assert differing(dict(named) | optimizer.state(), dict(other) | without.state()) == []


def muon_update(gradient: Tensor, momentum_buffer: Tensor, momentum: float) -> tuple[Tensor, Tensor]:
    """Nesterov momentum, then five Newton–Schulz iterations towards the nearest orthogonal matrix (Jordan et al., 2024).

    Each line of an iteration is computed exactly and rounded to bf16 once, as a matrix product in bf16 is meant to be.
    """
    momentum_buffer = momentum * momentum_buffer + (1 - momentum) * gradient
    nesterov = (1 - momentum) * gradient + momentum * momentum_buffer
    a, b, c = 3.4445, -4.7750, 2.0315
    x = nesterov.bfloat16()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = (x / x.norm().clamp(min=1e-7)).double()
    for _ in range(5):
        gram = (x @ x.T).bfloat16().double()
        polynomial = (b * gram + c * (gram @ gram)).bfloat16().double()
        x = (a * x + polynomial @ x).bfloat16().double()
    return (x.T if tall else x), momentum_buffer


def test_muon_equals_the_papers_update() -> None:
    named = parameters()
    optimizer = Optimizer(named.items(), MUON)
    matrices = {name: p.detach().clone() for name, p in named.items() if p.ndim == 2 and name.startswith("blocks.")}
    assert any(p.shape[0] > p.shape[1] for p in matrices.values())
    assert any(p.shape[0] < p.shape[1] for p in matrices.values())
    memory = {name: torch.zeros_like(p) for name, p in matrices.items()}
    divisor = torch.tensor(2.5)
    for step in range(8):
        set_gradients(named, step)
        rate = 0.02 / (1 + step)
        for name, p in matrices.items():
            gradient = named[name].grad
            assert gradient is not None
            update, memory[name] = muon_update(gradient / divisor, memory[name], 0.9)
            # The root of the mean square is that of AdamW's updates, so that both go by one learning rate.
            p *= 1 - rate * 0.2
            p -= rate * 0.2 * math.sqrt(max(p.shape)) * update.float()
        optimizer.step(rate, divisor, NO)
    for name, p in matrices.items():
        moved = (p - parameters()[name].detach()).norm()
        # Where a product falls between two bf16 numbers it may be rounded to either: eight bits, so not all digits agree.
        assert (named[name].detach() - p).norm() < 0.01 * moved, name
        torch.testing.assert_close(optimizer.state()[f"{name}/momentum_buffer"], memory[name], atol=1e-6, rtol=1e-5)


def test_muon_moves_along_an_almost_orthogonal_matrix() -> None:
    # Independent of any iteration: all singular values of the step are near one, whatever those of the gradient.
    named = parameters()
    name = "blocks.0.mlp.up.weight"
    before = named[name].detach().clone()
    set_gradients(named, 0)
    Optimizer(named.items(), replace(MUON, weight_decay=0.0)).step(0.1, ONE, NO)
    step = (before - named[name].detach()) / (0.1 * 0.2 * math.sqrt(20))
    gradient = named[name].grad
    assert gradient is not None
    assert torch.linalg.svdvals(gradient).max() / torch.linalg.svdvals(gradient).min() > 2
    values = torch.linalg.svdvals(step)
    assert values.min() > 0.6
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(gradient, full_matrices=False)
    assert ((left.T @ step @ right.T).diagonal() > 0.6).all()  # the gradient's own singular vectors


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    muon = {name.partition("/")[0] for name in Optimizer(parameters().items(), MUON).state() if "momentum" in name}
    adamw = {name.partition("/")[0] for name in Optimizer(parameters().items(), MUON).state() if "exp_avg" in name}
    assert muon == {f"blocks.{i}.{part}.weight" for i in range(2) for part in (
        "attention.query", "attention.key", "attention.value", "attention.output", "mlp.gate", "mlp.up", "mlp.down",
    )}  # fmt: skip
    assert adamw == parameters().keys() - muon
    # What AdamW keeps takes the very step it takes without Muon.
    with_muon, without = parameters(), parameters()
    for named, spec in ((with_muon, MUON), (without, ADAMW)):
        set_gradients(named, 0)
        Optimizer(named.items(), spec).step(0.01, ONE, NO)
    assert {name for name in with_muon if torch.equal(with_muon[name], without[name])} == adamw


@pytest.mark.parametrize("spec", [ADAMW, MUON], ids=["adamw", "muon"])
def test_states_exist_before_the_first_step_and_writing_into_them_restores(spec: OptimizerSpec) -> None:
    one = parameters()
    first = Optimizer(one.items(), spec)
    names = list(first.state())
    for step in range(3):
        set_gradients(one, step)
        first.step(0.01, ONE, NO)
    assert list(first.state()) == names
    two = parameters(seed=1)
    second = Optimizer(two.items(), spec)
    with torch.no_grad():
        for name, tensor in (dict(two) | second.state()).items():
            tensor.copy_((dict(one) | first.state())[name])
    for named, optimizer in ((one, first), (two, second)):
        set_gradients(named, 3)
        optimizer.step(0.01, ONE, NO)
    assert differing(dict(one) | first.state(), dict(two) | second.state()) == []
