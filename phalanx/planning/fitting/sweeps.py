"""Jobs of which several layouts were measured: does the one that is predicted quickest turn out to be quick? The accuracy
benchmark calls it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from phalanx.planning.fitting.published import Table

LAYOUT = (
    *("tensor", "context", "pipeline", "stages", "expert", "expert_tensor", "data", "shard", "zero"),
    *("sequence_parallel", "recompute", "micro_batch", "schedule"),
)
"""What makes two rows of one job different layouts; rows that differ in nothing of it are one layout, measured more than once."""

LEAST = 5
"""Layouts that make a sweep."""


class Sweep(NamedTuple):
    """One job."""

    job: str
    layouts: int
    first: float
    """How much slower than the best measured the layout ranked first is: 0.03 is 3 %."""
    third: float
    """The same of the best of the three ranked first."""
    ranks: float


def sweeps(table: Table, predicted: np.ndarray) -> list[Sweep]:
    """Every job with enough layouts, judged by predictions made without its source."""
    found = []
    for name in dict.fromkeys(table.jobs):
        rows = [place for place, other in enumerate(table.jobs) if other == name]
        if len(rows) < LEAST:
            continue
        layouts: dict[tuple[float, ...], list[int]] = {}
        for row in rows:
            layouts.setdefault(tuple(float(getattr(table.work, part)[row]) for part in LAYOUT), []).append(row)
        if len(layouts) < LEAST:
            continue
        # A layout measured more than once counts with its median; predictions of it are alike.
        measured = np.array([np.median(table.seconds[same]) for same in layouts.values()])
        order = np.argsort([predicted[same[0]] for same in layouts.values()], kind="stable")
        slower = measured[order] / measured.min() - 1
        found.append(Sweep(name, len(layouts), float(slower[0]), float(slower[:3].min()), float(table.work.ranks[rows[0]])))
    return found
