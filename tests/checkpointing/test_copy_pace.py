"""Copies that may take only a share of the time: soon after the first step, then rarer, and never more than they may take."""

from __future__ import annotations

from itertools import pairwise

import pytest

from phalanx.checkpointing.replicas.copy_pace import CopyPace

SHARE, EARLY = 0.005, 0.05


def copies(cost: float, step: float, steps: int, start: float = 0.0, seconds: float = 0.0) -> list[tuple[int, float]]:
    """The steps that are copied and the time of each. A generation takes `start` seconds until its first step, `step` for each step, and
    a copy `seconds` in the background."""
    pace, now, decides_from, ready, copied = CopyPace(SHARE, 0.0), start, 0, 0.0, list[tuple[int, float]]()
    for number in range(1, steps + 1):
        now += step
        if number < decides_from or now < ready:
            continue
        if copied and ready:
            pace.end(cost)
            ready = 0.0
        if (due := pace.due(number, now)) > number:
            decides_from = due
            continue
        decides_from = pace.begin(number, now)
        copied.append((number, now))
        now += cost
        ready = now + seconds
    return copied


@pytest.mark.parametrize("start", [0.0, 2.0, 15.0])
@pytest.mark.parametrize("seconds", [0.0, 2.0])
@pytest.mark.parametrize("cost", [0.0001, 0.01, 0.2, 3.0])
def test_all_copies_but_the_first_take_a_twentieth_of_the_time_at_most(cost: float, seconds: float, start: float) -> None:
    copied = copies(cost, 0.3, 3000, start, seconds)
    assert copied[0][0] == 1
    for number, (_, now) in enumerate(copied[1:], 1):
        assert number * cost <= EARLY * now + 1e-9


@pytest.mark.parametrize("cost", [0.01, 0.2])
def test_copies_end_up_as_rare_as_the_share_demands(cost: float) -> None:
    copied = [step for step, _ in copies(cost, 0.3, 5000)]
    steady, intervals = round(cost / SHARE / 0.3), [later - step for step, later in pairwise(copied)]
    assert intervals == sorted(intervals), "never more often than before"
    assert intervals[-1] == pytest.approx(steady, rel=0.05)
    assert len(copied) <= 5000 / steady + 9, "a handful more than the share demands"


def test_early_failures_cost_few_steps() -> None:
    """Steps of 0.3 s after a first one of 10 s, and copies for which training waits 0.2 s: every interval is at most twice the last."""
    copied = [step for step, _ in copies(0.2, 0.3, 400, start=10.0)]
    assert copied[:4] == [1, 2, 4, 8]
    assert max(step for step in copied if step < 12) == 8, "a failure in step 12 costs three steps"
    assert [step for step, _ in copies(0.0, 0.3, 20)] == list(range(1, 21)), "what costs nothing is done after every step"


def test_a_copy_in_progress_delays_the_next_one() -> None:
    copied = [step for step, _ in copies(0.01, 0.3, 40, start=10.0, seconds=1.0)]
    assert copied[:3] == [1, 5, 12]


def test_a_cost_that_falls_makes_copies_more_frequent() -> None:
    """The first copies of a generation are slower than the later ones."""
    pace, now, decides_from, copied = CopyPace(SHARE, 0.0), 0.0, 0, []
    for step in range(1, 2001):
        now += 0.3
        if step >= decides_from:
            if (due := pace.due(step, now)) > step:
                decides_from = due
            else:
                decides_from = pace.begin(step, now)
                pace.end(0.2 if step < 500 else 0.0058)
                copied.append(step)
    assert copied[-1] - copied[-2] == 4
