from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor, nn

from phalanx.events.fault_log import FaultClaims
from phalanx.events.records import Event, NotFinite, Step, StepSkipped
from phalanx.faults.grammar import Fault
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.training.hooks.nonfinite import Finding, common_module, conclude
from phalanx.training.hooks.rank_faults import RankFaults
from phalanx.training.trainer import Trainer


class Spoiled(torch.autograd.Function):
    """The identity, whose backward gives one NaN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        spoiled = gradients[0].clone()
        spoiled.view(-1)[0] = math.nan
        return spoiled


def forward(trainer: Trainer, module: nn.Module) -> None:
    module.register_forward_hook(
        lambda module, given, output: output.where(torch.ones_like(output).cumsum(0) > 1, math.inf) if now(trainer) else None
    )


def backward(trainer: Trainer, module: nn.Module) -> None:
    """What the module reads gets a bad gradient: its own backward has made it."""
    module.register_forward_pre_hook(lambda module, given: (Spoiled.apply(given[0]), *given[1:]) if now(trainer) else None)


def now(trainer: Trainer) -> bool:
    return trainer.stepper.number == 2


def traced(
    mesh: Mesh, directory: Path, spoil: Callable[[Trainer, nn.Module], None], layer: str, rank: int, *overrides: str
) -> NotFinite:
    """What is told of a run whose second step goes wrong in one module of one rank."""
    trainer = tiny_trainer(mesh, tiny_run("train.steps=4", "data.eval_fraction=0", *overrides), directory)
    modules = dict(module for part in trainer.sharded.parts for module in part.named_modules())
    if mesh.rank == rank:
        spoil(trainer, modules[layer])
    hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules.values())
    told: list[Event] = []
    before: dict[str, Tensor] = {}
    for event in trainer.events():
        told.append(event)
        if isinstance(event, Step) and event.step == 1:
            before = copied(trainer.tensors())
        if isinstance(event, NotFinite):
            assert differing(before, trainer.tensors()) == []  # and no buffer
    kinds = [type(event) for event in told[:5]]
    assert kinds == [Step, StepSkipped, NotFinite, Step, Step]
    assert sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules.values()) == hooks
    assert all(not parameter._backward_hooks for part in trainer.sharded.parts for parameter in part.parameters())
    found = told[2]
    assert isinstance(found, NotFinite) and found.step == 2
    return found


def test_a_nonfinite_value_is_traced_to_the_module_that_made_it(tmp_path: Path) -> None:
    found = traced(ALONE, tmp_path, forward, "blocks.1.attention.output", 0)
    assert (found.rank, found.layer) == (0, "blocks.1.attention.output")
    assert found.message == (
        "The loss or the gradient of step 2 is not finite: an infinite number first appeared in the forward of "
        "blocks.1.attention.output on rank 0, in its micro-batch 1."
    )
    found = traced(ALONE, tmp_path, backward, "blocks.0.mlp.down", 0)
    assert (found.rank, found.layer) == (0, "blocks.0.mlp.down")
    assert "NaN first appeared in the backward of blocks.0.mlp.down on rank 0" in found.message


MOE = ("model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=16")


@pytest.mark.parametrize(
    ("spoil", "layer", "layout", "rank", "overrides"),
    [
        (backward, "blocks.0.mlp.down", Layout(data=2), 1, ()),
        (forward, "blocks.1.mlp.up", Layout(data=1, tensor=2), 1, ()),
        (backward, "blocks.1.attention.output", Layout(data=1, pipeline=2), 1, ("train.micro_batch=4",)),
        (forward, "blocks.0.mlp", Layout(data=1, shard=2, zero=3), 1, ("memory.recompute=full",)),
        pytest.param(forward, "blocks.1.mlp", Layout(data=2, expert=2), 1, MOE, marks=pytest.mark.slow),
        pytest.param(backward, "blocks.1.mlp", Layout(data=1, context=2), 0, (), marks=pytest.mark.slow),
        pytest.param(backward, "blocks.1.mlp_norm", Layout(data=1, tensor=2), 0, (), marks=pytest.mark.slow),
    ],
)
def test_a_nonfinite_value_is_traced_to_its_rank(
    spoil: Callable[..., None], layer: str, layout: Layout, rank: int, overrides: tuple[str, ...], tmp_path: Path
) -> None:
    results = run_ranks(traced, layout.ranks, tmp_path, spoil, layer, rank, *overrides, layout=layout)
    assert len({result.message for result in results}) == 1
    assert (results[0].rank, results[0].layer) == (rank, layer)


def test_an_injected_nan_is_traced_and_the_retried_step_equals_an_undisturbed_one(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run("train.steps=3"), tmp_path / "checkpoints")
    faults = (Fault(kind="nan", rank=0, step=2, layer="blocks.1.mlp"),)
    trainer.hooks.add(RankFaults(faults, rank=0, done=FaultClaims(tmp_path), report=lambda event: None))
    told = list(trainer.events())
    assert [(event.rank, event.layer) for event in told if isinstance(event, NotFinite)] == [(0, "blocks.1.mlp")]
    undisturbed = tiny_trainer(ALONE, tiny_run("train.steps=3"), tmp_path / "undisturbed" / "checkpoints").events()
    both = ([(event.step, event.loss) for event in events if isinstance(event, Step)] for events in (told, undisturbed))
    one, other = both
    assert one == other and len(one) == 3, "taken once more, the step is the same to the bit"


def test_a_transient_nonfinite_step_is_reported_as_transient(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run("train.steps=2"), tmp_path)
    struck: list[int] = []

    def once(module: nn.Module, given: Any, output: Tensor) -> Tensor | None:
        if struck:
            return None
        struck.append(1)
        return output * math.nan

    trainer.model.register_forward_hook(once)
    (found,) = [event for event in trainer.events() if isinstance(event, NotFinite)]
    assert (found.rank, found.layer) == (0, "")
    assert (
        "but a repetition of the step was: a transient fault; in the first attempt the loss was not finite on rank 0"
        in found.message
    )


def test_only_the_first_nonfinite_step_in_a_row_is_traced_and_none_while_the_loss_scale_falls(tmp_path: Path) -> None:
    run = tiny_run("train.steps=4", "resilience.max_skipped=9")
    trainer = tiny_trainer(ALONE, run, tmp_path)
    trainer.model.register_forward_hook(lambda module, given, output: output * math.nan)
    assert [event.step for event in trainer.events() if isinstance(event, NotFinite)] == [1]
    run = tiny_run("train.steps=3", "precision.compute=fp16", "precision.loss_scale=1e20")
    assert not [event for event in tiny_trainer(ALONE, run, tmp_path / "other").events() if isinstance(event, NotFinite)]


def test_nonfinite_values_are_not_blamed_on_ranks_that_receive_them() -> None:
    late, early = Finding(1, False, 1, 3, "blocks.2", "NaN"), Finding(1, False, 0, 9, "blocks.1", "NaN")
    assert conclude(5, [(late, None, True), (early, None, True)]).rank == 1  # stages come in order
    up, down = Finding(1, True, -1, 7, "blocks.3", "NaN"), Finding(1, True, 0, 1, "blocks.1", "NaN")
    assert conclude(5, [(down, None, True), (up, None, True)]).rank == 1
    assert conclude(5, [(late, None, True), (down, None, True)]).rank == 0  # forwards before backwards
    assert "as on 1 other ranks" in conclude(5, [(late, None, True), (late, None, True)]).message
    summed = conclude(5, [(None, "head.weight", True), (None, None, True)])
    assert (summed.rank, summed.layer) == (0, "head.weight")


def test_common_module_of_several_readers() -> None:
    assert common_module(["", "blocks.0", "blocks.0.mlp"]) == "blocks.0.mlp"
    assert common_module(["blocks.0.attention", "blocks.0.attention.query", "blocks.0.attention.key"]) == "blocks.0.attention"
    assert common_module(["blocks.0.mlp.gate", "head"]) == "the model"
