"""Stages cut by what their blocks cost: by counting operations, or by timing them on this device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ranks import ALONE, tiny_run

from phalanx.models.init import build
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.executor import measure_seconds
from phalanx.schedules.makers import make
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Place, Plan
from phalanx.training.build import measured_costs, split_stages

MOE = ("model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=32", "model.moe.dense_layers=2", "model.layers=5")


def plan(layout: Layout) -> Plan:
    return Plan(
        layout=layout, device="cpu", threads=1, micro_batch=2, accumulation=4, compute="fp32", parameters=1, flops_per_token=1.0,
        peak_flops=None,
    )  # fmt: skip


def test_measured_stage_costs_time_blocks_on_the_device() -> None:
    run = tiny_run("model.layers=4")
    costs = measured_costs(run.model, 24, plan(Layout()), ALONE)
    assert len(costs.blocks) == 4 and min(costs.blocks) > 0


@pytest.mark.parametrize("kinds", [MOE, (*MOE, "model.moe.dense_layers=0"), (*MOE, "model.moe.dense_layers=5"), ()])
def test_measured_stage_costs_time_each_kind_of_block_once(kinds: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(*kinds)
    took = {"dense 0": 3.0, "dense 1": 1.0, "dense 2": 6.0, "sparse 0": 7.0, "sparse 1": 4.0, "sparse 2": 12.0}
    asked: list[str] = []

    def timed(tried: dict[str, object], mesh: Mesh) -> dict[str, float]:
        asked.extend(tried)
        return {name: took[name] for name in tried}

    monkeypatch.setattr("phalanx.training.build.measure_costs", timed)
    costs = measured_costs(run.model, 24, plan(Layout()), ALONE)
    dense, sparse = run.model.dense_layers, run.model.layers - run.model.dense_layers
    assert costs.blocks == (1.0,) * dense + (4.0,) * sparse
    assert costs.first == (2.0 if dense else 3.0) and costs.last == (8.0 if sparse else 5.0)
    assert len(asked) == 3 * (bool(dense) + bool(sparse))


def test_split_stages_gives_a_rank_the_blocks_of_its_stages() -> None:
    run = tiny_run("model.layers=5", "model.vocab=257")
    layout = Layout(data=1, pipeline=2, schedule="zbv")
    order = make("zbv", 2, 4)
    seen = []
    for rank in range(2):
        mesh = Mesh(Place(rank=rank, ranks=2), torch.device("cpu"), layout)
        for part in split_stages(build(run.model), run, plan(layout), mesh, order):
            seen.append((rank, part.is_first_stage, part.is_last_stage, list(part.blocks)))  # type: ignore[arg-type]
    assert [rank for rank, *_ in seen] == [0, 0, 1, 1]
    assert sorted(block for *_, blocks in seen for block in blocks) == list("01234")
    assert [(begins, ends) for _, begins, ends, _ in seen] == [(True, False), (False, True), (False, False), (False, False)]
    assert split_stages(model := build(run.model), run, plan(replace(layout, pipeline=1)), ALONE, None) == [model]


def test_stage_seconds_include_forward_and_backward() -> None:
    weight = torch.randn(300, 300, requires_grad=True)
    assert measure_seconds(lambda: weight @ weight, torch.device("cpu")) > 0
    assert weight.grad is not None
