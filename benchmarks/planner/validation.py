"""How well constants predict steps that they were not fitted to: whole sources left out, intervals, and simpler ways beside it.

The accuracy benchmark and the fit that ships call it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from phalanx.planning.cost.job_table import RECOMPUTE
from phalanx.planning.cost.step_time import family_uncertainty, step_times
from planner.fit import Solved, predict
from planner.parameters import Fit, rates_of
from planner.steps import Table

COVER = 0.90
"""The upper quantile of an interval; the lower one is as far from the other end."""
TOGETHER = 5
"""Rows of a publication err together: it counts as so many independent ones when quantiles are corrected for how few there are."""


def left_out(solved: Solved, groups: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Seconds of each wanted row, by constants fitted without any row of its group; elsewhere not a number."""
    found = np.full(len(groups), np.nan)
    for group in np.unique(groups[wanted]):
        mine = groups == group
        found[mine] = predict(solved.without(mine), solved.table.take(mine))
    return np.where(wanted, found, np.nan)


def doubts(fit: Fit, table: Table) -> np.ndarray:
    """How many times as far off each row may be as one that only computes, by the shares of its parts."""
    rates = replace(rates_of(fit, table), low=1.0, high=np.e)
    times = step_times(table.work, rates)
    return np.asarray(np.log(times.high / times.step))


def known_by(families: np.ndarray, known: Table, left: np.ndarray | None = None) -> np.ndarray:
    """How many times as far off rows of these families may be, by what is published about them in some known rows, those left out
    not counted."""
    rows = known.core if left is None else known.core & ~left
    counts = {family: len(set(known.publications[rows & (known.family == family)])) for family in np.unique(families)}
    return np.array([float(family_uncertainty(counts[family])) for family in families])


def factors(misses: np.ndarray, publications: np.ndarray) -> tuple[float, float]:
    """P10 and P90 of such logarithms of measured over predicted, a little outside of theirs: few say little about the tails."""
    far = min(1.0, COVER * (1 + 1 / (TOGETHER * len(set(publications)))))
    low, high = np.quantile(misses, (1 - far, far))
    return float(low), float(high)


def covered(table: Table, predicted: np.ndarray, groups: np.ndarray, unsure: np.ndarray) -> np.ndarray:
    """Whether each row's time lies in its interval: quantiles of what all other sources of its kind missed by, each as a multiple of
    its own doubts."""
    wide = unsure.copy()
    for group in np.unique(groups):
        mine = groups == group
        wide[mine] *= known_by(table.family[mine], table, mine)
    misses = np.log(table.seconds / predicted) / wide
    inside = np.zeros(len(misses), dtype=bool)
    for kind in (False, True):
        of_kind = (table.moe == kind) & ~np.isnan(misses)
        for group in np.unique(groups[of_kind]):
            mine = of_kind & (groups == group)
            others = of_kind & ~mine
            if others.sum() >= 10:
                low, high = factors(misses[others], table.publications[others])
                inside[mine] = (misses[mine] >= low) & (misses[mine] <= high)
    return inside


class Summary(NamedTuple):
    """Of some rows: relative errors of the step's time."""

    rows: int
    median: float
    ninetieth: float
    bias: float


def summary(seconds: np.ndarray, predicted: np.ndarray) -> Summary:
    errors = predicted / seconds - 1
    size = np.abs(errors)
    return Summary(len(errors), float(np.median(size)), float(np.quantile(size, 0.9)), float(np.median(errors)))


def flops(table: Table, *, attention: bool = True) -> np.ndarray:
    """Of a step: six for each weight that works on a token, and causal attention; or the former alone, recomputing never counted."""
    work = table.work
    dense = (work.layers - work.sparse_layers) * (2 + work.gated) * work.ffn
    sparse = work.sparse_layers * 3 * (work.active * work.expert_ffn + work.shared_ffn)
    weights = work.layers * work.attention_weights + work.dim * (dense + sparse + work.vocab)
    scores = work.layers * (work.score_width + work.value_width) * work.sequence / 2 if attention else 0.0
    return np.asarray(6 * (weights + scores) * work.batch * work.sequence)


def by_peak(table: Table) -> np.ndarray:
    """Nothing fitted: 40 % of the vendor's peak, for whatever is multiplied, recomputed too."""
    again = np.where(table.work.recompute == RECOMPUTE.index("full"), 4 / 3, 1.0)
    return np.asarray(flops(table) * again / (0.40 * table.work.peak * table.work.ranks))


def by_source(table: Table) -> np.ndarray:
    """Every row at the median MFU of its source's other rows; not a number where there are none."""
    mfu = flops(table) / (table.work.peak16 * table.work.ranks * table.seconds)
    usual = np.full(len(mfu), np.nan)
    for place, source in enumerate(table.sources):
        others = (table.sources == source) & (np.arange(len(mfu)) != place)
        if others.any():
            usual[place] = np.median(mfu[others])
    return np.asarray(table.seconds * mfu / usual)


def by_family(table: Table, groups: np.ndarray) -> np.ndarray:
    """6ND at the median that other sources reach on the same device family and format; not a number where there are none."""
    rate = flops(table, attention=False) / (table.work.peak * table.work.ranks * table.seconds)
    usual = np.full(len(rate), np.nan)
    for group in np.unique(groups):
        mine = groups == group
        for family in np.unique(table.family[mine]):
            others = ~mine & (table.family == family)
            if others.any():
                usual[mine & (table.family == family)] = np.median(rate[others])
    return np.asarray(table.seconds * rate / usual)


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
