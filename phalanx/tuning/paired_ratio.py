"""Whether a candidate is faster than the base, from turns that both take one after the other. Pure: `tuning/duel` collects the turns.

Each pair of turns gives one ratio of times. The estimate is the Hodges–Lehmann median of the ratios' logarithms, its interval that of Wilcoxon's
signed-rank test. Two equal sides that take the first turn alternately have ratios that are symmetric around 1, whatever the noise is like: the
test is exact then, if pairs do not depend on each other. A load that comes and goes moves only the pairs that it meets, and a quarter of
them may be off by any amount.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement
from statistics import median
from typing import Literal

Verdict = Literal["faster", "not faster", "go on"]

TAIL = 0.0125
"""Probability that the ratio is beyond one end of its interval."""
MIN_GAIN = 0.01
"""Part of the step's time that a candidate must save: less is not worth a key."""

_HOPELESS = 0.1
"""Probability that a candidate saves MIN_GAIN after all, below which it is given up."""
_FAR_BEHIND = 1.03
"""Ratio at the first look from which on a candidate is given up, however noisy the machine is."""
_FAR_SLOWER, _ENOUGH = 2.0, 3
"""Ratio of every pair from which on so many are enough to give up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """Time of a step of the candidate as a fraction of that of the base."""

    median: float
    low: float
    high: float
    """Ends of its interval; 0 and infinity: too few pairs for one."""
    pairs: int

    @property
    def faster(self) -> bool:
        """Faster beyond noise, and by enough."""
        return self.high < 1 and self.median <= 1 - MIN_GAIN

    @property
    def words(self) -> str:
        """Such as "−4.2% (−5.0 … −3.1)"."""
        if not math.isfinite(self.high):
            return f"{_percent(self.median)}%"
        return f"{_percent(self.median)}% ({_percent(self.low)} … {_percent(self.high)})"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f}".replace("-", "−")


def ratio_of(pairs: Sequence[tuple[float, float]], tail: float = TAIL) -> Ratio:
    """The ratio of (seconds of the base, seconds of the candidate), with an interval of this confidence."""
    logs = [math.log(candidate / base) for base, candidate in pairs]
    means = sorted((one + other) / 2 for one, other in combinations_with_replacement(logs, 2))
    place = _place(len(logs), tail)
    low, high = (math.exp(means[place - 1]), math.exp(means[-place])) if place else (0.0, math.inf)
    return Ratio(median=math.exp(median(means)), low=low, high=high, pairs=len(logs))


@cache
def _place(count: int, tail: float) -> int:
    """Which of the sorted means of two logarithms, counted from both ends, are the ends of the interval; 0: there are too few pairs."""
    ways = [1]  # to choose ranks from 1 to N whose sum is the index
    for rank in range(1, count + 1):
        ways = [
            (ways[total] if total < len(ways) else 0) + (ways[total - rank] if total >= rank else 0)
            for total in range(len(ways) + rank)
        ]
    place, below = 0, 0.0
    while (below := below + ways[place] / 2**count) <= tail:
        place += 1
    return place


@dataclass(frozen=True, kw_only=True, slots=True)
class Looks:
    """The numbers of pairs at which a duel may end. More chances to be called faster are more chances to be called so by accident, so there
    are only the two of `at`; a candidate that is not ahead may be given up at any of them, at `first`, and if it is far slower."""

    first: int
    at: tuple[int, ...]

    def verdict(self, pairs: Sequence[tuple[float, float]]) -> Verdict:
        """What the pairs so far say."""
        count = len(pairs)
        if count >= _ENOUGH and all(candidate > _FAR_SLOWER * base for base, candidate in pairs):
            return "not faster"  # its turns take long, too
        if count not in (self.first, *self.at):
            return "go on"
        if count in self.at and ratio_of(pairs).faster:
            return "faster"
        rough = ratio_of(pairs, _HOPELESS)
        behind = rough.median > (_FAR_BEHIND if count == self.first else 1) or rough.low > 1 - MIN_GAIN
        return "not faster" if behind or count == self.at[-1] else "go on"


ALIVE = Looks(first=4, at=(8, 32))
"""Where both stay alive and take turns."""
FRESH = Looks(first=3, at=(7,))
"""Where every turn is a new process."""
