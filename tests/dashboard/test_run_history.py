"""Launches of one run directory, folded into what holds in the end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from phalanx.dashboard.summary import history
from phalanx.events.records import Evaluated, Restored, StepSkipped

Make = Callable[..., Any]


def skip(number: int) -> StepSkipped:
    return StepSkipped(step=number, samples=8 * number, loss=math.nan, grad_norm=math.nan, in_a_row=1)


def evaluated(number: int, loss: float) -> Evaluated:
    return Evaluated(step=number, loss=loss, tokens=1, seconds=1.0)


def test_resumption_undoes_what_came_after_its_checkpoint(step: Make, started: Make) -> None:
    first = [started(), *(step(n, loss=5.0) for n in (1, 2, 3, 4)), evaluated(2, 5.2), evaluated(4, 5.4), skip(5)]
    again = [started(), Restored(step=2, path="a", seconds=1.0), step(3, loss=4.0)]
    known = history(first + again)
    assert {number: record.loss for number, record in known.steps.items()} == {1: 5.0, 2: 5.0, 3: 4.0}
    assert list(known.evaluations) == [2]
    assert known.skipped == []
    assert [record.step for record in known.launch] == [3]


def test_resumption_that_took_no_step_is_back_at_its_checkpoint(step: Make, started: Make) -> None:
    known = history([started(), step(1), step(2), step(3), started(), Restored(step=1, path="a", seconds=1.0)])
    assert list(known.steps) == [1]
    assert known.launch == []


def test_launch_that_found_no_checkpoint_begins_anew(step: Make, started: Make) -> None:
    known = history([started(), step(1), step(2), step(3), started(), step(1, loss=1.0)])
    assert {number: record.loss for number, record in known.steps.items()} == {1: 1.0}


def test_recovery_that_found_no_checkpoint_begins_anew_in_the_same_launch(step: Make, started: Make) -> None:
    first = [started(), step(1), evaluated(1, 5.0), skip(2), step(2), step(3)]
    known = history([*first, step(1, loss=1.0), skip(2)])
    assert {number: record.loss for number, record in known.steps.items()} == {1: 1.0}
    assert (known.evaluations, [record.step for record in known.skipped]) == ({}, [2])
    assert [record.step for record in known.launch] == [1, 2, 3, 1]


def test_skipped_steps_of_a_launch_all_count(step: Make, started: Make) -> None:
    known = history([started(), step(1), skip(2), skip(2), step(2), skip(3)])
    assert [record.step for record in known.skipped] == [2, 2, 3]
    assert list(known.steps) == [1, 2]


def test_later_record_of_a_step_wins_without_any_launch(step: Make) -> None:
    assert history([step(1, loss=2.0), step(1, loss=1.0)]).steps[1].loss == 1.0
