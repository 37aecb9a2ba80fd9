"""One rank's part of a pipeline schedule with its messages: what to expect from whom, when, and where results go.
`parallel/pipeline/executor` executes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.schedules.actions import Action, Schedule

_AHEAD = 2
"""Actions before its use at which a message is asked for, so that it can travel during those."""


class Message(NamedTuple):
    """An activation on its way to the next stage, or a gradient on its way back."""

    back: bool
    stage: int
    """That reads it."""
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Step:
    """An action and its surroundings."""

    kind: str
    stage: int
    micro_batch: int
    part: int
    """Which of the rank's own stages it is."""
    ask: tuple[tuple[int, Message], ...]
    """Messages to ask for first, with the ranks they come from, in the order in which these send them."""
    takes: Message | None
    """What it begins with; None: with tokens, with a loss, or with what the stage itself has kept."""
    gives: Message | None
    """What comes of it, unless it is of no use to any other stage."""
    to: int | None
    """The rank that this goes to; None: it stays here."""


def program(schedule: Schedule, rank: int) -> tuple[Step, ...]:
    """What this rank does."""
    actions = schedule.actions[rank]
    parts = {stage: part for part, stage in enumerate(schedule.stages_of(rank))}
    # Messages between two ranks arrive in the order in which they were sent, so that is how they must be asked for.
    queues = {
        peer: [message for message, to in _sent(schedule, peer) if to == rank] for peer in range(schedule.ranks) if peer != rank
    }
    sources = {message: peer for peer, queue in queues.items() for message in queue}
    asked: set[Message] = set()
    steps = []
    for index, action in enumerate(actions):
        ask: list[tuple[int, Message]] = []
        for coming in actions[index : index + 1 + _AHEAD]:
            message = _taken(schedule, coming)
            while message is not None and message in sources and message not in asked:
                peer = sources[message]
                ask.append((peer, queues[peer].pop(0)))
                asked.add(ask[-1][1])
        gives, to = _given(schedule, action)
        to = None if to == rank else to
        steps.append(Step(*action, parts[action.stage], tuple(ask), _taken(schedule, action), gives, to))
    return tuple(steps)


def neighbours(schedule: Schedule) -> list[tuple[int, int]]:
    """(sender, receiver) of all messages there may be, each once, in an order that is the same on all ranks."""
    ways = [(schedule.rank_of(stage), schedule.rank_of(stage + 1)) for stage in range(schedule.stages - 1)]
    return sorted({pair for one, other in ways if one != other for pair in ((one, other), (other, one))})


def _sent(schedule: Schedule, rank: int) -> Iterator[tuple[Message, int]]:
    for action in schedule.actions[rank]:
        message, to = _given(schedule, action)
        if message is not None and to is not None:
            yield message, to


def _given(schedule: Schedule, action: Action) -> tuple[Message | None, int | None]:
    kind, stage, micro_batch = action
    to = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(kind)
    if to is None or not 0 <= to < schedule.stages:
        return None, None
    return Message(kind != "F", to, micro_batch), schedule.rank_of(to)


def _taken(schedule: Schedule, action: Action) -> Message | None:
    kind, stage, micro_batch = action
    if kind == "F":
        return Message(False, stage, micro_batch) if stage > 0 else None
    if kind in ("B", "I"):
        return Message(True, stage, micro_batch) if stage < schedule.stages - 1 else None
    return None
