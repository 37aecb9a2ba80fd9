"""A profile of a rank's steps in words: where the time or the memory of a step goes. `phalanx profile` prints it."""

from __future__ import annotations

from phalanx.dashboard.numbers import percent, short_duration, size
from phalanx.events.records import Profiled

_WORDS = 3
"""Parts that the sentence names."""


def steps_text(event: Profiled) -> str:
    last = event.step + event.steps - 1
    return f"steps {event.step} to {last}" if last > event.step else f"step {event.step}"


def on_host(event: Profiled) -> bool:
    """Whether it is the memory of a CPU: torch keeps no history of it, and the profiler tells what operators allocate."""
    return event.what == "memory" and event.path.endswith(".gz")


def profile_sentence(event: Profiled) -> str:
    """What the profile of one rank says, in a sentence."""
    parts = list(event.top.items())[:_WORDS]
    if event.what == "memory":
        total = sum(event.top.values())
        of = "of the largest allocations" if on_host(event) else "of the memory at the peak"
        named = ", ".join(f"{percent(value / total)} {name}" for name, value in parts)
        return f"Rank {event.rank}: {of}, {size(total)} in all, {named}."
    named = ", ".join(f"{percent(value / event.seconds)} {name}" for name, value in parts)
    return f"Rank {event.rank}: of a step of {short_duration(event.seconds)}, {named}."


def profile_rows(event: Profiled) -> list[tuple[str, str, str]]:
    """Rows of a table: part, its time or size in one step, its fraction."""
    whole = sum(event.top.values()) if event.what == "memory" else event.seconds
    shown = size if event.what == "memory" else short_duration
    return [(name, shown(value), percent(value / whole if whole else None)) for name, value in event.top.items()]
