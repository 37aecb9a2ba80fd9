"""Forwards and backwards that run side by side."""

from __future__ import annotations

import pytest

from phalanx.schedules.actions import Action
from phalanx.schedules.makers import make
from phalanx.schedules.pairs import overlapped_pairs

SIZES = [(2, 4), (2, 9), (3, 6), (4, 8), (4, 20), (8, 16), (8, 40)]


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_no_rank_waits_in_a_circle(ranks: int, micro_batches: int) -> None:
    """With both inputs needed before a pair begins, and no result before it ends, all ranks still come to the end of their lists."""
    schedule = make("dualpipev", ranks, micro_batches)
    pairs, done, positions = overlapped_pairs(schedule), set[Action](), [0] * ranks
    for _ in range(sum(map(len, schedule.actions))):
        for rank, row in enumerate(schedule.actions):
            together = row[positions[rank] : positions[rank] + (2 if positions[rank] in pairs[rank] else 1)]
            if all(done.issuperset(schedule.needs(action)) for action in together):
                done.update(together)
                positions[rank] += len(together)
    assert positions == [len(row) for row in schedule.actions]


@pytest.mark.parametrize(("ranks", "micro_batches"), SIZES)
def test_steady_state_consists_of_pairs_of_different_stages(ranks: int, micro_batches: int) -> None:
    schedule = make("dualpipev", ranks, micro_batches)
    for rank, (row, places) in enumerate(zip(schedule.actions, overlapped_pairs(schedule), strict=True)):
        for place in places:
            assert row[place].kind == "F" and row[place + 1].kind == "B" and row[place].stage != row[place + 1].stage
        # A rank fills and drains the pipeline with at most 2 · ranks micro-batches of each of its two stages.
        assert len(places) >= 2 * (micro_batches - 2 * ranks) + rank + 1


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zbv"])
def test_other_schedules_run_one_after_the_other(name: str) -> None:
    schedule = make(name, 4, 16)
    assert all(not places for places in overlapped_pairs(schedule))
