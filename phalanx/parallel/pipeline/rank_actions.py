"""One rank's actions of a pipeline schedule with their messages: what to receive from whom, when, and where results go.
`parallel/pipeline/executor` executes them."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from phalanx.schedules.actions import Action, Schedule

_AHEAD = 2
"""How many actions before its use a message is requested, so that it travels meanwhile."""


@dataclass(frozen=True, slots=True)
class RankAction:
    """An action and its messages. A message, an activation or a gradient, is named by the action that produces it."""

    kind: str
    stage: int
    micro_batch: int
    part: int
    """Index of the stage among the rank's own."""
    receives: tuple[tuple[int, Action], ...]
    """Messages to request before it, as (sender, message), in the order in which they are sent."""
    consumes: Action | None
    """Its input; None: tokens, a loss, or what the stage has saved."""
    produces: Action | None
    """Its result; None if no other stage needs it."""
    receiver: int | None
    """The rank that the result goes to; None: this rank."""


def rank_actions(schedule: Schedule, rank: int) -> tuple[RankAction, ...]:
    """The actions of one rank."""
    actions = schedule.actions[rank]
    parts = {stage: part for part, stage in enumerate(schedule.stages_of(rank))}
    # Messages between two ranks arrive in the order in which they are sent, so they must be requested in it.
    queues = [deque(action for action in row if _receiver(schedule, action) == rank) for row in schedule.actions]
    requested: set[Action] = set()
    result = []
    for index, action in enumerate(actions):
        receives: list[tuple[int, Action]] = []
        for coming in actions[index : index + 1 + _AHEAD]:
            message = _consumed(schedule, coming)
            while message is not None and (peer := schedule.rank_of(message.stage)) != rank and message not in requested:
                receives.append((peer, queues[peer].popleft()))
                requested.add(receives[-1][1])
        consumes, receiver = _consumed(schedule, action), _receiver(schedule, action)
        produces, receiver = None if receiver is None else action, None if receiver == rank else receiver
        result.append(RankAction(*action, parts[action.stage], tuple(receives), consumes, produces, receiver))
    return tuple(result)


def connections(schedule: Schedule) -> list[tuple[int, int]]:
    """All pairs (sender, receiver) that may communicate, in the same order on all ranks."""
    hops = [(schedule.rank_of(stage), schedule.rank_of(stage + 1)) for stage in range(schedule.stages - 1)]
    return sorted({pair for a, b in hops if a != b for pair in ((a, b), (b, a))})


def _receiver(schedule: Schedule, action: Action) -> int | None:
    """The rank that needs the result of an action; None: no other stage does."""
    to = {"F": action.stage + 1, "B": action.stage - 1, "I": action.stage - 1}.get(action.kind, -1)
    return schedule.rank_of(to) if 0 <= to < schedule.stages else None


def _consumed(schedule: Schedule, action: Action) -> Action | None:
    return next((need for need in schedule.needs(action) if need.stage != action.stage), None)
