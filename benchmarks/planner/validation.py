"""Measures how well constants predict steps that they were not fitted to: cross-validation by source, intervals, and simpler predictors.

The accuracy benchmark and `make planner-fit` call it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from phalanx.planning.cost.job_table import RECOMPUTE
from phalanx.planning.cost.step_time import step_times
from planner.fit import Solved, predict
from planner.parameters import Fit, rates_of
from planner.steps import Table

COVER = 0.90
"""The upper quantile of an interval; the lower quantile is 1 − COVER."""
TOGETHER = 5
"""Errors within a publication are correlated: it counts as this many independent rows in the small-sample correction of quantiles."""
BETWEEN = 1.0
"""Variance between publications on one family of devices, relative to the variance within one publication."""


def left_out(solved: Solved, groups: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Predicted seconds of each wanted row, by constants fitted without its group; NaN for other rows."""
    predicted = np.full(len(groups), np.nan)
    for group in np.unique(groups[wanted]):
        mine = groups == group
        predicted[mine] = predict(solved.without(mine), solved.table.take(mine))
    return np.where(wanted, predicted, np.nan)


def doubts(fit: Fit, table: Table) -> np.ndarray:
    """The width of each row's interval relative to a row that only computes, from the parts of its step."""
    rates = replace(rates_of(fit, table), low=1.0, high=np.e)
    times = step_times(table.work, rates)
    return np.asarray(np.log(times.high / times.step))


def known_by(families: np.ndarray, known: Table, left: np.ndarray | None = None) -> np.ndarray:
    """The relative width of intervals for these families, by the number of known publications about them without the rows `left`."""
    rows = known.core if left is None else known.core & ~left
    counts = {family: len(set(known.publications[rows & (known.family == family)])) for family in np.unique(families)}
    return np.sqrt(1 + BETWEEN / np.maximum([counts[family] for family in families], 0.5))


def factors(misses: np.ndarray, publications: np.ndarray) -> tuple[float, float]:
    """P10 and P90 of logarithms of measured over predicted, slightly widened, because few rows say little about the tails."""
    far = min(1.0, COVER * (1 + 1 / (TOGETHER * len(set(publications)))))
    low, high = np.quantile(misses, (1 - far, far))
    return float(low), float(high)


def covered(table: Table, predicted: np.ndarray, groups: np.ndarray, unsure: np.ndarray) -> np.ndarray:
    """Whether each row's time is inside its interval, which follows from the errors of all other sources of its kind, relative to their
    widths."""
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
    """Relative errors of the step times of some rows."""

    rows: int
    median: float
    ninetieth: float
    bias: float


def summary(seconds: np.ndarray, predicted: np.ndarray) -> Summary:
    errors = predicted / seconds - 1
    size = np.abs(errors)
    return Summary(len(errors), float(np.median(size)), float(np.quantile(size, 0.9)), float(np.median(errors)))


def flops(table: Table, *, attention: bool = True) -> np.ndarray:
    """FLOPs of a step: six per active weight and token, and causal attention if `attention`; recomputation is not counted."""
    work = table.work
    dense = (work.layers - work.sparse_layers) * (2 + work.gated) * work.ffn
    sparse = work.sparse_layers * 3 * (work.active * work.expert_ffn + work.shared_ffn)
    weights = work.layers * work.attention_weights + work.dim * (dense + sparse + work.vocab)
    scores = work.layers * (work.score_width + work.value_width) * work.sequence / 2 if attention else 0.0
    return np.asarray(6 * (weights + scores) * work.batch * work.sequence)


def by_peak(table: Table) -> np.ndarray:
    """Predicts by 40 % of the vendor's peak, with recomputation; nothing is fitted."""
    again = np.where(table.work.recompute == RECOMPUTE.index("full"), 4 / 3, 1.0)
    return np.asarray(flops(table) * again / (0.40 * table.work.peak * table.work.ranks))


def by_source(table: Table) -> np.ndarray:
    """Predicts each row by the median MFU of its source's other rows; NaN if there are none."""
    mfu = flops(table) / (table.work.peak16 * table.work.ranks * table.seconds)
    usual = np.full(len(mfu), np.nan)
    for index, source in enumerate(table.sources):
        others = (table.sources == source) & (np.arange(len(mfu)) != index)
        if others.any():
            usual[index] = np.median(mfu[others])
    return np.asarray(table.seconds * mfu / usual)


def by_family(table: Table, groups: np.ndarray) -> np.ndarray:
    """Predicts by 6ND at the median speed of other sources on the same device family; NaN if there are none."""
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
"""Columns that distinguish layouts of one job; rows that agree in all of them are repeated measurements of one layout."""

LEAST = 5
"""Smallest number of layouts in a sweep."""


class Sweep(NamedTuple):
    """A job of which several layouts were measured."""

    job: str
    layouts: int
    first: float
    """How much slower the layout ranked first is than the best measured one: 0.03 is 3 %."""
    third: float
    """The same for the best of the first three."""
    ranks: float


def sweeps(table: Table, predicted: np.ndarray) -> list[Sweep]:
    """Ranks the layouts of every job with enough of them, by predictions made without its source."""
    result = []
    for name in dict.fromkeys(table.jobs):
        rows = [index for index, other in enumerate(table.jobs) if other == name]
        if len(rows) < LEAST:
            continue
        layouts: dict[tuple[float, ...], list[int]] = {}
        for row in rows:
            layouts.setdefault(tuple(float(getattr(table.work, part)[row]) for part in LAYOUT), []).append(row)
        if len(layouts) < LEAST:
            continue
        # A layout measured more than once counts with its median; its predictions are equal.
        measured = np.array([np.median(table.seconds[same]) for same in layouts.values()])
        order = np.argsort([predicted[same[0]] for same in layouts.values()], kind="stable")
        slower = measured[order] / measured.min() - 1
        result.append(Sweep(name, len(layouts), float(slower[0]), float(slower[:3].min()), float(table.work.ranks[rows[0]])))
    return result
