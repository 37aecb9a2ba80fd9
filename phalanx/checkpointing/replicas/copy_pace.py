"""Decides after which steps the state is copied into memory, where copies may take only a share of the training time: soon after the first
step, then less and less often. `memory_checkpoint` asks it on rank 0, for all ranks."""

from __future__ import annotations

import math
import time

_EARLY_SHARE = 0.05
"""Share of the time since the generation began that copies may take before they are as rare as `CopyPace.share` demands."""
_MAX_INTERVAL = 1000  # steps between two copies


class CopyPace:
    """The copies of one generation.

    A failure costs the steps since the last copy. So the first copy is taken as soon as there is memory for it, whatever it takes. Each
    interval after it is up to twice as long as the one before, until a copy takes `share` of the time between two. Until then, all copies
    but the first together take at most `_EARLY_SHARE` of the time since the generation began.
    """

    def __init__(self, share: float, began: float | None = None):
        """`began`: when the generation did, as time.perf_counter() counts; None: now."""
        self.share, self._began = share, time.perf_counter() if began is None else began
        self._last: tuple[int, float] | None = None
        """Step and time of the last copy."""
        self._interval = 0
        """Steps between the last two copies."""
        self._cost: float | None = None
        """Seconds that training waited for the last copy; None: not known yet."""
        self._spent = 0.0
        """Seconds that it waited for all but the first."""

    def due(self, step: int, now: float) -> int:
        """The step after which the next copy is due, judged after `step`; `step` or less: now."""
        if self._last is None or self._cost is None:
            return step
        last, seconds = self._last[0], self._step_seconds(step, now)
        affordable = self._began + (self._spent + self._cost) / _EARLY_SHARE
        early = max(self._earliest(last), step + math.ceil((affordable - now) / seconds))
        return min(early, last + self._steady_interval(seconds))

    def begin(self, step: int, now: float) -> int:
        """A copy begins after `step`. Returns the first step after which another one may be due."""
        steady = _MAX_INTERVAL
        if self._last is not None:
            if self._cost is not None:
                steady = self._steady_interval(self._step_seconds(step, now))
            self._interval = step - self._last[0]
        self._last = step, now
        return min(self._earliest(step), step + steady)

    def end(self, cost: float) -> None:
        """The copy is complete; training has waited this many seconds for it."""
        if self._cost is not None:
            self._spent += cost
        self._cost = cost

    def _step_seconds(self, step: int, now: float) -> float:
        assert self._last is not None
        last, at = self._last
        return max((now - at) / max(step - last, 1), 1e-6)

    def _earliest(self, last: int) -> int:
        return last + max(1, 2 * self._interval)

    def _steady_interval(self, step_seconds: float) -> int:
        assert self._cost is not None
        return max(1, min(_MAX_INTERVAL, math.ceil(self._cost / (self.share * step_seconds))))
