"""What a simulation answers, with the catalogue's clusters and the plan's own judgement of layouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from phalanx.planning.cost.run_cost import goodput
from phalanx.planning.machines.hardware import hardware
from phalanx.planning.search.search import judge
from phalanx.planning.simulate.simulated_step import simulate_candidate, tiers
from phalanx.planning.simulate.simulation import SimulationReport, SimulationRequest, simulate
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import PRESETS, ModelSpec
from phalanx.spec.run import Checkpoint, Cluster, Resilience, Run, Train

SMALL = ModelSpec(dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=256, context=4096)
"""With hardly any head, so that all stages are alike."""
LLAMA3 = Run(
    model=PRESETS["llama3-405b"],
    train=Train(batch=2048, sequence_length=8192, micro_batch=1, tokens=15_600_000_000_000),
    layout=Layout(pipeline=16, data=1, shard=128, tensor=8, zero=1, sequence=True, schedule="interleaved-1f1b", stages=4),
    cluster=Cluster(name="h100-16384"),
    resilience=Resilience(spares=16),
)


def small(**changed: Any) -> Run:
    run = Run(
        model=SMALL,
        train=Train(batch=256, sequence_length=4096, steps=50_000_000, micro_batch=1),
        layout=Layout(pipeline=4, data=8, tensor=8),
        cluster=Cluster(name="h100-1024", gpus=256),
    )
    return replace(run, **changed)


def answered(run: Run, **asked: Any) -> SimulationReport:
    machines = hardware(run, None)
    return simulate(run, machines, judge(run, machines), SimulationRequest(**asked))


def test_llama_3_with_its_published_failures() -> None:
    """419 unexpected interruptions in 54 days on 16,384 GPUs, saved in memory: above 90 % even with ten minutes for each restart."""
    found = answered(LLAMA3, days=54.0, runs=6, study=False, keep="memory", restart=600.0, stall=5.0, interval=328.0)
    assert found.decisions <= 10, "equal situations are decided once"
    assert sum(found.failures.values()) == pytest.approx(419, rel=0.08)  # spare nodes are few
    assert found.goodput.low > 0.90 and "end" not in found.actions  # 100 failures are no reason to give up a run that gets on
    assert found.goodput.mean == pytest.approx(found.closed, abs=0.01)
    assert found.mtbf_seconds is not None
    assert found.closed == pytest.approx(float(goodput(328.0, found.mtbf_seconds, 5.0, 603.0)), abs=0.002)
    assert found.best_interval_seconds == pytest.approx(330, abs=2) and found.keep == "memory" and found.spares == 16
    assert sum(found.spent.values()) == pytest.approx(1.0)
    # Phalanx's own recovery takes less than that.
    own = answered(LLAMA3, days=54.0, runs=3, study=False)
    assert own.keep == "memory" and own.goodput.low > 0.97 and own.goodput.mean == pytest.approx(own.closed, abs=0.01)
    assert own.goodput.mean == pytest.approx(own.candidate.goodput, abs=0.01)  # what the plan promises


def test_spares_pay_until_there_are_enough() -> None:
    found = answered(small(layout=Layout(data=1, shard=32, tensor=8)), days=200.0, runs=4, repair=12 * 3600.0)
    tried = {int(one.value): one for one in found.spare_nodes}
    assert set(tried) == {0, 1, 2, 4, 8, 16} and found.spares == 0
    assert tried[0].goodput < tried[2].goodput + 1e-3 and tried[2].goodput == pytest.approx(tried[16].goodput, abs=0.01)
    assert found.pays is not None and found.pays <= 4 and tried[found.pays].cost == min(one.cost for one in tried.values())
    assert tried[16].cost == pytest.approx(48 * 8 * tried[16].days * 24 * (hardware(small(), None).price or 0.0))


def test_the_best_interval_is_near_the_closed_forms() -> None:
    run = small(checkpoint=Checkpoint(every=100), resilience=Resilience(spares=8))
    machines = hardware(run, None)
    assert machines.failures is not None
    worse = replace(
        machines, failures=replace(machines.failures, rates=tuple((name, 200 * rate) for name, rate in machines.failures.rates))
    )
    found = simulate(run, worse, judge(run, worse), SimulationRequest(days=8.0, runs=6, keep="disk", stall=20.0, restart=120.0))
    assert found.best_interval_seconds is not None and found.interval_seconds == pytest.approx(100 * found.candidate.seconds)
    best = max(found.intervals, key=lambda one: one.goodput)
    assert 0.4 * found.best_interval_seconds < best.value < 2.6 * found.best_interval_seconds
    for one in found.intervals:
        assert one.closed is not None and one.goodput == pytest.approx(one.closed, abs=0.01)


def test_replicas_need_no_saves_and_a_machine_that_never_fails_no_luck() -> None:
    found = answered(small(resilience=Resilience(spares=4)), runs=3)
    assert found.keep == "replicas" and found.interval_seconds is None and not found.intervals
    assert found.goodput.mean == pytest.approx(found.closed, abs=0.01)
    assert found.finish_days.low <= found.finish_days.mean <= found.finish_days.high
    assert found.finish_days.mean == pytest.approx(found.candidate.days / found.goodput.mean, rel=0.01)
    run = small()
    calm = replace(hardware(run, None), failures=None)
    quiet = simulate(run, calm, judge(run, calm), SimulationRequest(runs=2))
    assert quiet.goodput.mean == quiet.closed == pytest.approx(1.0) and quiet.finish_days.mean == pytest.approx(
        quiet.candidate.days
    )
    assert quiet.mtbf_seconds is None and not quiet.failures and not quiet.spare_nodes


def test_a_run_that_saves_nothing_starts_again_where_memory_loses_its_state() -> None:
    """One node, whose loss takes the copies in its memory with it; and states that have no room there."""
    alone = small(
        layout=Layout(data=1, shard=8),
        cluster=Cluster(name="h100-8"),
        train=Train(batch=256, sequence_length=4096, steps=20_000),
    )
    machines = hardware(alone, None)
    assert machines.failures is not None
    often = tuple((name, 100 * rate) for name, rate in machines.failures.rates)
    worse = replace(machines, failures=replace(machines.failures, rates=often))

    def found(run: Run, **asked: Any) -> SimulationReport:
        return simulate(run, worse, judge(run, worse), SimulationRequest(runs=200, study=False, **asked))

    unsaved = replace(alone, checkpoint=Checkpoint(save=False))
    saved, lost = found(alone), found(unsaved)
    assert (saved.keep, lost.keep, lost.interval_seconds, lost.best_interval_seconds) == ("disk", "none", None, None)
    copied = found(replace(alone, checkpoint=Checkpoint(save=False, memory_every=10)))
    assert copied.keep == "memory" and lost.spent["saving"] == 0
    assert lost.goodput.mean < copied.goodput.mean < saved.goodput.mean
    for one in (lost, copied):  # the closed form has nodes enough, and nobody waits
        assert one.spent["computing"] / (1 - one.spent["waiting"]) == pytest.approx(one.closed, abs=0.03)
    paused = found(unsaved, maintenance=(86400.0, 60.0), days=4.0)
    assert paused.actions["maintenance"] >= 1 and paused.trial.steps < 20_000
    with pytest.raises(RunError, match=r"--keep disk: nothing is saved there, as checkpoint.save = false"):
        found(unsaved, keep="disk")
    with pytest.raises(RunError, match=r"--interval 60 s: there are no saves, as checkpoint.save = false"):
        found(unsaved, interval=60.0)


def test_what_cannot_be_simulated_is_refused() -> None:
    run = small()
    machines = hardware(run, None)
    option = judge(run, machines)
    with pytest.raises(RunError, match=r"--days -1\.0: give a number above 0"):
        simulate(run, machines, option, SimulationRequest(days=-1.0))
    with pytest.raises(RunError, match="The layout has 256 ranks but the cluster has 128 devices"):
        simulate(run, replace(machines, gpus=128), option, SimulationRequest())


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("gpipe", None),
        ("1f1b", None),
        ("interleaved-1f1b", 2),
        ("looped-bfs", 2),
        ("interleaved-zero-bubble", 2),
        ("zbv", None),
        ("dualpipev", None),
    ],
)
def test_a_simulated_step_is_the_plans(name: Any, stages: int | None) -> None:
    """All but the messages between stages, which the plan counts and the simulation lets overlap and contend."""
    for pipeline, data in ((4, 8), (8, 8), (2, 16)):
        run = small(layout=Layout(pipeline=pipeline, data=data, tensor=256 // pipeline // data, schedule=name, stages=stages))
        machines = hardware(run, None)
        option = judge(run, machines)
        step = simulate_candidate(run, machines, option)
        assert sum(step.split.values()) == pytest.approx(step.seconds)
        own = step.seconds - step.split["pipeline"] - step.split["contention"]
        assert own == pytest.approx(option.seconds - option.split["pipeline"], rel=0.01)
        assert step.split["bubble"] == pytest.approx(option.split["bubble"], rel=0.15)
        assert step.seconds == pytest.approx(option.seconds, rel=0.05)


def test_links_are_those_that_a_group_spans() -> None:
    machines = hardware(small(), None)
    on = tiers(Layout(pipeline=2, data=2, shard=4, context=2, tensor=4, expert=8), machines)
    assert on == {
        "tensor": "island",
        "context": "island",
        "expert": "island",
        "shard": "network",
        "data": "network",
        "pipeline": "network",
    }
