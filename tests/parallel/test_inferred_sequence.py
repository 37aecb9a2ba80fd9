"""Sequence parallelism of models that were not written for it: the step is that of one process, a mistake in the plan is found, and what layers
keep for the backward is less."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from family_steps import UNEVEN, differing, family, family_run
from ranks import run_ranks, tiny_trainer
from torch.autograd.graph import saved_tensors_hooks

from phalanx.models import custom
from phalanx.models.custom import cuts_of
from phalanx.models.init import build
from phalanx.parallel.mesh import Mesh
from phalanx.spec.cut_plan import CutPlan, SequencePlan
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run
from phalanx.verification.parity import verify
from phalanx.verification.rank_pool import RankPool

transformers = pytest.importorskip("transformers", "5", reason="models of transformers")
LAYOUT = Layout(data=1, tensor=2, sequence=True)
LAYER = "model.layers.1"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes that measure the model, too."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.parametrize("kind", ["phi3", "gpt2", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_step_is_that_of_one_process(kind: str, tmp_path: Path) -> None:
    """GPT-2 shapes its last states like its tokens, so that they have all positions."""
    far, apart, sums = differing(replace(family_run(kind), layout=LAYOUT), tmp_path, LAYOUT)
    assert far < 1e-6 and apart == {}
    assert sums == 1 + (2 if kind == "mixtral" else 0), (
        "the embedding, and experts, which flatten positions; all else are reduce-scatters"
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "phi3"])
def test_uneven_sizes_with_divided_positions(kind: str, tmp_path: Path) -> None:
    run = replace(family_run(kind), model=family(kind, **UNEVEN), layout=LAYOUT)
    far, apart, _ = differing(run, tmp_path, LAYOUT)
    assert far < 1e-6 and apart == {}


def sequence(plan: CutPlan) -> SequencePlan:
    assert plan.sequence is not None
    return plan.sequence


def no_gradient_sum(plan: CutPlan) -> CutPlan:
    return replace(plan, partial=plan.partial - {f"{LAYER}.input_layernorm.weight"})


def not_gathered(plan: CutPlan) -> CutPlan:
    """The feed-forward enters a rank's own positions as if every rank had the same."""
    kept = tuple(each for each in sequence(plan).gathered if each.module != f"{LAYER}.mlp")
    own = tuple(name for name in sequence(plan).scattered if name != f"{LAYER}.mlp.down_proj")
    return replace(plan, sequence=replace(sequence(plan), gathered=kept, scattered=own))


def joined(plan: CutPlan) -> CutPlan:
    """Gradients of what all ranks gather are not summed."""
    moved = tuple(each for each in sequence(plan).gathered if each.module == f"{LAYER}.mlp")
    kept = tuple(each for each in sequence(plan).gathered if each.module != f"{LAYER}.mlp")
    enters = tuple(enter for enter in plan.enters if enter.module != f"{LAYER}.mlp")
    return replace(plan, enters=enters, sequence=replace(sequence(plan), gathered=kept, joined=moved))


def planted_run(mistake: Callable[[CutPlan], CutPlan], monkeypatch: pytest.MonkeyPatch) -> Run:
    run = replace(family_run("phi3"), layout=LAYOUT)
    plan = cuts_of(build(run.model), 2, True)
    assert plan is not None
    monkeypatch.setitem(custom._plans, (run.model, 2, True), mistake(plan))  # ranks are forked with it
    return run


@pytest.mark.parametrize(
    ("mistake", "guilty", "loss"),
    [
        (no_gradient_sum, "input_layernorm.weight", False),
        (not_gathered, "mlp.down_proj.weight", True),
        (joined, "post_attention_layernorm.weight", False),
    ],
)
def test_a_wrong_plan_is_found(
    mistake: Callable[[CutPlan], CutPlan], guilty: str, loss: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, apart, _ = differing(planted_run(mistake, monkeypatch), tmp_path, LAYOUT)
    assert f"{LAYER}.{guilty}" in apart and (far > 1e-4) == loss


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [no_gradient_sum, not_gathered])
def test_verify_finds_a_wrong_plan(mistake: Callable[[CutPlan], CutPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    report = verify(planted_run(mistake, monkeypatch), steps=2, pool=RankPool)
    assert report.failure is None and not report.passed
    failed = {check.name: check.tensor for check in report.checks if not check.passed}
    assert failed.get("gradients", "").startswith("model.layers.1"), failed


def kept(mesh: Mesh, run: Run, folder: Path) -> dict[tuple[int, ...], int]:
    """How many tensors of each shape a forward keeps for the backward, parameters aside."""
    trainer = tiny_trainer(mesh, run, folder)
    part, found = trainer.sharded.parts[0], dict[tuple[int, ...], int]()
    own = {parameter.untyped_storage().data_ptr() for parameter in part.parameters()}
    seen: set[int] = set()

    def pack(x: torch.Tensor) -> torch.Tensor:
        place = x.untyped_storage().data_ptr()
        if place not in own and place not in seen and x.is_floating_point():
            seen.add(place)
            held.append(x)
            found[tuple(x.shape)] = found.get(tuple(x.shape), 0) + 1
        return x

    held: list[torch.Tensor] = []
    with saved_tensors_hooks(pack, lambda x: x):
        part(torch.arange(16).expand(2, 16), torch.arange(16).expand(2, 16))
    trainer.close()
    return found


def test_the_residual_stream_takes_half_of_the_memory(tmp_path: Path) -> None:
    run = family_run("llama")
    width, found = run.model.dim, {}
    for layout in (Layout(data=1, tensor=2), LAYOUT):
        cuts_of(build(run.model), 2, layout.sequence)  # once, for the ranks that are forked from here
        shapes = run_ranks(kept, 2, replace(run, layout=layout), tmp_path / str(layout.sequence), layout=layout)[0]
        found[layout.sequence] = shapes
    whole, own = (2, 16, width), (2, 8, width)
    assert own not in found[False] and found[True].get(own, 0) > 0
    # What stays whole are the inputs of regions, two of each layer and that of the head.
    assert found[True].get(whole, 0) <= 2 * run.model.layers + 1 < found[False][whole]
