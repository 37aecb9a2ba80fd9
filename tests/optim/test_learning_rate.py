from __future__ import annotations

import itertools
import math

import pytest

from phalanx.optim.optimizer import learning_rate
from phalanx.spec.run import Optimizer


def rates(steps: int, **values: object) -> list[float]:
    optimizer = Optimizer(learning_rate=2.0, **values)  # type: ignore[arg-type]
    return [learning_rate(optimizer, step, steps) for step in range(steps)]


def test_cosine_decays_along_a_half_wave_to_its_final_part() -> None:
    got = rates(100, schedule="cosine", final_fraction=0.1)
    assert got == pytest.approx([0.2 + 1.8 * (1 + math.cos(math.pi * step / 100)) / 2 for step in range(100)])
    assert got[0] == 2.0
    assert got[50] == pytest.approx((2.0 + 0.2) / 2)


def test_linear_decays_in_equal_steps() -> None:
    got = rates(50, schedule="linear", final_fraction=0.0)
    assert got == pytest.approx([2.0 * (50 - step) / 50 for step in range(50)])


def test_constant_schedule_keeps_the_learning_rate() -> None:
    assert rates(10, schedule="constant", final_fraction=0.3) == [2.0] * 10


def test_wsd_is_stable_until_its_last_steps() -> None:
    got = rates(100, schedule="wsd", warmup_steps=10, decay_steps=25, final_fraction=0.2)
    assert got[:10] == pytest.approx([2.0 * (step + 1) / 10 for step in range(10)])
    assert got[10:76] == [2.0] * 66
    assert got[76:] == pytest.approx([0.4 + 1.6 * (1 - done / 25) for done in range(1, 25)])


def test_wsd_decays_over_a_fifth_unless_told_otherwise() -> None:
    got = rates(100, schedule="wsd", final_fraction=0.0)
    assert got[80] == 2.0
    assert got[81:] == pytest.approx([2.0 * (1 - done / 20) for done in range(1, 20)])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_the_warm_up_grows_evenly_to_the_top_and_the_schedule_follows_without_a_jump(schedule: str) -> None:
    got = rates(60, schedule=schedule, warmup_steps=12)
    assert got[:12] == pytest.approx([2.0 * (step + 1) / 12 for step in range(12)])
    assert got[11] == got[12] == 2.0
    assert all(later <= earlier for earlier, later in itertools.pairwise(got[11:]))


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_the_end_of_the_run_meets_the_final_part(schedule: str) -> None:
    optimizer = Optimizer(learning_rate=2.0, schedule=schedule, warmup_steps=5, final_fraction=0.25)  # type: ignore[arg-type]
    end = 2.0 if schedule == "constant" else 0.5
    assert learning_rate(optimizer, 40, 40) == pytest.approx(end)
    assert learning_rate(optimizer, 1000, 40) == pytest.approx(end)  # and stays there


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_a_run_shorter_than_its_warm_up_only_grows(schedule: str) -> None:
    assert rates(5, schedule=schedule, warmup_steps=100) == pytest.approx([2.0 * (step + 1) / 100 for step in range(5)])


def test_wsd_after_a_long_warm_up_has_only_what_is_left_to_decay_in() -> None:
    got = rates(100, schedule="wsd", warmup_steps=90, final_fraction=0.0)
    assert got[90] == 2.0
    assert got[91:] == pytest.approx([2.0 * (1 - done / 10) for done in range(1, 10)])
