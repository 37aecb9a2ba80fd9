"""What goes wrong, as one line each, and what it cost, in sum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from phalanx.dashboard.progress import event_line
from phalanx.dashboard.summary import Summary
from phalanx.events.records import (
    ControllerChanged,
    Corrupted,
    Event,
    FailureNoticed,
    FaultInjected,
    NotFinite,
    Recovered,
    Rewound,
    StepSkipped,
    Straggling,
    StrangerRefused,
)

Make = Callable[..., Any]


def recovered(**keys: Any) -> Recovered:
    told: dict[str, Any] = {
        "failures": [1], "action": "restart", "generation": 1, "ranks": 4, "layout": {}, "source": "live", "step": 7, "steps_lost": 0,
        "noticed": 10.0, "decided": 10.1, "restarted": 10.4, "first_step": 10.5, "seconds": 0.5,
    }  # fmt: skip
    return Recovered(**told | keys)


LINES: list[tuple[Event, str]] = [
    (FailureNoticed(number=2, cause="died", message="rank 1: it was killed by SIGKILL", rank=1), "failure 2: rank 1: it was killed by SIGKILL"),
    (
        recovered(),
        "recovered in 0.5 s: the lost ranks were restarted; 4 ranks continue after step 7 from the survivors' state",
    ),
    (
        recovered(action="shrink", ranks=2, source="memory", steps_lost=2),
        "recovered in 0.5 s: training continues on fewer ranks; 2 ranks continue after step 7 from in-memory replicas, 2 steps to repeat",
    ),
    (
        recovered(action="spare", source="disk", steps_lost=1),
        "recovered in 0.5 s: spare places took over; 4 ranks continue after step 7 from a checkpoint, 1 step to repeat",
    ),
    (
        recovered(action="grow", source="beginning", step=0),
        "recovered in 0.5 s: training continues on more nodes; 4 ranks continue after step 0 from step 0",
    ),
    (ControllerChanged(term=2, node=1), "node 1 is now the controller"),
    (Straggling(rank=3, node=1, step=9, factor=3.0, message="rank 3 is slow"), "rank 3 is slow"),
    (Corrupted(step=4, rank=1, what="weights", message="rank 1 differs"), "rank 1 differs"),
    (NotFinite(step=4, rank=0, layer="blocks.0", message="rank 0, blocks.0"), "rank 0, blocks.0"),
    (Rewound(step=20, to_step=10, skipped_samples=[80, 160], path="x"), "rolled back from step 20 to step 10; sequences 80 to 159 are skipped"),
    (StrangerRefused(address="10.0.0.9:4", node=0, reason="no token"), "node 0 refused a connection from 10.0.0.9:4: no token"),
    (
        StrangerRefused(address="10.0.0.9:4", node=0, reason="no token", count=3),
        "node 0 refused a connection from 10.0.0.9:4 (3 in all): no token",
    ),
    (FaultInjected(fault="kill rank=3 step=10", rank=3, node=None, step=10), "chaos: kill rank=3 step=10"),
    (
        StepSkipped(step=5, samples=40, loss=9.0, grad_norm=80.0, in_a_row=1, reason="spike"),
        "step 5 skipped as a spike: loss 9.0000, gradient norm 80.00 (1 in a row); the weights are unchanged",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("event", "text"), LINES, ids=[event.kind for event, _ in LINES])
def test_every_trouble_is_one_line(event: Event, text: str) -> None:
    shown = event_line(event)
    assert shown is not None and shown.plain == text


def test_the_summary_counts_what_failures_cost(step: Make, started: Make) -> None:
    earlier = [started(), step(1), recovered(step=1, steps_lost=9, seconds=99.0)]
    last = [
        started(time=100.0),
        *(step(n) for n in (2, 3, 4)),
        recovered(step=3, steps_lost=1, seconds=0.5),
        step(4),
        recovered(step=4, failures=[2, 3], seconds=2.0),
        recovered(step=4, failures=[], action="grow", seconds=50.0),  # nodes came: nothing had failed
    ]
    summary = Summary([*earlier, *last])
    assert (summary.recoveries, summary.steps_lost, summary.seconds_lost) == (2, 1, 2.5)
    assert (summary.steps, summary.tokens) == (4, 4 * last[1].tokens), "a step that was taken twice counts once"
    table = summary.to_json("run")
    assert (table["recoveries"], table["steps_lost"], table["seconds_lost"]) == (2, 1, 2.5)
    untroubled = Summary([started(), step(1)])
    assert (untroubled.recoveries, untroubled.steps_lost, untroubled.seconds_lost) == (0, 0, 0.0)
