"""What goes wrong in a run, and what was done about it: one line each for the displays, and the sums for the summary."""

from __future__ import annotations

from collections.abc import Iterable

from rich.text import Text

from phalanx.dashboard.numbers import duration
from phalanx.events.records import (
    ControllerChanged,
    Corrupted,
    Event,
    FailureNoticed,
    FaultInjected,
    NotFinite,
    Recovered,
    Rewound,
    Straggling,
    StrangerRefused,
)

_ACTIONS = {
    "restart": "what was lost was started again",
    "spare": "free places took over",
    "shrink": "it goes on with what is left",
    "grow": "nodes came, and it uses them",
}


def trouble_line(event: Event) -> Text | None:
    """None where the event is none of these."""
    match event:
        case FailureNoticed():
            return Text(f"failure {event.number}: {event.message}", style="bold red")
        case Recovered():
            lost = f", {event.steps_lost} step{'s' if event.steps_lost > 1 else ''} to take again" if event.steps_lost else ""
            where = {"live": "the survivors' state", "memory": "copies in memory", "disk": "a checkpoint"}.get(
                event.source, "step 0"
            )
            return Text(
                f"recovered in {duration(event.seconds)}: {_ACTIONS.get(event.action, event.action)}; {event.ranks} ranks go on after "
                f"step {event.step} from {where}{lost}",
                style="green",
            )
        case ControllerChanged():
            return Text(f"node {event.node} decides now", style="yellow")
        case Straggling() | Corrupted() | NotFinite():
            return Text(event.message, style="yellow")
        case Rewound():
            first, beyond = event.left_out
            return Text(
                f"went back from step {event.step} to step {event.to}; sequences {first} to {beyond - 1} are left out",
                style="yellow",
            )
        case StrangerRefused():
            more = f" ({event.count} in all)" if event.count > 1 else ""
            return Text(f"node {event.node} sent a stranger at {event.address} away{more}: {event.reason}", style="yellow")
        case FaultInjected():
            return Text(f"chaos: {event.fault}", style="magenta")
        case _:
            return None


def recoveries(events: Iterable[Event]) -> tuple[int, int, float]:
    """How often a launch recovered from failures, complete steps that it took again, and seconds until it went on each time."""
    found = [event for event in events if isinstance(event, Recovered) and event.failures]
    return len(found), sum(event.steps_lost for event in found), sum(event.seconds for event in found)
