"""Searches a learning rate: a trainer takes steps with an exponentially growing rate, and the loss tells where it learns fastest. Called by
`px.lr_find` and `phalanx lr-find`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx.events.records import Step, plain
from phalanx.spec.json_value import JsonObject
from phalanx.training.run_loop import RunLoop

_WINDOW = 25
"""The running mean of N losses takes N/25 of them on each side."""
_RECENT = 5
"""Last losses whose mean tells whether the loss diverges."""
_DIVERGED = 1.5
"""The search ends when they exceed the lowest running mean by this factor."""
_GROWN = 1.1
"""The descent ends where the running mean exceeds its minimum so far by this factor: what falls after a spike only recovers from it."""
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
    """Centered running mean of the losses."""
    suggestion: float | None
    """The rate at which the smoothed loss falls fastest; None: it never falls."""
    lowest: float | None
    """The rate at which the smoothed loss is lowest before it first grows. Higher ones are too high."""
    diverged: bool
    """The loss grew, or was not finite, before the last rate was reached."""

    @property
    def sentence(self) -> str:
        """The result for people."""
        if self.suggestion is None or self.lowest is None:
            return "no suggestion: the loss does not fall; try lower or higher rates with --low and --high, or more --steps"
        end = "then it grows" if self.diverged else "it does not grow up to the last rate: try a higher --high"
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


def search_rate(trainer: RunLoop, rates: Sequence[float], on_step: Callable[[], None] = lambda: None) -> RateSearch:
    """Trains one step with each rate, until the loss diverges."""
    trainer.rate_of = lambda step: rates[min(step, len(rates) - 1)]
    losses: list[float] = []
    while len(losses) < len(rates):
        record = trainer.step()
        on_step()
        losses.append(record.loss if isinstance(record, Step) else math.nan)
        recent = sum(losses[-_RECENT:]) / _RECENT
        if not math.isfinite(losses[-1]) or (len(losses) > _RECENT and recent > _DIVERGED * min(smoothed(losses))):
            break
    return conclude(rates[: len(losses)], losses)


def smoothed(losses: Sequence[float]) -> list[float]:
    """Centered running mean, whose window shrinks towards both ends: unlike one of the past, it does not lag behind the rate."""
    half, last = max(1, len(losses) // _WINDOW), len(losses) - 1
    spans = [min(half, place, last - place) for place in range(len(losses))]
    return [sum(losses[place - span : place + span + 1]) / (2 * span + 1) for place, span in enumerate(spans)]


def conclude(rates: Sequence[float], losses: Sequence[float]) -> RateSearch:
    """The result of a search: the steepest descent of the smoothed loss over the logarithm of the rate, before the loss first grows."""
    smooth = smoothed(losses)
    bottom = descent = 0
    for place, loss in enumerate(smooth):
        if not loss <= _GROWN * smooth[bottom]:  # or it is not finite
            break
        descent, bottom = place + 1, place if loss < smooth[bottom] else bottom
    suggestion = lowest = None
    slopes = {
        place: (smooth[place + 1] - smooth[place - 1]) / math.log(rates[place + 1] / rates[place - 1])
        for place in range(1, bottom)
    }
    if descent >= _LEAST and slopes and smooth[0] - smooth[bottom] > _FALL * abs(smooth[0]):
        suggestion, lowest = rates[min(slopes, key=lambda place: slopes[place])], rates[bottom]
    diverged = descent < len(losses)
    return RateSearch(
        rates=list(rates), losses=list(losses), smooth=smooth, suggestion=suggestion, lowest=lowest, diverged=diverged
    )
