"""A pipeline schedule as a plain value: what each rank does with which stage and micro-batch, in order. Execution, simulation
and picture read the same list. `schedule_make` makes the known ones, `schedule_file` reads and writes them as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

KINDS = {"F": "forward", "B": "whole backward", "I": "input backward", "W": "weight backward"}
"""A whole backward (B) is an input backward (I), which the stage before waits for, and a weight backward (W), which nobody does."""

_SHOWN = 5
"""Problems of one kind that are told; a file with a wrong placement has hundreds."""


class Action(NamedTuple):
    """One stage's work on one micro-batch."""

    kind: str
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Stage s + 1 goes on from what stage s returned; where the stages lie is read off the actions."""

    name: str
    ranks: int
    stages: int
    """Of the whole pipeline."""
    micro_batches: int
    actions: tuple[tuple[Action, ...], ...]
    """Of each rank, in its order."""

    @cached_property
    def _places(self) -> dict[int, int]:
        return {action.stage: rank for rank, row in enumerate(self.actions) for action in row}

    def rank_of(self, stage: int) -> int:
        return self._places[stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """In the order in which a micro-batch passes them."""
        return tuple(sorted(stage for stage, place in self._places.items() if place == rank))

    def needs(self, action: Action) -> tuple[Action, ...]:
        """Actions that must be done first, wherever they are done."""
        kind, stage, micro_batch = action
        if kind == "F":
            return (Action("F", stage - 1, micro_batch),) if stage else ()
        if kind == "W":
            return (Action("I", stage, micro_batch),)
        own = Action("F", stage, micro_batch)
        if stage == self.stages - 1:
            return (own,)
        return own, self._backwards[stage + 1, micro_batch]

    @cached_property
    def _backwards(self) -> dict[tuple[int, int], Action]:
        """What gives the gradient of a stage's input: its whole or its input backward."""
        return {(a.stage, a.micro_batch): a for row in self.actions for a in row if a.kind in ("B", "I")}

    @property
    def splits(self) -> bool:
        """Whether some backward is done in two halves."""
        return any(action.kind == "W" for row in self.actions for action in row)

    def problems(self) -> list[str]:
        """Why it cannot be executed, in sentences; nothing if it can."""
        found = self._unknown() or [*self._misplaced(), *self._miscounted()]
        return found or self._stuck()

    def _unknown(self) -> list[str]:
        found = []
        if len(self.actions) != self.ranks:
            found.append(f"it has actions for {len(self.actions)} ranks, not for {self.ranks}")
        for rank, row in enumerate(self.actions):
            for a in row:
                if a.kind not in KINDS or not (0 <= a.stage < self.stages and 0 <= a.micro_batch < self.micro_batches):
                    limits = f"stages 0 to {self.stages - 1} and micro-batches 0 to {self.micro_batches - 1}"
                    found.append(f"rank {rank} has the action {a}, but there are only {limits}, of kinds F, B, I and W")
        return _some(found)

    def _misplaced(self) -> list[str]:
        homes: dict[int, set[int]] = {}
        for rank, row in enumerate(self.actions):
            for action in row:
                homes.setdefault(action.stage, set()).add(rank)
        several = [
            f"stage {stage} is on ranks {' and '.join(map(str, sorted(ranks)))}: a stage's weights are on one rank only"
            for stage, ranks in sorted(homes.items())
            if len(ranks) > 1
        ]
        idle = [f"rank {rank} has nothing to do" for rank, row in enumerate(self.actions) if not row]
        return _some(several) + _some(idle)

    def _miscounted(self) -> list[str]:
        times = Counter(action for row in self.actions for action in row)
        if times.total() < 2 * self.stages * self.micro_batches:
            need = f"{self.stages} stages and {self.micro_batches} micro-batches need at least {2 * self.stages * self.micro_batches}"
            return [f"it has {times.total()} actions, but {need}: both are numbered from 0 without gaps"]
        found = []
        for stage in range(self.stages):
            for micro_batch in range(self.micro_batches):
                f, b, i, w = (times[Action(kind, stage, micro_batch)] for kind in "FBIW")
                if f != 1 or (b, i, w) not in ((1, 0, 0), (0, 1, 1)):
                    has = f"{f} F, {b} B, {i} I and {w} W"
                    found.append(
                        f"stage {stage} has {has} of micro-batch {micro_batch}: it needs one F, and one B or one I and one W"
                    )
        return _some(found)

    def _stuck(self) -> list[str]:
        """Whom the ranks wait for when they follow their lists and none can go on."""
        done: set[Action] = set()
        at = [0] * self.ranks
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.actions):
                while at[rank] < len(row) and all(need in done for need in self.needs(row[at[rank]])):
                    done.add(row[at[rank]])
                    at[rank] += 1
                    moved = True
        found = []
        for rank, row in enumerate(self.actions):
            if at[rank] < len(row):
                action = row[at[rank]]
                missing = next(need for need in self.needs(action) if need not in done)
                found.append(
                    f"rank {rank} waits forever: {action}, its action {at[rank] + 1}, needs {missing}, which never comes before it"
                )
        return _some(found)


def _some(found: list[str]) -> list[str]:
    more = len(found) - _SHOWN
    return found if more <= 0 else [*found[:_SHOWN], f"and {more} more of the kind"]
