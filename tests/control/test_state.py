"""What a controller concludes from what the ranks of a generation have said: which step is gone on from, and who has its state."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.control.state import Generation
from phalanx.recovery.state import WorkerDied
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan


def of(layout: Layout) -> Generation:
    plan = Plan(
        layout=layout,
        device="cpu",
        threads=1,
        micro_batch=1,
        accumulation=1,
        compute="fp32",
        parameters=1,
        flops_per_token=1.0,
        peak_flops=None,
    )
    return Generation(3, plan, (0,) * (layout.ranks // 2) + (1,) * (layout.ranks - layout.ranks // 2))


def stand(current: Generation, rank: int, step: int | None, *, prepared: bool = False, divisor: float | None = None) -> None:
    bad = None if divisor is None else 0.0
    said = {"step": step, "prepared": prepared, "divisor": divisor, "bad": bad}
    current.hear({"say": "standing", "rank": rank, "generation": 3} | said)


def test_where_nobody_has_applied_the_step_all_survivors_have_the_one_before() -> None:
    current = of(Layout(data=4))
    current.dead[2] = WorkerDied(2, 7, "died", "it was killed")
    for rank in (0, 1, 3):
        stand(current, rank, 7, prepared=rank == 1, divisor=1.5)
    target = current.target()
    assert target is not None
    assert target[:2] == (7, [0, 1, 3])
    assert current.step == 7


def test_those_that_could_apply_the_step_take_it_as_those_that_have_did() -> None:
    current = of(Layout(data=4))
    current.dead[0] = WorkerDied(0, 7, "died", "it was killed")
    stand(current, 1, 7, prepared=True, divisor=1.5)  # of step 7
    stand(current, 2, 8, divisor=2.5)
    stand(current, 3, 7, prepared=True)
    target = current.target()
    assert target is not None
    step, contributors, ahead = target
    assert (step, contributors) == (8, [1, 2, 3])
    assert (ahead["divisor"], ahead["bad"]) == (2.5, 0.0)


def test_who_can_neither_have_the_step_nor_take_it_contributes_nothing() -> None:
    current = of(Layout(data=4))
    stand(current, 0, 8, divisor=2.5)
    stand(current, 1, 7)  # not prepared
    stand(current, 2, None)  # in the middle of an update, or not built yet
    stand(current, 3, 6, prepared=True)  # two behind
    assert current.target() == (8, [0], current.standings[0])


@pytest.mark.parametrize(
    ("what", "guilty", "left"),
    [
        ("weights", [1], [0, 2, 3]),
        ("weights", [], None),  # it cannot be told whose are right
        ("gradients", [], [0, 1, 2, 3]),  # they were not applied
    ],
)
def test_numbers_that_are_not_believed_are_not_gone_on_with(what: str, guilty: list[int], left: list[int] | None) -> None:
    current = of(Layout(data=4))
    for rank in range(4):
        stand(current, rank, 9, divisor=1.0)
    said = {"what": what, "ranks": guilty, "agreed": 5, "reason": "they differ"}
    current.hear({"say": "corrupt", "rank": 0, "generation": 3} | said)
    target = current.target()
    assert (None if target is None else target[1]) == left


def test_without_any_state_there_is_no_target() -> None:
    current = of(Layout(data=2))
    assert current.target() is None and current.step is None
    stand(current, 0, None)
    assert current.target() is None


def test_a_dead_ranks_last_words_count_for_nothing() -> None:
    current = of(Layout(data=2))
    stand(current, 0, 8, divisor=2.0)
    stand(current, 1, 7)
    current.dead[0] = WorkerDied(0, 8, "died", "it was killed")
    assert current.target() == (7, [1], current.standings[1])


def test_every_stage_of_the_pipeline_is_needed() -> None:
    current = of(Layout(pipeline=2, data=2, tensor=2))
    assert current.every_stage([0, 7])
    assert not current.every_stage([0, 1, 2, 3])
    assert not current.every_stage([])


def test_what_ranks_say_is_kept_by_rank() -> None:
    current = of(Layout(data=2))
    said: list[dict[str, Any]] = [
        {"say": "restored", "rank": 0, "step": 4},
        {"say": "stepped", "rank": 0, "step": 5},
        {"say": "broken", "rank": 1, "reason": "Connection closed by peer"},
        {"say": "broken", "rank": 1, "reason": "and again"},
        {"say": "paused", "rank": 1, "step": 5},
        {"say": "ended", "rank": 0, "code": 0},
    ]
    for message in said:
        current.hear(message)
    first = current.stepped[0]
    current.hear({"say": "stepped", "rank": 0, "step": 6})
    assert current.stepped == {0: first}, "the first step is the one that counts"
    assert (current.restored, current.paused, current.ended) == ({0: 4}, {1}, {0: 0})
    assert current.broken == {1: "Connection closed by peer"}
    assert not current.complete
    current.hear({"say": "ended", "rank": 1, "code": 75})
    assert current.complete
