"""Plans for the XLA engine: TPU clusters of the catalogue as targets, layouts that the engine computes, and bytes against compiled programs."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning_cases import cluster
from xla_engine import needs_xla, plan_of, small_run

from phalanx.planning import planner
from phalanx.planning.request import PlanRequest
from phalanx.planning.search.search import judge
from phalanx.planning.search.space import all_columns, layout_of, space
from phalanx.rehearsal.compiled_rehearsal import rehearse_compiled
from phalanx.rehearsal.fake_gpu import RehearsalDevice
from phalanx.rehearsal.rehearse import Job
from phalanx.spec.check import check
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Run

TEXT = """
[model]
preset = "llama3-8b"
[train]
batch = 256
sequence_length = 4096
steps = 100
[cluster]
name = "tpu-v5e-256"
"""


def test_a_tpu_cluster_is_planned_for_the_xla_engine() -> None:
    report = planner.plan(PlanRequest(loads(TEXT)))
    best = report.best
    assert report.run.engine.name == best.engine == "xla" and best.layout.ranks == 256 and best.fits
    chosen = loads(TEXT, overrides=_keys(best.layout))
    assert not check(replace(chosen, engine=report.run.engine))
    assert '[engine]\nname = "xla"' in report.to_json()["best"]["toml"] and "offload" not in report.to_json()["best"]["toml"]
    assert any("not measured" in sentence for sentence in report.assumptions)
    layouts = [other.layout for other in (best, *report.runners_up)]
    assert all(layout.pipeline == layout.expert == 1 for layout in layouts)


def _keys(layout: Layout) -> list[str]:
    names = ("data", "shard", "tensor", "context", "zero", "context_method")
    return [f"layout.{name}={getattr(layout, name)}" for name in names] + [f"layout.sequence={str(layout.sequence).lower()}"]


def test_what_the_engine_lacks_is_refused_for_a_tpu_cluster_by_name() -> None:
    with pytest.raises(RunError) as refused:
        PlanRequest(loads(TEXT, overrides=["layout.pipeline=2", "lora.rank=2"]))
    problems = refused.value.problems
    assert all('has TPUs, which only engine.name = "xla"' in problem for problem in problems)
    assert any("layout.pipeline = 2" in problem for problem in problems) and any("lora.rank" in problem for problem in problems)


@pytest.mark.parametrize("gpu", ["h100-sxm", "tpu-v5p"])
def test_every_layout_of_the_search_is_one_that_the_engine_computes(gpu: str) -> None:
    run = small_run(Layout(), 1, model=MODEL)
    here = space(
        replace(run, train=replace(run.train, micro_batch=None)), cluster(16, gpu, device="tpu" if "tpu" in gpu else "cuda")
    )
    columns = all_columns(here)
    count = len(columns["pipeline"])
    jobs = here.jobs(columns)
    layouts = {layout_of(run, jobs, row) for row in range(count)}
    assert len(layouts) > 20 and {layout.pipeline for layout in layouts} == {1}
    assert {layout.context_method for layout in layouts if layout.context > 1} == {"gather", "ring"}
    for layout in layouts:
        assert not check(replace(run, layout=layout)), layout


MODEL = ModelSpec(dim=128, layers=2, heads=8, kv_heads=4, ffn=384, vocab=1024, context=256)
LAYOUTS = {
    "replica": Layout(data=1),
    "shard": Layout(data=1, shard=4),
    "grid": Layout(data=2, shard=2, tensor=2),
}


def planned_bytes(run: Run) -> dict[str, float]:
    layout = run.layout
    return judge(run, cluster(layout.ranks, "cpu-core", device="cpu", family="cpu")).memory


@needs_xla
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_planned_bytes_are_those_of_the_compiled_program(layout: Layout) -> None:
    """In fp32, which the compiler for CPUs computes as any other. The state is exact but for norms that are divided otherwise."""
    run = small_run(layout, 1, model=MODEL)
    run = replace(run, train=replace(run.train, sequence_length=256))
    compiled = rehearse_compiled(Job(run, plan_of(run), RehearsalDevice(card=None))).components
    planned = planned_bytes(run)
    assert planned["parameters"] == pytest.approx(compiled["parameters"], rel=0.02)
    assert planned["optimizer"] == pytest.approx(compiled["optimizer"], rel=0.02)
    assert sum(planned.values()) == pytest.approx(sum(compiled.values()), rel=0.2)
