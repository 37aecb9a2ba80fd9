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
from phalanx.parallel.pipeline.executor import Pipeline, PipelineObserver, RankAction, measure_costs
from phalanx.schedules.actions import Action
from phalanx.schedules.makers import make
from phalanx.schedules.timing import Durations, Timed, Timeline, bubble, simulate
from phalanx.spec.errors import RunFailed
from phalanx.spec.layout import Layout


class Clock:
    """A clock of its own for each rank. Work moves it on, and so does a message that was sent later than it shows."""

    def __init__(self) -> None:
        self.now = 0.0

    def work(self, units: float, message: Tensor | None = None) -> None:
        self.now = max(self.now, 0.0 if message is None else float(message[0, 1])) + units


class _Work(torch.autograd.Function):
    """Passes `x` on; forward and the gradient of `x` take that many units. The second column is the time of a message."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, units: float, clock: Clock) -> Tensor:
        ctx.units, ctx.clock = units, clock
        clock.work(units, x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.work(ctx.units, gradients[0])
        return gradients[0], None, None


class _WeightWork(torch.autograd.Function):
    """Passes the weight on; its gradient takes that many units."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, units: float, clock: Clock) -> Tensor:
        ctx.units, ctx.clock = units, clock
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.clock.work(ctx.units)
        return gradients[0], None, None


class Stage(nn.Module):
    """Forward, the gradient of its input and that of its weight take equally long."""

    def __init__(self, units: float, clock: Clock):
        super().__init__()
        self.units, self.clock, self.weight = units, clock, nn.Parameter(torch.eye(2))

    def forward(self, x: Tensor) -> Tensor:
        weight = _WeightWork.apply(self.weight, self.units, self.clock)
        return _Work.apply(x, self.units, self.clock) @ weight


class Trace(PipelineObserver):
    """When this rank ran which action, and what it sends, stamped with the time at which the action was over."""

    def __init__(self, stages: int, clock: Clock) -> None:
        self.clock, self.timed = clock, list[Timed]()
        self.durations = Durations(stages=(2 / stages,) * 4 * stages)

    def action(self, action: RankAction, run: Callable[[], Tensor | None]) -> Tensor | None:
        result = run()
        if result is not None:
            result.data[0, 1] = self.clock.now
        named = Action(action.kind, action.stage, action.micro_batch)
        self.timed.append(Timed(*named, self.clock.now - self.durations.of(named), self.clock.now))
        return result


def traced(mesh: Mesh, names: list[str], micro_batches: int) -> list[list[Timed]]:
    found = []
    for name in names:
        schedule = make(name, mesh.size("pipeline"), micro_batches)
        own, clock = schedule.stages_of(mesh.coordinate("pipeline")), Clock()
        parts = [Stage(2 / len(own), clock) for _ in own]  # the same model, in as many stages
        pipeline = Pipeline(parts, schedule, mesh)

        def forward(part: int, given: Tensor | None, m: int, parts: list[Stage] = parts) -> Tensor:
            return parts[part](torch.tensor([[1.0, 0.0]], requires_grad=True) if given is None else given)

        pipeline.observer = trace = Trace(len(own), clock)
        pipeline.run(micro_batches, forward, lambda y, m: y[:, 0].sum(), lambda m: ((1, 2), torch.float32), lambda part: None)
        found.append(trace.timed)
    return found


def test_an_executed_pipeline_idles_as_long_as_the_simulated_one() -> None:
    """By the messages that were really sent: an executor that waits for more than its schedule needs is later."""
    names = ["1f1b", "zbv", "dualpipev"]
    results = run_ranks(traced, 4, names, 8, layout=Layout(pipeline=4))
    timelines = [Timeline(tuple(tuple(rank[index]) for rank in results)) for index in range(len(names))]
    idle = {name: bubble(timeline) for name, timeline in zip(names, timelines, strict=True)}
    assert idle == pytest.approx({name: bubble(simulate(make(name, 4, 8))) for name in names})
    assert max(idle["zbv"], idle["dualpipev"]) < idle["1f1b"]


def test_a_stage_that_returns_another_shape_is_named() -> None:
    with pytest.raises(
        RunFailed, match=r"pipeline stage 0 returned \[1, 2\] of torch.float32, but the next rank expects \[1, 3\]"
    ):
        run_ranks(_misfit, 2, layout=Layout(pipeline=2))


def _misfit(mesh: Mesh) -> None:
    pipeline = Pipeline([Stage(0, Clock())], make("gpipe", 2, 1), mesh)

    def forward(part: int, given: Tensor | None, m: int) -> Tensor:
        return torch.ones(1, 2, requires_grad=True)

    pipeline.run(1, forward, lambda y, m: y.sum(), lambda m: ((1, 3), torch.float32), lambda part: None)


def test_costs_are_measured_and_shared() -> None:
    one, other = run_ranks(_measure, 2, layout=Layout(pipeline=2))
    assert one == other
    for costs in (one, _measure(ALONE)):
        assert costs["short"] >= SHORT and costs["long"] >= LONG, "a sleep never ends early"


SHORT, LONG = 0.001, 0.1


def _measure(mesh: Mesh) -> dict[str, float]:
    def sleep(seconds: float) -> Tensor:
        time.sleep(seconds)
        return torch.ones(1)

    return measure_costs({"short": lambda: sleep(SHORT), "long": lambda: sleep(LONG)}, mesh)
