"""The bubble of an executed pipeline against the simulated one; and what it says when something does not fit."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import ALONE, run_ranks
from torch import Tensor, nn

from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.executor import Pipeline, PipelineObserver, measure_costs
from phalanx.parallel.pipeline.rank_actions import RankAction
from phalanx.schedules.makers import make
from phalanx.schedules.timing import Timed, Timeline, bubble, simulate
from phalanx.spec.errors import RunFailed
from phalanx.spec.layout import Layout

UNIT = 0.008


class _Slow(torch.autograd.Function):
    """x · w that takes one unit of time; its backward another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, units: float) -> Tensor:
        ctx.units = units
        time.sleep(units * UNIT)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.units * UNIT)
        return gradients[0], None


class Stage(nn.Module):
    """Forward, the gradient of its input and that of its weight take equally long, however busy the machine is."""

    def __init__(self, units: float):
        super().__init__()
        self.units, self.weight = units, nn.Parameter(torch.eye(2))

    def forward(self, x: Tensor) -> Tensor:
        weight = _SlowGradient.apply(self.weight, self.units)
        return _Slow.apply(x, self.units) @ weight


class _SlowGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, units: float) -> Tensor:
        ctx.units = units
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.units * UNIT)
        return gradients[0], None


class Trace(PipelineObserver):
    """When this rank ran which action, on a clock that all processes of a machine share."""

    def __init__(self) -> None:
        self.timed: list[Timed] = []

    def action(self, action: RankAction, run: Callable[[], Tensor | None]) -> Tensor | None:
        start = time.perf_counter()
        result = run()
        self.timed.append(Timed(action.kind, action.stage, action.micro_batch, start, time.perf_counter()))
        return result


def traced(mesh: Mesh, names: list[str], micro_batches: int) -> list[list[Timed]]:
    found = []
    for name in names:
        schedule = make(name, mesh.size("pipeline"), micro_batches)
        own = schedule.stages_of(mesh.coordinate("pipeline"))
        parts = [Stage(2 / len(own)) for _ in own]  # the same model, in as many stages
        pipeline = Pipeline(parts, schedule, mesh)

        def forward(part: int, given: Tensor | None, m: int, parts: list[Stage] = parts) -> Tensor:
            return parts[part](torch.ones(1, 2) if given is None else given)

        mesh.barrier()
        pipeline.observer = trace = Trace()
        pipeline.run(micro_batches, forward, lambda y, m: y.sum(), lambda m: ((1, 2), torch.float32))
        found.append(trace.timed)
    return found


def test_split_schedules_wait_less_than_1f1b() -> None:
    names = ["1f1b", "zbv", "dualpipev"]
    results = run_ranks(traced, 4, names, 8, layout=Layout(pipeline=4))
    timelines = [Timeline(tuple(tuple(rank[index]) for rank in results)) for index in range(len(names))]
    idle = {name: bubble(timeline) for name, timeline in zip(names, timelines, strict=True)}
    for name in ("zbv", "dualpipev"):
        assert idle[name] < idle["1f1b"], idle
    # and it is about what the simulation says
    assert idle["1f1b"] == pytest.approx(bubble(simulate(make("1f1b", 4, 8))), abs=0.12)


def test_a_stage_that_returns_another_shape_is_named() -> None:
    with pytest.raises(
        RunFailed, match=r"pipeline stage 0 returned \[1, 2\] of torch.float32, but the next rank expects \[1, 3\]"
    ):
        run_ranks(_misfit, 2, layout=Layout(pipeline=2))


def _misfit(mesh: Mesh) -> None:
    pipeline = Pipeline([Stage(0)], make("gpipe", 2, 1), mesh)
    pipeline.run(
        1, lambda part, given, m: torch.ones(1, 2, requires_grad=True), lambda y, m: y.sum(), lambda m: ((1, 3), torch.float32)
    )


def test_costs_are_measured_and_shared() -> None:
    one, other = run_ranks(_measure, 2, layout=Layout(pipeline=2))
    assert one == other
    for costs in (one, _measure(ALONE)):
        assert 2 * UNIT < costs["block"] < costs["first"]


def _measure(mesh: Mesh) -> dict[str, float]:
    x = torch.ones(1, 2)
    kinds = {"first": Stage(3), "block": Stage(1), "last": Stage(0)}
    return measure_costs({name: lambda stage=stage: stage(x) for name, stage in kinds.items()}, mesh)
