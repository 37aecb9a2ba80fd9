"""Which forwards and backwards of a schedule run side by side: one computes while the other's messages between ranks travel."""

from __future__ import annotations

from functools import lru_cache

from phalanx.schedules.actions import Action, Schedule

OVERLAPPING = ("dualpipev",)
"""Schedules that are made for it: the ranks have both inputs at the same time. In others a pair would wait for the later one."""


@lru_cache(64)
def overlapped_pairs(schedule: Schedule) -> tuple[frozenset[int], ...]:
    """By rank: positions of forwards that run next to the backward after them. Both start when the inputs of both have arrived, and their
    results leave when both are done, so ranks must not wait for each other in a circle: checked by following all lists."""
    if schedule.name not in OVERLAPPING:
        return tuple(frozenset[int]() for _ in schedule.actions)
    pairs = [{place for place in range(len(row) - 1) if _alike(row[place], row[place + 1])} for row in schedule.actions]
    done: set[Action] = set()
    positions = [0] * schedule.ranks
    while any(position < len(row) for position, row in zip(positions, schedule.actions, strict=True)):
        before = list(positions)
        for rank, row in enumerate(schedule.actions):
            while positions[rank] < len(row):
                together = row[positions[rank] : positions[rank] + (2 if positions[rank] in pairs[rank] else 1)]
                if not all(done.issuperset(schedule.needs(action)) for action in together):
                    break
                done.update(together)
                positions[rank] += len(together)
        assert positions != before, "no rank waits for another one's pair"
    return tuple(frozenset(places) for places in pairs)


def _alike(first: Action, second: Action) -> bool:
    """Whether they could run side by side: of different stages, whose modules keep state during a pass."""
    return first.kind == "F" and second.kind == "B" and first.stage != second.stage
