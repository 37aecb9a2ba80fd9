"""One rank's actions of a pipeline schedule with their messages: what to receive from whom, when, and where results go.
`parallel/pipeline/executor` executes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.schedules.actions import Action, Schedule

_AHEAD = 2
"""How many actions before its use a message is requested, so that it travels meanwhile."""


class Message(NamedTuple):
    """An activation for the next stage, or a gradient for the previous one."""

    is_gradient: bool
    stage: int
    """The stage that consumes it."""
    micro_batch: int


@dataclass(frozen=True, slots=True)
class RankAction:
    """An action and its messages."""

    kind: str
    stage: int
    micro_batch: int
    part: int
    """Index of the stage among the rank's own."""
    receives: tuple[tuple[int, Message], ...]
    """Messages to request before it, as (sender, message), in the order in which they are sent."""
    consumes: Message | None
    """Its input; None: tokens, a loss, or what the stage has saved."""
    produces: Message | None
    """Its result; None if no other stage needs it."""
    receiver: int | None
    """The rank that the result goes to; None: this rank."""


def rank_actions(schedule: Schedule, rank: int) -> tuple[RankAction, ...]:
    """The actions of one rank."""
    actions = schedule.actions[rank]
    parts = {stage: part for part, stage in enumerate(schedule.stages_of(rank))}
    # Messages between two ranks arrive in the order in which they are sent, so they must be requested in it.
    queues = {
        peer: [message for message, to in _sent(schedule, peer) if to == rank] for peer in range(schedule.ranks) if peer != rank
    }
    sources = {message: peer for peer, queue in queues.items() for message in queue}
    requested: set[Message] = set()
    result = []
    for index, action in enumerate(actions):
        receives: list[tuple[int, Message]] = []
        for coming in actions[index : index + 1 + _AHEAD]:
            message = _consumed(schedule, coming)
            while message is not None and message in sources and message not in requested:
                peer = sources[message]
                receives.append((peer, queues[peer].pop(0)))
                requested.add(receives[-1][1])
        produces, receiver = _produced(schedule, action)
        receiver = None if receiver == rank else receiver
        consumes = _consumed(schedule, action)
        result.append(RankAction(*action, parts[action.stage], tuple(receives), consumes, produces, receiver))
    return tuple(result)


def connections(schedule: Schedule) -> list[tuple[int, int]]:
    """All pairs (sender, receiver) that may communicate, in the same order on all ranks."""
    hops = [(schedule.rank_of(stage), schedule.rank_of(stage + 1)) for stage in range(schedule.stages - 1)]
    return sorted({pair for a, b in hops if a != b for pair in ((a, b), (b, a))})


def _sent(schedule: Schedule, rank: int) -> Iterator[tuple[Message, int]]:
    for action in schedule.actions[rank]:
        message, to = _produced(schedule, action)
        if message is not None and to is not None:
            yield message, to


def _produced(schedule: Schedule, action: Action) -> tuple[Message | None, int | None]:
    kind, stage, micro_batch = action
    to = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(kind)
    if to is None or not 0 <= to < schedule.stages:
        return None, None
    return Message(kind != "F", to, micro_batch), schedule.rank_of(to)


def _consumed(schedule: Schedule, action: Action) -> Message | None:
    kind, stage, micro_batch = action
    if kind == "F":
        return Message(False, stage, micro_batch) if stage > 0 else None
    if kind in ("B", "I"):
        return Message(True, stage, micro_batch) if stage < schedule.stages - 1 else None
    return None
