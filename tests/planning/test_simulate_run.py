"""Simulated runs against the closed form, and the live policy asked for all nodes alike against each by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest

from phalanx.planning.cost.run_cost import best_interval, goodput
from phalanx.planning.machines.cluster import Failures
from phalanx.planning.simulate.simulated_policy import DecisionCache, detection_seconds, fault_kind
from phalanx.planning.simulate.simulated_run import SaveSchedule, Scenario, Trial, run_trial
from phalanx.spec.layout import Layout
from phalanx.spec.run import Resilience

DAY = 86400.0
LLAMA = 419 / (54 * 24 * 16384)
"""Interruptions of a device-hour: 419 in 54 days on 16,384 GPUs."""
PARTS = (("gpu", 0.587), ("software", 0.129), ("switch", 0.084), ("host", 0.186), ("corruption", 0.014))
AT_ONCE = Resilience(restarts=10**6, heartbeat=1e-6, hang=1e-6)
"""Failures are noticed at once, so that what the closed form calls a restart is `Scenario.restart` alone."""


def rates(of_device_hour: float) -> Failures:
    return Failures(rates=tuple((name, part * of_device_hour) for name, part in PARTS), source="a test")


def world(layout: Layout, spares: int, settings: Resilience = AT_ONCE, batch: int = 2048, **changed: Any) -> Scenario:
    """Steps of 4 s on all ranks, copies in memory every 328 s, nodes of 8 devices; layouts that divide the batch are legal."""
    cache = DecisionCache(
        layout,
        8,
        lambda one: batch % one.replicas == 0 and one.tensor == layout.tensor and one.pipeline == layout.pipeline,
        settings,
        batch,
    )
    made = Scenario(
        cache=cache,
        nodes=-(-layout.ranks // 8) + spares,
        failures=rates(LLAMA),
        step=lambda one: 4.0 * layout.ranks / one.ranks,
        saves=SaveSchedule(keep="memory", memory_every=82, memory_stall=5.0, disk_every=None, disk_stall=0.0),
        restart=600.0,
        repair=4 * 3600.0,
        relaunch=1800.0,
        horizon=54 * DAY,
        steps=10**9,
    )
    return replace(made, **changed)


LLAMA3 = Layout(pipeline=16, data=1, shard=128, tensor=8, zero=1)


def adds_up(trial: Trial) -> None:
    assert sum(trial.spent.values()) == pytest.approx(trial.seconds, rel=1e-9)
    assert trial.spans[0].start == 0.0 and trial.spans[-1].stop == pytest.approx(trial.seconds)
    assert all(a.stop == pytest.approx(b.start) for a, b in pairwise(trial.spans))


@pytest.mark.parametrize("layout_of", [1, 16])
def test_goodput_is_the_closed_forms(layout_of: int) -> None:
    """Exponential failures, a fixed restart, spares enough: within half a point, at several intervals; the best one is the best."""
    layout = replace(LLAMA3, pipeline=16 // layout_of)  # a smaller cluster of worse machines is the same to the closed form
    mtbf = 54 * DAY / 419
    here = world(layout, spares=40, failures=rates(LLAMA * 16384 / layout.ranks))
    found = {}
    for every, stall in ((82, 5.0), (450, 5.0), (82, 60.0)):
        saves = SaveSchedule(keep="memory", memory_every=every, memory_stall=stall, disk_every=every, disk_stall=0.0)
        trials = [run_trial(replace(here, saves=saves), 1, number) for number in range(8)]
        found[every, stall] = fmean(trial.goodput for trial in trials)
        assert found[every, stall] == pytest.approx(goodput(4.0 * every, mtbf, stall, 600.0), abs=0.005)
        adds_up(trials[0])
        assert not trials[0].actions["shrink"]
    assert best_interval(mtbf, 5.0) == pytest.approx(330, abs=1)
    assert found[82, 5.0] > found[450, 5.0]
    assert found[82, 5.0] > 0.90  # Llama 3's failures, saved in memory


def test_nothing_fails_and_nothing_is_lost() -> None:
    saves = SaveSchedule(keep="memory", memory_every=10, memory_stall=0.5, disk_every=100, disk_stall=2.0)
    trial = run_trial(world(LLAMA3, 0, failures=None, saves=saves, steps=1000), 0)
    assert trial.finished and trial.steps == 1000
    assert trial.seconds == pytest.approx(1000 * 4.0 + 100 * 0.5 + 10 * 2.0)
    assert trial.spent["computing"] == pytest.approx(4000.0) and trial.goodput == pytest.approx(4000 / 4070)
    adds_up(trial)


def test_the_last_step_is_taken_once() -> None:
    """Moments far from the beginning are rounded: a step that ends at one of them is done, and not begun again and again."""
    for number in range(8):
        here = world(
            Layout(data=8, tensor=8),
            20,
            steps=900_000 + number,
            horizon=100 * DAY,
            step=lambda one: 3.5786513710138 * 64 / one.ranks,
        )
        trial = run_trial(here, number)
        assert trial.finished and trial.spent["lost"] < 400 * trial.components.total() + 1.0


def test_months_of_a_large_cluster_need_few_decisions_of_the_live_policy() -> None:
    scenario = world(LLAMA3, 16)
    trial = run_trial(scenario, 0)
    assert scenario.cache.decided <= 10, "equal situations are decided once"
    assert 300 < trial.components.total() < 550 and len(trial.marks) == trial.components.total()


@pytest.mark.parametrize(
    "settings", [AT_ONCE, replace(AT_ONCE, shrink=False), replace(AT_ONCE, continue_degraded=True)], ids=["", "wait", "go_on"]
)
def test_equal_nodes_are_taken_for_each_other_without_harm(settings: Resilience) -> None:
    """On a small cluster every decision is also made about the very node and rank that were struck."""

    def played(merge: bool, spares: int) -> tuple[list[Trial], int]:
        here = world(Layout(pipeline=2, data=4, tensor=8), spares, settings, batch=24, failures=rates(1e-3), horizon=10 * DAY)
        if not settings.shrink:  # while a run waits, only the numbers of lost nodes differ, and by them who had whose copies
            here = replace(here, saves=replace(here.saves, keep="replicas"))
        here.cache.merge_equal_nodes = merge
        return [run_trial(here, 3, number) for number in range(4)], here.cache.decided

    for spares in (0, 2):
        merged, few = played(True, spares)
        alone, many = played(False, spares)
        assert [(one.steps, one.actions, one.marks) for one in merged] == [(one.steps, one.actions, one.marks) for one in alone]
        assert few < many and sum(one.components.total() for one in merged) > 40
        for trial in merged:
            adds_up(trial)


def test_without_spares_the_run_shrinks_and_grows_back() -> None:
    settings = replace(AT_ONCE, node_return=7200.0)
    here = world(Layout(data=8, tensor=8), 0, settings, batch=840, failures=Failures(rates=(("gpu", 2e-4),), source="a test"))
    trial = run_trial(here, 0)
    adds_up(trial)
    assert trial.actions["shrink"] > 20 and trial.actions["grow"] > 20
    # Two hours on 7 of 8 nodes: an eighth more for each step.
    assert trial.spent["slower"] > 0
    assert {span.devices for span in trial.spans if span.state == "slower"} <= {56, 48, 40, 32, 24}
    waiting = run_trial(replace(here, cache=world(Layout(data=8, tensor=8), 0, replace(settings, shrink=False)).cache), 0)
    adds_up(waiting)
    assert waiting.actions["wait"] > 20 and waiting.spent["waiting"] > 0 == waiting.spent["slower"]
    assert waiting.goodput < trial.goodput


def test_what_is_lost_depends_on_where_the_state_is() -> None:
    """With other ranks: the step under way. In memory: at most an interval. On disk: the same interval, if it is written."""
    layout = Layout(data=8, tensor=8)
    saves = SaveSchedule(keep="replicas", memory_every=None, memory_stall=0.0, disk_every=450, disk_stall=0.0, disk_write=900.0)
    lost = {}
    for keep in ("replicas", "memory", "disk"):
        every = 82 if keep == "memory" else None
        here = world(layout, 20, failures=rates(1e-3), saves=replace(saves, keep=keep, memory_every=every))
        trials = [run_trial(here, 5, number) for number in range(6)]
        lost[keep] = sum(trial.spent["lost"] for trial in trials) / sum(trial.components.total() for trial in trials)
    assert lost["replicas"] < 4.0 < lost["memory"] < 82 * 4.0 < 450 * 2.0 < lost["disk"]


def test_a_run_that_gives_up_is_started_by_somebody() -> None:
    """A failure in about 14 steps: 31 of them lie within 1,000."""
    settings = replace(AT_ONCE, restarts=30)
    saves = SaveSchedule(keep="memory", memory_every=1, memory_stall=0.0, disk_every=1, disk_stall=0.0)
    trial = run_trial(world(LLAMA3, 400, settings, saves=saves, failures=rates(LLAMA * 200), restart=1.0, horizon=DAY), 0)
    adds_up(trial)
    assert trial.components.total() > 600
    assert trial.actions["end"] == trial.components.total() // 31
    assert trial.spent["waiting"] == pytest.approx(1800.0 * trial.actions["end"], rel=0.05)


@pytest.mark.parametrize("keep", ["memory", "disk"])
def test_months_of_failures_are_no_reason_to_give_up(keep: Any) -> None:
    """Llama 3's 419 of 54 days, and more than twice as many: each of them is got over."""
    saves = SaveSchedule(keep=keep, memory_every=82, memory_stall=5.0, disk_every=82, disk_stall=0.0)
    for worse in (1, 2.5):
        here = world(LLAMA3, 40, replace(AT_ONCE, restarts=Resilience().restarts), saves=saves, failures=rates(LLAMA * worse))
        trial = run_trial(here, 0)
        assert trial.components.total() > 300 * worse and not trial.actions["end"]


