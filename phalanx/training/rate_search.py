"""Searches a learning rate: a trainer takes steps with an exponentially growing rate, and the loss tells where it learns fastest. Called by
`px.lr_find` and `phalanx lr-find`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.events.records import Step, plain
from phalanx.spec.json_value import JsonObject
from phalanx.training.trainer import Trainer

_SMOOTHING = 0.9
"""Weight of the past in the running mean of the loss."""
_DIVERGED = 1.5
"""The search ends when the smoothed loss exceeds its minimum by this factor."""
_FALL = 0.01
"""Part of the loss by which it must fall for a suggestion."""
_LEAST = 5
"""Steps with a finite loss without which nothing can be suggested."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RateSearch:
    """Losses of steps with a growing learning rate."""

    rates: list[float]
    losses: list[float]
    """Of each rate, before its update."""
    smooth: list[float]
    """Running mean of the losses."""
    suggestion: float | None
    """The rate at which the smoothed loss falls fastest; None: it never falls."""
    lowest: float | None
    """The rate at which the smoothed loss is lowest. Higher ones are too high."""
    diverged: bool
    """The loss grew or was not finite before the last rate was reached."""

    @property
    def sentence(self) -> str:
        """The result for people."""
        if self.suggestion is None or self.lowest is None:
            return "no suggestion: the loss does not fall; try lower or higher rates with --low and --high, or more --steps"
        end = "it diverges soon after" if self.diverged else "it does not diverge up to the last rate: try a higher --high"
        return (
            f"optimizer.learning_rate = {self.suggestion:.1e} is suggested: there the loss falls fastest; it is lowest at "
            f"{self.lowest:.1e}, and {end}"
        )

    def to_json(self) -> JsonObject:
        """For programs."""
        return {
            "suggestion": self.suggestion,
            "lowest": self.lowest,
            "diverged": self.diverged,
            "rates": self.rates,
            "losses": plain(self.losses),
            "smooth": plain(self.smooth),
        }


def growing_rates(low: float, high: float, steps: int) -> list[float]:
    """Rates from `low` to `high`, each larger than the one before by the same factor."""
    return [low * (high / low) ** (step / (steps - 1)) for step in range(steps)]


def search_rate(trainer: Trainer, rates: Sequence[float], on_step: Callable[[], None] = lambda: None) -> RateSearch:
    """Trains one step with each rate, until the loss diverges."""
    trainer.rate_of = lambda step: rates[min(step, len(rates) - 1)]
    losses: list[float] = []
    while len(losses) < len(rates):
        record = trainer.step()
        on_step()
        losses.append(record.loss if isinstance(record, Step) else math.nan)
        smooth = smoothed(losses)
        if not math.isfinite(losses[-1]) or smooth[-1] > _DIVERGED * min(smooth):
            return conclude(rates[: len(losses)], losses, diverged=True)
    return conclude(rates, losses, diverged=False)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Exponential running mean without the bias towards zero of its beginning."""
    mean, means = 0.0, []
    for number, loss in enumerate(losses, 1):
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * loss
        means.append(mean / (1 - _SMOOTHING**number))
    return means


def conclude(rates: Sequence[float], losses: Sequence[float], *, diverged: bool) -> RateSearch:
    """The result of a search: the steepest descent of the smoothed loss over the logarithm of the rate, before its minimum."""
    smooth = smoothed(losses)
    finite = [index for index, loss in enumerate(smooth) if math.isfinite(loss)]
    suggestion = lowest = None
    if len(finite) >= _LEAST:
        bottom = min(finite, key=lambda index: smooth[index])
        slopes = {
            index: (smooth[index + 1] - smooth[index - 1]) / math.log(rates[index + 1] / rates[index - 1])
            for index in range(1, bottom)
        }
        steepest = min(slopes, key=lambda index: slopes[index], default=None)
        if steepest is not None and smooth[0] - smooth[bottom] > _FALL * abs(smooth[0]):
            suggestion, lowest = rates[steepest], rates[bottom]
    return RateSearch(
        rates=list(rates), losses=list(losses), smooth=smooth, suggestion=suggestion, lowest=lowest, diverged=diverged
    )
