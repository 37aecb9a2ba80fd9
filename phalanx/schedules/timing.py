"""How long a pipeline schedule takes, and how much of that its ranks wait. The CLI, planning and the executor's traces use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from phalanx.schedules.actions import Action, Schedule


class Timed(NamedTuple):
    """An action and when it was done, in seconds or any other unit."""

    kind: str
    stage: int
    micro_batch: int
    start: float
    stop: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """How long the actions of one stage take; a whole backward takes as long as its halves."""

    forward: float = 1.0
    input: float = 1.0
    weight: float = 1.0
    stages: tuple[float, ...] | None = None
    """Of each stage, times those; left out: all alike."""

    def of(self, action: Action) -> float:
        by_kind = {"F": self.forward, "B": self.input + self.weight, "I": self.input, "W": self.weight}
        return by_kind[action.kind] * (1.0 if self.stages is None else self.stages[action.stage])


@dataclass(frozen=True, slots=True)
class Timeline:
    """What was done when, by rank."""

    ranks: tuple[tuple[Timed, ...], ...]

    @property
    def start(self) -> float:
        return min(timed.start for row in self.ranks for timed in row)

    @property
    def stop(self) -> float:
        return max(timed.stop for row in self.ranks for timed in row)


def simulate(schedule: Schedule, durations: Durations | None = None, comm: float = 0.0) -> Timeline:
    """Each rank follows its list and waits for what an action needs; from another rank that comes `comm` later."""
    durations = durations or Durations()
    ready: dict[Action, float] = {}
    rows: list[list[Timed]] = [[] for _ in schedule.actions]
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.actions):
            row = rows[rank]
            for action in actions[len(row) :]:
                needs = schedule.needs(action)
                if not all(need in ready for need in needs):
                    break
                begin = row[-1].stop if row else 0.0
                for need in needs:
                    begin = max(begin, ready[need] + (comm if schedule.rank_of(need.stage) != rank else 0.0))
                ready[action] = begin + durations.of(action)
                row.append(Timed(*action, begin, ready[action]))
                moved = True
    assert all(len(row) == len(actions) for row, actions in zip(rows, schedule.actions, strict=True)), "see Schedule.problems"
    return Timeline(tuple(tuple(row) for row in rows))


def bubble(timeline: Timeline | Sequence[Sequence[Timed]]) -> float:
    """The part of all ranks' time, from the first action to the last, in which they wait. Traces must be of one clock."""
    if not isinstance(timeline, Timeline):
        timeline = Timeline(tuple(tuple(row) for row in timeline))
    busy = sum(timed.stop - timed.start for row in timeline.ranks for timed in row)
    return 1.0 - busy / (len(timeline.ranks) * (timeline.stop - timeline.start))
