"""Real processes of trials: all ranks take steps together, and what fails or hangs is ended with a reason."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from comparison.step_jobs import tiny_run

from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine
from phalanx.spec.run import Cluster, Run, Train
from phalanx.tuning.duel import WARM_UP, TrialFailed
from phalanx.tuning.trial_bench import ProcessBench
from phalanx.tuning.trial_run import Planner, Side, trial_run

MACHINE = Machine(host="h", cpu="a CPU", cores=2, memory=64 << 30, core_flops=1e11)
PATIENCE = 240.0


def side_of(**changes: object) -> Side:
    run: Run = tiny_run(
        train=Train(batch=4, sequence_length=32, steps=1), cluster=Cluster(device="cpu", threads=1), layout=Layout(data=1)
    )
    one, machine = trial_run(run, MACHINE)
    planner = Planner(machine)
    return planner.changed(planner.defaults(one), changes) if changes else planner.defaults(one)  # type: ignore[arg-type]


def trials() -> list[psutil.Process]:
    """Live processes of trials below this one."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.status() != psutil.STATUS_ZOMBIE and "trial_process" in str(child.cmdline())]


def test_other_layouts_and_micro_batches_have_the_same_losses(tmp_path: Path) -> None:
    bench = ProcessBench(tmp_path)
    one = bench.start(side_of(), PATIENCE)
    two = bench.start(side_of(**{"layout": Layout(data=2), "train.micro_batch": 1}), PATIENCE)
    try:
        assert len(one.losses) == WARM_UP and len(set(one.losses)) == WARM_UP
        assert two.losses == pytest.approx(one.losses, rel=1e-5)
        assert len(trials()) == 3, "two ranks and one"
        for live in (two, one):
            seconds = live.take(3, PATIENCE)
            assert len(seconds) == 3 and all(second > 0 for second in seconds)
            assert math.isfinite(live.step_seconds) and 0 <= live.warm_seconds <= live.start_seconds < PATIENCE
            assert live.loading is not None and 0 <= live.loading < 1
    finally:
        one.close()
        two.close()
    assert not trials()


def test_a_rank_that_fails_is_a_reason(tmp_path: Path) -> None:
    """Here it has too little text."""
    side = side_of(**{"layout": Layout(data=2), "train.micro_batch": 1})
    broken = replace(side, run=replace(side.run, data=replace(side.run.data, documents=("short", "text"))))
    with pytest.raises(TrialFailed) as failed:
        ProcessBench(tmp_path).start(broken, PATIENCE)
    assert failed.value.reason and not failed.value.timed_out and not trials()


def test_what_does_not_answer_in_time_is_ended(tmp_path: Path) -> None:
    with pytest.raises(TrialFailed, match="no answer within 0 s") as failed:
        ProcessBench(tmp_path).start(side_of(), 0.1)
    assert failed.value.timed_out and not trials()
