from __future__ import annotations

import random
from statistics import median

import pytest

from phalanx.events.heartbeat import Beat
from phalanx.recovery.stragglers import ProgressTimeouts, Stragglers, _median_of_others


def _steps(usual: ProgressTimeouts, seconds: list[float], rank: int = 0, first: int = 0) -> None:
    usual.observe(rank, Beat(steps_taken=first, phase="between"))
    for taken, took in enumerate(seconds, first + 1):
        usual.observe(rank, Beat(steps_taken=taken, phase="computing", step_seconds=took))


def test_before_the_first_step_of_a_generation_there_is_time_to_compile() -> None:
    usual = ProgressTimeouts(timeout=600)
    assert usual.timeout("computing", 5) == 600
    _steps(usual, [0.1] * 3)
    assert usual.timeout("computing", 5) == 5
    usual.restart()
    assert usual.timeout("computing", 5) == 600
    assert usual.timeout("building", 5) == 600


def test_patience_is_eight_usual_steps_and_never_under_the_floor() -> None:
    usual = ProgressTimeouts(timeout=600)
    _steps(usual, [60.0] + [2.0] * 20)  # the first has compiled
    assert usual.step == 2.0
    assert usual.timeout("data", 5) == 16
    assert usual.timeout("updating", 40) == 40


def test_the_usual_follows_the_newest_steps() -> None:
    usual = ProgressTimeouts(timeout=600)
    _steps(usual, [1.0] * 100 + [3.0] * 30)
    assert usual.step == 3.0


def test_one_step_counts_once_however_many_ranks_and_looks_there_are() -> None:
    usual = ProgressTimeouts(timeout=600)
    for taken, seconds in ((0, 0.0), (1, 9.0), (1, 9.0), (1, 9.0), (2, 1.0), (3, 1.0)):
        for rank in range(3):
            usual.observe(rank, Beat(steps_taken=taken, phase="computing", step_seconds=seconds))
    assert usual.step == 1.0  # of 9, 1, 1


def test_a_page_that_still_shows_the_generation_before_is_no_step() -> None:
    usual = ProgressTimeouts(timeout=600)
    _steps(usual, [1.0] * 50)
    usual.restart()
    usual.observe(0, Beat(steps_taken=50, phase="computing", step_seconds=1.0))
    assert usual.step is None
    usual.observe(0, Beat(steps_taken=0, phase="building"))
    usual.observe(0, Beat(steps_taken=1, phase="between", step_seconds=2.0))
    assert usual.step == 2.0


def test_a_generation_that_nobody_announced_is_learned_from_too() -> None:
    usual = ProgressTimeouts(timeout=600)
    _steps(usual, [1.0] * 50)
    _steps(usual, [3.0] * 30)
    assert usual.step == 3.0


@pytest.mark.parametrize("phase", ["evaluating", "saving"])
def test_what_is_done_now_and_then_has_a_minute_or_eight_times_its_longest(phase: str) -> None:
    usual = ProgressTimeouts(timeout=600)
    _steps(usual, [0.1] * 3)
    assert usual.timeout(phase, 5) == 60
    usual.observe(0, Beat(steps_taken=3, phase=phase, since=100.0))
    usual.observe(0, Beat(steps_taken=3, phase=phase, since=100.0))
    usual.observe(0, Beat(steps_taken=3, phase="data", since=120.0))
    assert usual.timeout(phase, 5) == 160
    assert usual.timeout("data", 5) == 5
    usual.restart()
    _steps(usual, [0.1], first=0)
    assert usual.timeout(phase, 5) == 160  # a new generation saves no faster


def test_the_middle_of_the_others_is_their_median() -> None:
    dice = random.Random(1)
    for _ in range(200):
        values = [float(dice.randrange(5)) for _ in range(dice.randrange(2, 9))]
        for index, value in enumerate(values):
            assert _median_of_others(sorted(values), value) == median(values[:index] + values[index + 1 :])


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_noise_alone_names_nobody(ranks: int) -> None:
    dice, stragglers = random.Random(ranks), Stragglers(1.5)
    for _ in range(10_000):
        assert stragglers.observe({rank: 0.2 * dice.lognormvariate(0, 0.3) for rank in range(ranks)}) is None


def test_bursts_of_other_work_on_the_machine_name_nobody() -> None:
    """Two cores for four ranks: now and then one of them gets half of its time for some steps, and single steps take ten times as long."""
    dice, stragglers, hit, left = random.Random(5), Stragglers(1.5), 0, 0
    for _ in range(10_000):
        if left == 0 and dice.random() < 0.02:
            hit, left = dice.randrange(4), dice.randrange(1, 9)
        left = max(0, left - 1)
        busy = {rank: 0.05 * dice.lognormvariate(0, 0.2) * (2 if left and rank == hit else 1) for rank in range(4)}
        if dice.random() < 0.01:
            busy[dice.randrange(4)] *= 10
        assert stragglers.observe(busy) is None


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_rank_three_times_as_slow_is_named_once_within_25_steps(seed: int, ranks: int) -> None:
    dice, stragglers = random.Random(seed), Stragglers(1.5)
    found: list[tuple[int, int, float]] = []
    for step in range(400):
        busy = {rank: 0.2 * dice.lognormvariate(0, 0.3) for rank in range(ranks)}
        if step >= 100:
            busy[1] *= 3
        if (one := stragglers.observe(busy)) is not None:
            found.append((step, *one))
    assert [rank for _, rank, _ in found] == [1]
    step, _, factor = found[0]
    assert 100 <= step < 125
    # The median of 15 ratios, the logarithm of each with a deviation of 0.42 at most: three and a half of its own.
    assert 1.8 < factor < 5


def test_straggler_is_reported_again_after_change_or_recovery() -> None:
    stragglers = Stragglers(1.5)
    found = []
    for step in range(300):
        slow = 2 if step < 50 else 6 if step < 100 else 1 if step < 200 else 2
        if (one := stragglers.observe({0: 1.0, 1: 1.0, 2: float(slow), 3: 1.0})) is not None:
            found.append((step, *one))
    assert [(rank, factor) for _, rank, factor in found] == [(2, 2.0), (2, 6.0), (2, 2.0)]
    assert [step // 50 for step, _, _ in found] == [0, 1, 4]


def test_two_slow_ranks_are_both_named() -> None:
    stragglers = Stragglers(1.5)
    found = [one for _ in range(40) if (one := stragglers.observe({0: 1.0, 1: 3.0, 2: 1.0, 3: 2.0, 4: 1.0})) is not None]
    assert found == [(1, 3.0), (3, 2.0)]


def test_ranks_are_compared_with_those_that_have_the_same_to_do() -> None:
    stages = {0: 0, 1: 0, 2: 1, 3: 1}
    stragglers = Stragglers(1.5, stages)
    last_stage_is_longer = {0: 1.0, 1: 1.0, 2: 3.0, 3: 3.0}
    assert [stragglers.observe(last_stage_is_longer) for _ in range(50)] == [None] * 50
    found = [one for _ in range(30) if (one := stragglers.observe({**last_stage_is_longer, 1: 2.0})) is not None]
    assert found == [(1, 2.0)]
    alone = Stragglers(1.5, {0: 0, 1: 1})
    found = [one for _ in range(30) if (one := alone.observe({0: 1.0, 1: 2.0})) is not None]
    assert found == [(1, 2.0)]


def test_single_rank_is_never_a_straggler() -> None:
    stragglers = Stragglers(1.5)
    assert [stragglers.observe({0: float(1 + step % 7)}) for step in range(50)] == [None] * 50
