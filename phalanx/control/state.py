"""One generation of ranks as the controller knows it: who they are, what they have said, what is to become of their state. Plain
bookkeeping; never loads torch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from phalanx.recovery.state import WorkerDied
from phalanx.spec.plan import Plan

Message = dict[str, Any]


@dataclass(slots=True)
class Generation:
    """The ranks that work together until one is lost."""

    number: int
    plan: Plan
    assignment: tuple[int, ...]
    """Node of each rank."""
    term: int = 0
    """In which it was begun."""
    names: dict[int, str | None] = field(default_factory=dict)
    """Of the worker processes, by rank; None: not known yet."""
    begun: float = field(default_factory=time.time)
    dead: dict[int, WorkerDied] = field(default_factory=dict)
    beats: dict[int, tuple[float, list[Any]]] = field(default_factory=dict)
    """By rank: when it was heard, and [generation, step, phase, seconds in it, step seconds, busy seconds, steps taken, memory]."""
    standings: dict[int, Message] = field(default_factory=dict)
    handed: dict[int, Message] = field(default_factory=dict)
    restored: dict[int, int] = field(default_factory=dict)
    """The step that a rank has restored."""
    stepped: dict[int, float] = field(default_factory=dict)
    """When a rank's first step was done."""
    paused: set[int] = field(default_factory=set)
    ended: dict[int, int] = field(default_factory=dict)
    completed: list[int] = field(default_factory=list)
    """The last steps of those that died."""
    broken: dict[int, str] = field(default_factory=dict)
    """Ranks that have lost another, with what they said."""
    corruption: Message | None = None
    """Replicas differ: {"ranks": the guilty, "what", "agreed": the last step at which they did not, "reason"}."""
    judged: bool = False

    @property
    def ranks(self) -> int:
        return len(self.assignment)

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.dead]

    @property
    def step(self) -> int | None:
        """The newest complete step that is known of."""
        known = [beat[1] for _, beat in self.beats.values()] + [
            one["step"] for one in self.standings.values() if one["step"] is not None
        ]
        return max([*known, *self.restored.values(), *self.completed], default=None)

    @property
    def guilty(self) -> list[int]:
        """Ranks that hold other numbers than their replicas."""
        return [] if self.corruption is None else list(self.corruption["ranks"])

    @property
    def told_apart(self) -> bool:
        """Whether it is known whose state is right. Wrong gradients were not applied: where only they differ, every state is."""
        return self.corruption is None or bool(self.guilty) or self.corruption["what"] == "gradients"

    def hear(self, message: Message) -> None:
        """What one of its ranks says."""
        rank, what = message["rank"], message["say"]
        if what == "standing":
            self.standings[rank] = message
        elif what == "handed":
            self.handed[rank] = message
        elif what == "restored":
            self.restored[rank] = message["step"]
        elif what == "stepped":
            self.stepped.setdefault(rank, time.time())
        elif what == "paused":
            self.paused.add(rank)
        elif what == "ended":
            self.ended[rank] = message["code"]
        elif what == "broken":
            self.broken.setdefault(rank, message["reason"])
        elif what == "corrupt":
            self.corruption = message

    @property
    def untouched(self) -> bool:
        """The launch's first, and no step has been taken: all there is was there before."""
        return self.number == 0 and not self.stepped and not any(beat[6] for _, beat in self.beats.values())

    @property
    def complete(self) -> bool:
        return len(self.ended) == self.ranks

    def target(self) -> tuple[int, list[int], Message] | None:
        """The newest step that a survivor's state is of, which ranks have it or can still take it, and with what; None: no state."""
        fit = {rank: said for rank, said in self.standings.items() if said["step"] is not None and rank in self.living}
        fit = {rank: said for rank, said in fit.items() if rank not in self.guilty} if self.told_apart else {}
        if not fit:
            return None
        step = max(said["step"] for said in fit.values())
        ahead = next(said for said in fit.values() if said["step"] == step)
        behind = [rank for rank, said in fit.items() if said["step"] == step - 1 and said["prepared"]]
        return step, sorted([rank for rank, said in fit.items() if said["step"] == step] + behind), ahead

    def every_stage(self, contributors: list[int]) -> bool:
        """Whether some of them are of each pipeline rank."""
        each = self.ranks // self.plan.layout.pipeline
        return len({rank // each for rank in contributors}) == self.plan.layout.pipeline
