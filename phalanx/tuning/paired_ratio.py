"""Whether a candidate is faster than the base, from turns that both take one after the other. Pure: `tuning/duel` collects the turns.

Each pair of turns gives one ratio of times. The median of the ratios is the estimate; its interval goes from one ratio in sorted order to
another, chosen by the binomial distribution (the interval of the sign test). It holds for any distribution of noise, as long as pairs do not
depend on each other, and a load that comes and goes moves only the pairs that it meets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Verdict = Literal["faster", "not faster", "go on"]

TAIL = 0.0125
"""Probability that the median is beyond one end of an interval."""
MIN_GAIN = 0.01
"""Part of the step's time that a candidate must save: less is not worth a key."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Time of a step of the candidate as a fraction of that of the base."""

    median: float
    low: float
    high: float
    """Ends of the interval of the median; 0 and infinity: too few pairs for one."""
    pairs: int

    @property
    def faster(self) -> bool:
        """Faster beyond noise, and by enough."""
        return self.high < 1 and self.median <= 1 - MIN_GAIN

    @property
    def words(self) -> str:
        """Such as "−4.2 % (−5.0 … −3.1)"."""
        if not math.isfinite(self.high):
            return f"{_percent(self.median)} %"
        return f"{_percent(self.median)} % ({_percent(self.low)} … {_percent(self.high)})"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}".replace("-", "−")


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """The ratio of (seconds of the base, seconds of the candidate)."""
    ratios = sorted(candidate / base for base, candidate in pairs)
    place = _place(len(ratios))
    low, high = (ratios[place - 1], ratios[-place]) if place else (0.0, math.inf)
    return Ratio(median=median(ratios), low=low, high=high, pairs=len(ratios))


def _place(count: int) -> int:
    """Which of sorted ratios, counted from both ends, are the ends of the interval; 0: there are too few."""
    place, below = 0, 0.0
    while True:
        below += math.comb(count, place) / 2**count
        if below > TAIL:
            return place
        place += 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Looks:
    """The numbers of pairs at which a duel may end. More chances to be called faster are more chances to be called so by accident, so there
    are only the two of `at`; a candidate that is not ahead may be given up at any of them, and at `first`."""

    first: int
    at: tuple[int, ...]

    def verdict(self, pairs: Sequence[tuple[float, float]]) -> Verdict:
        """What the pairs so far say."""
        count = len(pairs)
        if count not in (self.first, *self.at):
            return "go on"
        ratio = ratio_of(pairs)
        if count in self.at and ratio.faster:
            return "faster"
        behind = ratio.median > (1 if count == self.first else 1 - MIN_GAIN)
        return "not faster" if behind or count == self.at[-1] else "go on"


ALIVE = Looks(first=6, at=(12, 36))
"""Where both stay alive and take turns."""
FRESH = Looks(first=3, at=(7,))
"""Where every turn is a new process."""
