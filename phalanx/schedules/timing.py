"""How long a pipeline schedule takes, and what part of that time its ranks idle. The CLI and the planner use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from phalanx.schedules.actions import Action, Schedule


class Timed(NamedTuple):
    """An action with its start and end, in seconds or any other unit."""

    kind: str
    stage: int
    micro_batch: int
    start: float
    stop: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """How long the actions of one stage take. A whole backward takes as long as its two halves."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    stages: tuple[float, ...] | None = None
    """A factor for each stage; default: all stages take equally long."""

    def of(self, action: Action) -> float:
        by_kind = {"F": self.forward, "B": self.input + self.weight, "I": self.input, "W": self.weight}
        return by_kind[action.kind] * (1.0 if self.stages is None else self.stages[action.stage])


@dataclass(frozen=True, slots=True)
class Timeline:
    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def start(self) -> float:
        return min(timed.start for row in self.ranks for timed in row)

    @property
    def stop(self) -> float:
        return max(timed.stop for row in self.ranks for timed in row)


def simulate(schedule: Schedule, durations: Durations | None = None, comm: float = 0.0) -> Timeline:
    """Run every rank's list, each action as soon as its inputs are there; `comm` is the time of a message between ranks."""
    durations = durations or Durations()
    ready: dict[Action, float] = {}
    rows: list[list[Timed]] = [[] for _ in schedule.actions]
    for rank, action in schedule.runnable():
        start = rows[rank][-1].stop if rows[rank] else 0.0
        for need in schedule.needs(action):
            start = max(start, ready[need] + (comm if schedule.rank_of(need.stage) != rank else 0.0))
        ready[action] = start + durations.of(action)
        rows[rank].append(Timed(*action, start, ready[action]))
    assert all(len(row) == len(actions) for row, actions in zip(rows, schedule.actions, strict=True)), "see Schedule.problems"
    return Timeline(tuple(tuple(row) for row in rows))


def bubble(timeline: Timeline) -> float:
    """The idle fraction of all ranks' time between the first action and the last. Traces must share one clock."""
    busy = sum(timed.stop - timed.start for row in timeline.ranks for timed in row)
    return 1.0 - busy / (len(timeline.ranks) * (timeline.stop - timeline.start))
