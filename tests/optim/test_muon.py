"""Muon: against the paper, against torch's own on one process, and on boxes of matrices on several ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from optim.holding import ADAMW, MUON, NO, ONE, YES, everything, give_gradients, holding, values
from ranks import copied, differing, run_ranks
from torch import Tensor, nn

from phalanx.optim.optimizer import Optimizer
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard, extract
from phalanx.spec.layout import Layout
from phalanx.spec.run import Precision


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
    held = holding()
    named = {one.name: one for one in held}
    optimizer = Optimizer(held, MUON)
    matrices = {
        name: one.value.detach().clone() for name, one in named.items() if one.value.ndim == 2 and name.startswith("blocks.")
    }
    assert any(p.shape[0] > p.shape[1] for p in matrices.values())
    assert any(p.shape[0] < p.shape[1] for p in matrices.values())
    memory = {name: torch.zeros_like(p) for name, p in matrices.items()}
    divisor = torch.tensor(2.5)
    for step in range(8):
        give_gradients(held, step)
        rate = 0.02 / (1 + step)
        for name, p in matrices.items():
            gradient = named[name].gradient
            assert gradient is not None
            update, memory[name] = muon_update(gradient / divisor, memory[name], 0.9)
            # The root of the mean square is that of AdamW's updates, so that both go by one learning rate.
            p *= 1 - rate * 0.2
            p -= rate * 0.2 * math.sqrt(max(p.shape)) * update.float()
        optimizer.step(rate, divisor, NO)
    for name, p in matrices.items():
        moved = (p - values(holding())[name]).norm()
        # Where a product falls between two bf16 numbers it may be rounded to either: eight bits, so not all digits agree.
        assert (named[name].value.detach() - p).norm() < 0.01 * moved, name
        torch.testing.assert_close(
            everything(held, optimizer.state())[f"{name}/momentum_buffer"], memory[name], atol=1e-6, rtol=1e-5
        )


def test_muon_moves_along_an_almost_orthogonal_matrix() -> None:
    # Independent of any iteration: all singular values of the step are near one, whatever those of the gradient.
    held = holding()
    one = next(one for one in held if one.name == "blocks.0.mlp.up.weight")
    before = one.value.detach().clone()
    give_gradients(held, 0)
    Optimizer(held, replace(MUON, weight_decay=0.0)).step(0.1, ONE, NO)
    step = (before - one.value.detach()) / (0.1 * 0.2 * math.sqrt(20))
    assert one.gradient is not None
    assert torch.linalg.svdvals(one.gradient).max() / torch.linalg.svdvals(one.gradient).min() > 2
    values = torch.linalg.svdvals(step)
    assert values.min() > 0.6
    assert values.max() < 1.3
    left, _, right = torch.linalg.svd(one.gradient, full_matrices=False)
    assert ((left.T @ step @ right.T).diagonal() > 0.6).all()  # the gradient's own singular vectors


def test_iterations_in_fp32_have_the_singular_values_of_the_polynomial() -> None:
    # Iterations change singular values only, each by the polynomial; fp32 leaves seven digits of them.
    held = holding()
    one = next(one for one in held if one.name == "blocks.0.mlp.up.weight")
    before = one.value.detach().clone()
    give_gradients(held, 0)
    assert one.gradient is not None
    left, values, right = torch.linalg.svd(one.gradient.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ values.diag() @ right
    Optimizer(held, replace(MUON, weight_decay=0.0), precision=Precision(newton_schulz="fp32")).step(1.0, ONE, NO)
    step = (before - one.value.detach()) / (0.2 * math.sqrt(20))
    torch.testing.assert_close(step.double(), expected, atol=1e-5, rtol=0.0)


def test_muon_takes_the_matrices_of_the_blocks_and_adamw_the_rest() -> None:
    states = Optimizer(holding(), MUON).state()
    muon = {name.partition("/")[0] for name in states if "momentum" in name}
    adamw = {name.partition("/")[0] for name in states if "exp_avg" in name}
    assert muon == {f"blocks.{i}.{part}.weight" for i in range(2) for part in (
        "attention.query", "attention.key", "attention.value", "attention.output", "mlp.gate", "mlp.up", "mlp.down",
    )}  # fmt: skip
    assert adamw == {one.name for one in holding()} - muon
    # What AdamW keeps takes the very step it takes without Muon.
    with_muon, without = holding(), holding()
    for held, spec in ((with_muon, MUON), (without, ADAMW)):
        give_gradients(held, 0)
        Optimizer(held, spec).step(0.01, ONE, NO)
    assert {a.name for a, b in zip(with_muon, without, strict=True) if torch.equal(a.value, b.value)} == adamw


def torchs(held: list[OwnedParam], steps: int) -> dict[str, Tensor]:
    """Where torch.optim.Muon gets, on one process: values and momentum of the blocks' matrices."""
    matrices = {one.name: one for one in held if one.value.ndim == 2 and one.name.startswith("blocks.")}
    parameters = [one.value for one in matrices.values()]
    reference = torch.optim.Muon(parameters, lr=0.02, weight_decay=0.2, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    for step in range(steps):
        give_gradients(held, step)
        for one in matrices.values():
            assert one.gradient is not None
            one.value.grad = one.gradient / 2.5
        reference.step()
    kept = {f"{name}/momentum_buffer": reference.state[one.value]["momentum_buffer"] for name, one in matrices.items()}
    return copied({name: one.value for name, one in matrices.items()} | kept)


def test_muon_equals_torchs_muon_bit_for_bit() -> None:
    held = holding()
    optimizer = Optimizer(held, MUON)
    for step in range(5):
        give_gradients(held, step)
        optimizer.step(0.02, torch.tensor(2.5), NO)
    expected = torchs(holding(), 5)
    found = everything(held, optimizer.state())
    assert differing({name: found[name] for name in expected}, expected) == []


def cut_up(mesh: Mesh) -> list[OwnedParam]:
    """The matrices in boxes as techniques leave them: rows or columns over the tensor group, then rows over the shards. Keys and
    values, of one head, are whole on all tensor ranks, as they are where heads are fewer than ranks."""
    found = []
    for one in holding():
        spot = one.shard
        if one.name.startswith("blocks.") and one.value.ndim == 2:
            if "key" in one.name or "value" in one.name:
                spot = replace(spot, split=("tensor",))
            else:
                spot = spot.cut(
                    1 if "output" in one.name or "down" in one.name else 0,
                    mesh.coordinate("tensor"),
                    mesh.size("tensor"),
                    "tensor",
                )
            if mesh.size("shard") > 1:
                spot = spot.cut(0, mesh.coordinate("shard"), mesh.size("shard"), "shard")
        found.append(OwnedParam(one.name, nn.Parameter(extract(spot.slice, one.value.detach()).clone()), spot))
    return found


def step_cut_up(mesh: Mesh, steps: int, precision: Precision) -> tuple[dict[str, tuple[ParamShard, Tensor]], str]:
    held = cut_up(mesh)
    optimizer = Optimizer(held, MUON, precision=precision, mesh=mesh)
    for step in range(steps):
        give_gradients(held, step)
        optimizer.step(0.02, torch.tensor(2.5), NO)
    give_gradients(held, steps)
    optimizer.step(0.02, torch.tensor(math.nan), YES)
    spots = {one.name: one.shard for one in held}
    found = everything(held, optimizer.state())
    boxes = {name: (spots[name.partition("/")[0]], tensor) for name, tensor in found.items()}
    return boxes, optimizer.applied


@pytest.mark.parametrize(
    "layout", [Layout(tensor=2), Layout(shard=2, tensor=2), Layout(tensor=5)], ids=["tensor2", "shard2xtensor2", "tensor5"]
)
def test_muon_on_boxes_equals_one_process(layout: Layout) -> None:
    expected = torchs(holding(), 3)
    of_ranks = run_ranks(step_cut_up, layout.ranks, 3, Precision(), layout=layout)
    checked = 0
    for boxes, applied in of_ranks:
        assert "14 of them made orthogonal together" in applied
        assert f"[{layout.ranks}] ranks" in applied
        for name, whole in expected.items():
            spot, box = boxes[name]
            torch.testing.assert_close(box, extract(spot.slice, whole), atol=1e-5, rtol=1e-5)
            checked += box.numel()
    assert checked > sum(whole.numel() for whole in expected.values()) - 1


@pytest.mark.parametrize("precision", [Precision(optimizer="bf16"), Precision(newton_schulz="fp32")], ids=["momentum", "fp32"])
def test_muon_on_boxes_in_other_formats_equals_one_process(precision: Precision) -> None:
    held = holding()
    optimizer = Optimizer(held, MUON, precision=precision)
    for step in range(3):
        give_gradients(held, step)
        optimizer.step(0.02, torch.tensor(2.5), NO)
    expected = everything(held, optimizer.state())
    momentum = torch.bfloat16 if precision.optimizer == "bf16" else torch.float32
    assert expected["blocks.0.mlp.up.weight/momentum_buffer"].dtype == momentum
    for boxes, _ in run_ranks(step_cut_up, 2, 3, precision, layout=Layout(tensor=2)):
        for name, (spot, box) in boxes.items():
            whole = expected[name]
            torch.testing.assert_close(box, extract(spot.slice, whole) if whole.ndim else whole, atol=1e-5, rtol=1e-5)
