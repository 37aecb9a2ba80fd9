"""The closed form against a Monte Carlo, a search over intervals, and a published run."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from phalanx.planning.cost.run_cost import best_interval, failure_assumptions, goodput, upkeep
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.hardware import hardware
from phalanx.spec.load import loads

LLAMA = 54 * 86400 / 419
"""Seconds between unexpected interruptions of 16,384 H100."""


def cluster(name: str) -> Hardware:
    return hardware(loads(f'[train]\nbatch = 8\nsteps = 2\n[cluster]\nname = "{name}"\n'), None)


def played(interval: float, mtbf: float, save: float, restart: float) -> float:
    """Many segments, each tried until no failure strikes before its save is done, each failure followed by restarts until one holds."""
    dice = np.random.default_rng(0)
    segments, spent = 100_000, 0.0
    left = segments
    while left:
        until = dice.exponential(mtbf, left)
        failed = until < interval + save
        spent += np.where(failed, until, interval + save).sum()
        left = int(failed.sum())
        waiting = left
        while waiting:  # a restart that is struck begins again
            until = dice.exponential(mtbf, waiting)
            again = until < restart
            spent += np.where(again, until, restart).sum()
            waiting = int(again.sum())
    return segments * interval / spent


@pytest.mark.parametrize(
    ("interval", "mtbf", "save", "restart"),
    [(330.0, LLAMA, 5.0, 600.0), (1800.0, LLAMA, 5.0, 600.0), (60.0, 1800.0, 2.0, 120.0), (3600.0, 7200.0, 60.0, 300.0)],
)
def test_goodput_equals_monte_carlo(interval: float, mtbf: float, save: float, restart: float) -> None:
    assert goodput(interval, mtbf, save, restart) == pytest.approx(played(interval, mtbf, save, restart), abs=0.005)


@pytest.mark.parametrize(("mtbf", "save"), [(LLAMA, 5.0), (LLAMA, 0.05), (1800.0, 30.0), (600.0, 120.0)])
def test_best_checkpoint_interval_is_best(mtbf: float, save: float) -> None:
    tried = np.geomspace(save / 100, 10 * mtbf, 20_000)
    most = max(goodput(interval, mtbf, save, 60.0) for interval in tried)
    assert goodput(best_interval(mtbf, save), mtbf, save, 60.0) == pytest.approx(most, abs=0.0005)


def test_goodput_of_llama_3() -> None:
    every = best_interval(LLAMA, 5.0)
    assert 3.085 < LLAMA / 3600 < 3.095
    assert every == pytest.approx(328, rel=0.01)
    assert goodput(every, LLAMA, 5.0, 600.0) == pytest.approx(0.92, abs=0.005)
    assert goodput(1800.0, LLAMA, 5.0, 600.0) == pytest.approx(0.87, abs=0.005)


def test_goodput_where_saves_never_finish() -> None:
    assert best_interval(100.0, 500.0) == 100.0


def test_our_runtime_on_the_machines_of_llama_3() -> None:
    made = cluster("h100-16384")
    kept = upkeep(made, state=12 * 405e9 / 16384, ranks=16384, step=4.5)
    assert kept.mtbf == pytest.approx(LLAMA) and kept.in_memory
    assert kept.save_every is not None and kept.save_every >= 4.5 and kept.goodput > 0.95
    large = upkeep(made, state=300e9, ranks=16384, step=4.5)  # more than two nodes' memory holds
    assert not large.in_memory and large.goodput < kept.goodput
    assert large.save_every is not None and large.save_every >= 300e9 * 8 / made.storage  # not before the last one is written


def test_upkeep_of_a_run_that_saves_nothing() -> None:
    made = cluster("h100-16384")
    kept, state = upkeep(made, state=4e9, ranks=16384, step=4.5, unsaved=1e6), upkeep(made, state=4e9, ranks=16384, step=4.5)
    assert kept.save_every is None and kept.goodput == state.goodput, "copies in memory are as before"
    large = upkeep(made, state=300e9, ranks=16384, step=4.5, unsaved=LLAMA)
    assert not large.in_memory and large.save_every is None
    # Failures at random send a run of one mean time between failures back to its beginning: e - 1 times that time, and the restarts.
    assert large.goodput == pytest.approx(1 / ((math.e - 1) * math.exp(large.restart / LLAMA)), rel=1e-6)
    assert large.restart < upkeep(made, state=300e9, ranks=16384, step=4.5).restart, "nothing is read from storage"
    assert "else nowhere" in failure_assumptions(made, saves=False)[1]


def test_goodput_is_one_without_failure_rates() -> None:
    sturdy = replace(cluster("h100-8"), failures=None)
    kept = upkeep(sturdy, state=1e9, ranks=8, step=1.0)
    assert kept.goodput == 1.0 and kept.save_every is None
    assert failure_assumptions(sturdy) == ["Nothing fails: no rates are known for these machines."]
    assert "once in 2,112 days" in failure_assumptions(cluster("h100-16384"))[0]
