"""The other way round: each answer is one that a search confirms, and the next better one is not."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from planning_cases import SMALL, SPARSE, cluster, run_of

from phalanx.planning.search.search import Limits, find
from phalanx.planning.solve import scaled, solve, what_if
from phalanx.spec.model import PRESETS

RUN = run_of("llama3-8b", 32, 4096)


def test_the_smallest_cluster_fits_and_half_of_it_does_not() -> None:
    answer = solve(RUN, cluster(64), "gpus")
    assert answer.plan.best.layout.ranks == answer.value
    assert str(answer.value) in answer.sentence
    assert answer.value == 1 or find(RUN, cluster(answer.value // 2), most=1) is None


def test_a_deadline_asks_for_more_devices() -> None:
    free = solve(RUN, cluster(64), "gpus")
    limit = free.plan.best.expected_days / 3
    hurried = solve(RUN, cluster(64), "gpus", Limits(deadline=limit))
    assert hurried.value > free.value
    assert hurried.plan.best.expected_days <= limit


def test_a_budget_may_ask_for_more_devices() -> None:
    """The smallest cluster that it fits on recomputes and offloads, which a larger one need not."""
    hardware = cluster(64, failures=None)
    smallest = solve(RUN, hardware, "gpus").plan.best
    dearest, roomy = smallest.price, find(RUN, cluster(4 * smallest.layout.ranks), most=1)
    assert roomy is not None and dearest is not None and roomy.best.price is not None and roomy.best.price < dearest
    limit = (dearest + roomy.best.price) / 2
    answer = solve(RUN, hardware, "gpus", Limits(budget=limit))
    assert answer.value > smallest.layout.ranks and answer.plan.best.price is not None and answer.plan.best.price <= limit


def test_the_largest_model_fits_and_a_tenth_more_does_not() -> None:
    hardware = cluster(4)
    answer = solve(RUN, hardware, "model")
    assert answer.value == answer.plan.run.model.parameters() > 8e9
    assert find(replace(RUN, model=scaled(answer.plan.run.model, 1.15)), hardware, most=1) is None
    sizes = {key: int(value) for key, value in re.findall(r"model\.(\w+) = (\d+)", answer.sentence)}
    assert replace(RUN.model, **sizes).parameters() == answer.value  # what one would type


def test_the_batch_that_pays_is_nearly_as_quick_as_any() -> None:
    answer = solve(run_of(SMALL, 64, 256), cluster(8), "batch")
    speeds = dict(answer.tried)
    assert speeds[answer.value] >= 0.97 * max(speeds.values())
    assert all(speed < 0.97 * max(speeds.values()) for size, speed in speeds.items() if size < answer.value)


def test_what_if_compares_twice_the_devices_and_half_the_network() -> None:
    found = {one.name: one for one in what_if(RUN, cluster(16))}
    assert set(found) == {"twice the devices", "half the devices", "half the network"}
    assert 1.0 < found["twice the devices"].faster <= 2.1
    assert 0.4 < found["half the devices"].faster < 1.0
    assert found["half the network"].faster <= 1.01
    assert all(one.sentence.endswith(".") for one in found.values())


@pytest.mark.parametrize("model", [SMALL, SPARSE, PRESETS["llama3-8b"], PRESETS["deepseek-v3"], PRESETS["qwen3-4b"]])
@pytest.mark.parametrize("factor", [0.3, 1.0, 2.5, 8.0])
def test_scaled_models_have_the_requested_parameters(model: object, factor: float) -> None:
    from phalanx.spec.model import ModelSpec

    assert isinstance(model, ModelSpec)
    grown = scaled(model, factor)
    assert grown.parameters() == pytest.approx(factor * model.parameters(), rel=0.2)
    assert grown.heads % grown.kv == 0
    assert grown.head == model.head
