"""Fits the constants of `parameters` to measured steps: robust least squares of log times with priors, in numpy.

`make planner-fit` and the accuracy benchmark call it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from phalanx.planning.cost.step_time import step_times
from planner.parameters import Fit, masks_of, rates_of, start, widths
from planner.steps import Table

HUBER = 0.07
"""Threshold of the Huber loss, as a logarithm of the ratio of times."""
SCATTER = 0.1
"""Standard deviation of these logarithms between sources: the weight of a row against the priors."""
_STEP = 1e-3


def predict(fit: Fit, table: Table) -> np.ndarray:
    """Predicted seconds of each row's step."""
    return np.asarray(step_times(table.work, rates_of(fit, table)).step)


def fitted(table: Table, rounds: int = 15) -> Fit:
    """Fits constants to the rows."""
    return _solved(_Problem.of(table), start().values, rounds)


@dataclass(frozen=True, slots=True)
class Solved:
    """A fit and its derivatives, which make it quick to refit without some of the rows."""

    table: Table
    fit: Fit
    slopes: np.ndarray
    """Derivatives of the logarithms of the predictions by each value of the fit."""

    @classmethod
    def of(cls, table: Table, fit: Fit | None = None) -> Solved:
        """Fits the rows, unless `fit` is given."""
        fit = fit or fitted(table)
        problem = _Problem.of(table)
        return cls(table, fit, problem.slopes(fit.values, problem.misses(fit.values)))

    def without(self, rows: np.ndarray) -> Fit:
        """Refits without some rows. The derivatives hardly change over so short a distance, so they are reused."""
        return _solved(_Problem.of(self.table.take(~rows)), self.fit.values, 8, self.slopes[~rows])


@dataclass(frozen=True, slots=True)
class _Problem:
    """The least-squares problem: weighted Huber losses of the logarithms, and squared distances from the priors."""

    table: Table
    masks: list[np.ndarray]
    weights: np.ndarray
    target: np.ndarray

    @classmethod
    def of(cls, table: Table) -> _Problem:
        return cls(table, masks_of(table), weights_of(table) / SCATTER**2, np.log(table.seconds))

    def misses(self, values: np.ndarray) -> np.ndarray:
        step = step_times(self.table.work, rates_of(Fit(values), self.table, self.masks)).step
        return np.asarray(np.log(step) - self.target)

    def loss(self, values: np.ndarray, misses: np.ndarray) -> float:
        size = np.abs(misses)
        robust = np.where(size < HUBER, misses**2, 2 * HUBER * size - HUBER**2)
        return float((self.weights * robust).sum() + (((values - start().values) / widths()) ** 2).sum())

    def slopes(self, values: np.ndarray, misses: np.ndarray) -> np.ndarray:
        slopes = np.empty((len(misses), len(values)))
        for index in range(len(values)):
            moved = values.copy()
            moved[index] += _STEP
            slopes[:, index] = (self.misses(moved) - misses) / _STEP
        return slopes


def weights_of(table: Table) -> np.ndarray:
    """A publication with n rows has weight √n, so that a large one does not dominate; incomplete rows count half."""
    _, index, count = np.unique(table.publications, return_inverse=True, return_counts=True)
    return np.where(table.core, 1.0, 0.5) / np.sqrt(count[index])


def _solved(problem: _Problem, first: np.ndarray, rounds: int, slopes: np.ndarray | None = None) -> Fit:
    """Levenberg-Marquardt with reweighting for the Huber loss; derivatives are recomputed in each round unless given."""
    values, prior, stiff, damp = first.copy(), start().values, widths() ** -2.0, 1e-2
    misses = problem.misses(values)
    now = problem.loss(values, misses)
    for _ in range(rounds):
        steep = problem.slopes(values, misses) if slopes is None else slopes
        weight = problem.weights * np.minimum(1, HUBER / np.maximum(np.abs(misses), 1e-12))
        square = steep.T @ (weight[:, None] * steep) + np.diag(stiff)
        slope = steep.T @ (weight * misses) + (values - prior) * stiff
        before = now
        for _ in range(6):
            new = values + np.clip(np.linalg.solve(square + damp * np.diag(np.diag(square)), -slope), -1, 1)
            there = problem.misses(new)
            after = problem.loss(new, there)
            if after < now:
                values, misses, now, damp = new, there, after, damp / 4
                break
            damp *= 5
        if before - now < 1e-4 * before:
            break
    return Fit(values)