def test_planned_pauses_lose_nothing() -> None:
    trial = run_trial(world(LLAMA3, 0, failures=None, maintenance=(7 * DAY, 3600.0)), 0)
    adds_up(trial)
    assert trial.actions["maintenance"] == 7 and trial.spent["maintenance"] == pytest.approx(7 * 3600.0)
    assert trial.spent["restart"] == pytest.approx(7 * 600.0)
    assert trial.spent["lost"] < 4.0 + 5.0  # the step that the horizon cuts


def test_a_cluster_that_fails_faster_than_it_starts_gets_nowhere() -> None:
    trial = run_trial(world(LLAMA3, 4000, failures=rates(LLAMA * 200), horizon=DAY / 4), 0)
    adds_up(trial)
    assert trial.goodput < 0.02 and trial.components.total() > 250


def test_components_are_told_by_their_names() -> None:
    kinds = {
        "gpu": "node",
        "memory": "node",
        "nic": "node",
        "gpu-processor": "node",
        "software": "worker",
        "switch": "connection",
    }
    assert {name: fault_kind(name) for name in kinds} == kinds and fault_kind("corruption") == "corrupt"
    settings = Resilience(heartbeat=2.5, hang=5.0)
    found: Callable[[Any], float] = lambda kind: detection_seconds(kind, settings, 4.0)  # noqa: E731
    assert found("node") == 2.5 and found("connection") == 32.0 and found("worker") < 1.0
