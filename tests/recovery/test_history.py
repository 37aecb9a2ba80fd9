"""When a run is given up, and what is said then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from happenings import disconnected, node_lost, worker_died

from phalanx.recovery.policy import decide, failures, updated_history, verdict
from phalanx.recovery.state import Action, EndRun, Event, Failure, NewGeneration, NodeJoined, Situation, Wait
from phalanx.spec.layout import Layout
from phalanx.spec.run import Resilience

FOUR = Layout(data=4)
START = Situation(wanted=FOUR, layout=FOUR, assignment=(0, 0, 1, 1), nodes={0: 2, 1: 2})


def anything(layout: Layout) -> bool:
    return True


def failed(rank: int, step: int | None, reason: str = "ValueError: no") -> Failure:
    return worker_died(rank, step, "failed", reason)


def play(state: Situation, *events: Event | tuple[Event, ...]) -> list[Action]:
    """Decisions on events one after the other, a tuple being some that happened together; nodes that are lost are back at once."""
    actions = []
    for event in events:
        together = event if isinstance(event, tuple) else (event,)
        actions.append(decide(state, together, anything))
        state = replace(state, history=updated_history(state, together, actions[-1]))
    return actions


def story(action: Action) -> str:
    assert isinstance(action, EndRun)
    return action.story


def test_the_same_failure_at_the_same_step_three_times_is_a_bug() -> None:
    reason = "IndexError: index 7 is out of range\n  File …"
    *twice, last = play(START, *(failed(rank, 431, reason) for rank in (1, 1, 2)))
    assert all(isinstance(action, NewGeneration) for action in twice)
    told = story(last)
    assert "same failure came 3 times after step 431" in told
    for line in (
        "1. after step 431, rank 1 (node 0), failed: IndexError: index 7 is out of range; then its processes were started again.",
        "2. after step 431, rank 1 (node 0), failed: IndexError: index 7 is out of range; then its processes were started again.",
        "3. after step 431, rank 2 (node 1), failed: IndexError: index 7 is out of range; nothing more was tried.",
    ):
        assert line in told
    assert "Look at the traceback" in told and "newest checkpoint" in told
    *_, last = play(replace(START, saves=False), *(failed(rank, 431, reason) for rank in (1, 1, 2)))
    assert story(last).endswith(
        "Nothing was saved, because checkpoint.save = false: the same command starts again from step 0."
    )


def test_times_and_addresses_in_a_reason_make_no_other_failure() -> None:
    hung = [
        worker_died(1, 5, "hung", f"rank 1 is in all_gather #8122; 3 ranks have waited for {since} s") for since in (6, 61.5, 7)
    ]
    assert "3 times after step 5" in story(play(START, *hung)[-1])
    lost = [failed(rank, 5, f"rank {rank}: no answer of 0x{rank}f3a") for rank in (1, 2, 3)]
    assert all(isinstance(action, NewGeneration) for action in play(START, *lost)), "what names its rank is another's"


@pytest.mark.parametrize(
    "events",
    [
        [failed(1, 5), failed(1, 6), failed(1, 7)],
        [failed(1, 5, "a"), failed(1, 5, "b"), failed(1, 5, "c")],
        [failed(1, 5), worker_died(1, 5, "died", "ValueError: no"), worker_died(1, 5, "hung", "ValueError: no")],
        [failed(1, 5), failed(1, 6), failed(1, 5)],
        [(failed(0, 5), failed(1, 5), failed(2, 5)), failed(1, 5)],  # one failure that three ranks met
    ],
)
def test_different_failures_do_not_end_the_run(events: list[Event]) -> None:
    assert all(isinstance(action, NewGeneration) for action in play(START, *events))


def test_three_times_need_not_be_in_a_row() -> None:
    *others, last = play(START, failed(1, 5), failed(1, 6), failed(1, 5), failed(3, 6, "x"), failed(1, 5))
    assert all(isinstance(action, NewGeneration) for action in others) and "3 times after step 5" in story(last)


def test_more_failures_than_allowed() -> None:
    *others, last = play(
        replace(START, settings=Resilience(restarts=2)),
        disconnected(3),
        failed(0, 4),
        worker_died(2, 9, "died", "killed by SIGKILL"),
    )
    assert all(isinstance(action, NewGeneration) for action in others)
    told = story(last)
    assert "There were 3 failures in this launch, and resilience.restarts = 2." in told
    assert "no single rank, connection lost" in told and "rank 0 (node 0), failed" in told and "rank 2 (node 1), died" in told
    assert "There was 1 failure in this launch" in story(
        play(replace(START, settings=Resilience(restarts=0)), disconnected(3))[0]
    )


@pytest.mark.parametrize(
    ("steps", "end"),
    [
        (range(0, 20_000, 10), None),  # one in ten steps, for ever: 100 within any 1,000
        (range(0, 20_000, 9), 101),  # more: 101 within 900
        (range(2000), 101),  # a step each time
        ([0, 50, 5000, *range(7000, 9000)], 104),  # what was long ago counts no more
        (
            [0, *(900 + 7 * (number % 100) for number in range(2000))],
            102,
        ),  # steps that are lost, and done again, are no progress
        ([None] * 2000, 101),
    ],
    ids=["rare", "often", "every step", "old ones", "again", "unknown"],
)
def test_a_run_that_gets_on_may_fail_for_ever(steps: Iterable[int | None], end: int | None) -> None:
    """`resilience.restarts` is for those within 1,000 new steps. Each of these failures is another one."""
    state = replace(START, settings=Resilience(restarts=100))
    for number, step in enumerate(steps, 1):
        words = f"{number:b}".translate({48: "a", 49: "b"})
        event = worker_died(1, step, "died", f"killed by {words}")
        found = verdict(state, failures(state, [event]))
        assert (found is not None) == (number == end), (number, step)
        if found is not None:
            within = "in this launch" if end == 101 else "within 1,000 steps"
            assert f"There were 101 failures {within}, and resilience.restarts = 100." in found.story
            return
        state = replace(state, history=updated_history(state, [event], Wait("", ())))


def test_a_launch_counts_from_its_first_step() -> None:
    """Of a run that was started again at step 40,000: what it does since is what counts."""
    resumed = replace(START, settings=Resilience(restarts=2), first_step=40_000)
    *others, last = play(resumed, disconnected(40_000), disconnected(40_001), disconnected(40_500))
    assert all(isinstance(action, NewGeneration) for action in others) and "3 failures in this launch" in story(last)
    assert all(
        isinstance(one, NewGeneration)
        for one in play(resumed, *(disconnected(40_000 + step) for step in (0, 1, 1002, 1003, 2003)))
    )


def test_a_long_story_tells_the_last_ones() -> None:
    told = story(play(replace(START, settings=Resilience(restarts=30)), *(disconnected(step) for step in range(31)))[-1])
    assert "The last 10 of them" in told and "31. after step 30" in told and "22. after step 21" in told and "21. " not in told


def test_a_program_that_fails_at_once_is_not_started_again() -> None:
    assert "before it had completed a step" in story(play(START, failed(0, 0))[0])
    assert "before it had completed a step" in story(play(START, failed(0, None))[0])
    resumed = replace(START, first_step=40)
    assert isinstance(play(resumed, failed(0, 40))[0], EndRun) and isinstance(play(resumed, failed(0, 41))[0], NewGeneration)
    assert isinstance(play(START, worker_died(0, 0, "died", "killed by SIGKILL"))[0], NewGeneration)  # that may be bad luck


def test_ranks_that_went_with_their_node_are_no_failures_of_their_own() -> None:
    killed = [worker_died(rank, 5, "died", f"rank {rank} was killed") for rank in range(4)]
    found = failures(START, (*killed, node_lost(1, 5)))
    assert [(failure.cause, failure.rank, failure.node) for failure in found] == [
        ("died", 0, 0),
        ("died", 1, 0),
        ("node lost", None, 1),
    ]


def test_different_nodes_are_different_failures() -> None:
    lost = [(node_lost(node, 5), NodeJoined(node)) for node in (0, 1, 0, 1)]
    assert all(isinstance(action, NewGeneration) for action in play(START, *lost))


def test_a_node_that_comes_is_no_failure() -> None:
    state = replace(START, settings=Resilience(restarts=0), layout=Layout(data=2), assignment=(0, 0))
    assert failures(state, [NodeJoined(1)]) == () and isinstance(decide(state, [NodeJoined(1)], anything), NewGeneration)
