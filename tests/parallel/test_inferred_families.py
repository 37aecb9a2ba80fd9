"""Models of transformers, unmodified, on two tensor ranks: the cuts are inferred, and the step is that of one process."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import contents
from family_steps import UNEVEN, differing, family, family_run
from hf_families import FAMILIES
from ranks import ALONE, run_ranks, tiny_run, tiny_trainer
from ranks import differing as unequal

from phalanx.evaluation.convert import export_checkpoint
from phalanx.models import custom
from phalanx.models.custom import cuts_of
from phalanx.models.init import build
from phalanx.parallel.mesh import Mesh
from phalanx.spec.cut_plan import CutPlan, Leave, ParamCut, Segment
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run
from phalanx.tracing.applied_axes import wrong_cuts
from phalanx.verification.parity import verify
from phalanx.verification.rank_pool import RankPool

transformers = pytest.importorskip("transformers", "5", reason="models of transformers")

REFUSED: dict[str, str] = {}
"""Families that are not divided, and what is said of them."""
MORE_SUMS = {"olmo2": 2, "olmo3": 2, "olmoe": 2, "qwen2_moe": 1, "deepseek_v3": 1, "glm4_moe": 1}
"""Sums of a layer beyond two: norms over all heads have one each, shared experts have one."""


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """By processes that measure the model, too."""
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt2", "qwen3", "mixtral"])
def test_a_step_is_that_of_one_process(kind: str, tmp_path: Path) -> None:
    run = family_run(kind)
    far, apart, sums = differing(run, tmp_path, Layout(tensor=2))
    assert far < 1e-6 and apart == {}
    assert sums == 1 + 2 * run.model.layers  # the embedding, and two of each layer


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, id=f"{kind}-{layout.tensor}", marks=[] if (kind, layout.tensor) == ("gpt2", 3) else [pytest.mark.slow])
        for kind in ("gpt2", "llama", "mixtral", "phi3")
        for layout in (Layout(tensor=2, shard=2, zero=3), Layout(tensor=3), Layout(tensor=4))
    ],
)  # fmt: skip
def test_uneven_sizes_give_the_step_of_one_process(kind: str, layout: Layout, tmp_path: Path) -> None:
    run = replace(family_run(kind), model=family(kind, **UNEVEN))
    plan = cuts_of(build(run.model), layout.tensor)
    assert plan is not None and {331, 83} <= {size for cut in plan.params.values() for size in cut.sizes}
    attends = any(segment.role == "heads" for cut in plan.params.values() for segment in cut.segments)
    assert attends == (layout.tensor < 4), "four ranks cannot share six heads"
    if not attends:
        assert any("6 groups (heads) of" in why and "only by 3 or 6" in why for why in plan.whole.values())
    far, apart, sums = differing(run, tmp_path, layout)
    assert far < 1e-5 and apart == {}
    assert sums == 1 + (2 if attends else 1) * run.model.layers


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral", "phi3"])
def test_verify_proves_uneven_sizes(kind: str) -> None:
    run = replace(family_run(kind, tensor=3), model=family(kind, **UNEVEN))
    report = verify(run, steps=2, pool=RankPool)
    assert report.passed, (report.failure, report.checks)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [Layout(tensor=2), Layout(tensor=2, shard=2, zero=3)], ids=["tensor", "tensor and ZeRO-3"])
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # transformers' GPTBigCode calls it
def test_every_family_is_divided_or_refused(kind: str, layout: Layout, tmp_path: Path) -> None:
    run = replace(family_run(kind), layout=layout)
    if kind in REFUSED:
        with pytest.raises(RunError, match=REFUSED[kind]):
            cuts_of(build(run.model), 2)
        return
    far, apart, sums = differing(run, tmp_path, layout)
    assert far < 1e-5 and apart == {}
    assert 1 < sums <= 1 + (2 + MORE_SUMS.get(kind, 0)) * run.model.layers


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tensor": 2}, {"tensor": 2, "shard": 2, "zero": 3}], ids=["tensor", "tensor and ZeRO-3"])
@pytest.mark.parametrize("kind", ["phi3", "mixtral"])
def test_verify_proves_it(kind: str, layout: dict[str, Any]) -> None:
    report = verify(family_run(kind, **layout), steps=2, pool=RankPool)
    assert report.passed, (report.failure, report.checks)


# From tensor ranks to one rank, and out to transformers.

STEP = "step-00000002"


def begin(mesh: Mesh, run: Run, folder: Path) -> list[float]:
    trainer = tiny_trainer(mesh, run, folder / "checkpoints")
    for _ in range(2):
        trainer.step()
    trainer.save()
    losses = [trainer.step().loss for _ in range(2)]
    trainer.close()
    return losses


def go_on(mesh: Mesh, run: Run, folder: Path, other: Path) -> list[float]:
    trainer = tiny_trainer(mesh, run, other / "checkpoints")
    trainer.restore(folder / "checkpoints" / STEP)
    trainer.save()
    losses = [trainer.step().loss for _ in range(2)]
    trainer.close()
    return losses


@pytest.mark.parametrize("kind", ["phi3", "mixtral"])
def test_from_tensor_ranks_to_one_rank_and_to_transformers(kind: str, tmp_path: Path) -> None:
    run = replace(tiny_run("train.sequence_length=16", "precision.compute=fp32", "optimizer.eps=1e-4"), model=family(kind))
    cuts_of(build(run.model), 2)  # once, for the ranks that are forked from here
    first = run_ranks(begin, 2, run, tmp_path / "two", layout=Layout(tensor=2))[0]
    second = go_on(ALONE, run, tmp_path / "two", tmp_path / "one")
    assert second == pytest.approx(first, rel=1e-5)
    saved = contents(tmp_path / "two" / "checkpoints" / STEP)
    assert unequal(saved, contents(tmp_path / "one" / "checkpoints" / STEP)) == []
    (tmp_path / "one" / "run.toml").write_text(dump(run))
    export_checkpoint(tmp_path / "one", tmp_path / "hf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    theirs = dict(loaded.named_parameters())
    ours = {name.removeprefix("model/"): tensor for name, tensor in saved.items() if name.startswith("model/")}
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["phi3", "gpt2"])
def test_uneven_parts_of_two_ranks_are_saved_whole_and_divided_among_three(kind: str, tmp_path: Path) -> None:
    model = family(kind, **UNEVEN)
    run = replace(tiny_run("train.sequence_length=16", "precision.compute=fp32", "optimizer.eps=1e-4"), model=model)
    for ranks in (2, 3):
        cuts_of(build(run.model), ranks)  # once, for the ranks that are forked from here
    first = run_ranks(begin, 2, run, tmp_path / "two", layout=Layout(tensor=2))[0]
    one = go_on(ALONE, run, tmp_path / "two", tmp_path / "one")
    three = run_ranks(go_on, 3, run, tmp_path / "two", tmp_path / "three", layout=Layout(tensor=3))[0]
    assert one == pytest.approx(first, rel=1e-5) and three == pytest.approx(first, rel=1e-5)
    saved = contents(tmp_path / "two" / "checkpoints" / STEP)
    for other in ("one", "three"):
        assert unequal(saved, contents(tmp_path / other / "checkpoints" / STEP)) == []


# Mistakes in a plan, planted one at a time.

LAYER = "model.layers.1"


def one_run(plan: CutPlan) -> CutPlan:
    name = f"{LAYER}.self_attn.qkv_proj.weight"
    whole = ParamCut(0, (Segment("heads", sum(plan.params[name].sizes)),))
    return replace(plan, params=dict(plan.params) | {name: whole})


def no_sum(plan: CutPlan) -> CutPlan:
    return replace(plan, leaves=tuple(leave for leave in plan.leaves if leave.module != f"{LAYER}.mlp.down_proj"))


def two_sums(plan: CutPlan) -> CutPlan:
    return replace(plan, leaves=(*plan.leaves, Leave(f"{LAYER}.mlp.down_proj")))


def planted_run(mistake: Callable[[CutPlan], CutPlan], monkeypatch: pytest.MonkeyPatch) -> Run:
    run = family_run("phi3", tensor=2)
    plan = cuts_of(build(run.model), 2)
    assert plan is not None
    monkeypatch.setitem(custom._plans, (run.model, 2, False), mistake(plan))  # ranks are forked with it
    return run


@pytest.mark.parametrize(
    ("mistake", "guilty"),
    [(one_run, "self_attn.qkv_proj.weight"), (no_sum, "mlp.down_proj.weight"), (two_sums, "mlp.down_proj.weight")],
)
def test_a_wrong_plan_is_found(
    mistake: Callable[[CutPlan], CutPlan], guilty: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, apart, _ = differing(planted_run(mistake, monkeypatch), tmp_path, Layout(tensor=2))
    assert far > 1e-4 and f"{LAYER}.{guilty}" in apart


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [one_run, no_sum, two_sums])
def test_verify_finds_a_wrong_plan(mistake: Callable[[CutPlan], CutPlan], monkeypatch: pytest.MonkeyPatch) -> None:
    report = verify(planted_run(mistake, monkeypatch), steps=2, pool=RankPool)
    assert report.failure is None and not report.passed
    failed = {check.name: check.tensor for check in report.checks if not check.passed}
    assert failed.keys() >= {"loss", "gradients"} and failed["gradients"]


@pytest.mark.slow
def test_a_bias_that_every_rank_adds_whole_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the experts of gpt-oss, whose results are a sum over the ranks. It is 0 at first; its gradient is not."""
    run = family_run("gpt_oss", tensor=2)
    plan = cuts_of(build(run.model), 2)
    experts = tuple(f"model.layers.{layer}.mlp.experts" for layer in range(2))
    assert plan is not None and plan.shares == experts
    assert plan.params["model.layers.0.self_attn.sinks"] == ParamCut(0, (Segment("heads", 4),))
    monkeypatch.setitem(custom._plans, (run.model, 2, False), replace(plan, shares=()))
    _, apart, _ = differing(run, tmp_path, Layout(tensor=2))
    assert {f"{path}.down_proj_bias" for path in experts} <= apart.keys()


def test_a_fused_matrix_in_one_run_is_refused_by_name() -> None:
    """As a table AXES would name it."""
    model = build(family("phi3"))
    plan = cuts_of(model, 2)
    assert plan is not None and wrong_cuts(model, 2, plan.params) == []
    (said,) = wrong_cuts(model, 2, {name.replace("layers.1", "layers.0"): cut for name, cut in one_run(plan).params.items()})
    assert "model.layers.0.self_attn.qkv_proj.weight" in said and "but the module reads 48 + 24 + 24" in said
