"""How often a simulated run saves, what that costs, and how far it has come after some seconds, in closed form. `planning/simulate/simulated_run`
reads it between two failures: no step is simulated by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Keep = Literal["replicas", "memory", "disk"]
"""Where the state is found again: with ranks that hold the same, in copies in host memory, or on disk."""

_ROUNDING = 1e-6
"""Seconds: a moment that was computed as the end of a step must be found to be it, months after the run began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saves:
    """Steps are numbered from 1; a save belongs to the step that it follows."""

    keep: Keep
    memory_every: int | None
    """Steps between copies into host memory; None: none are made."""
    memory_stall: float
    """Seconds that training waits for one."""
    disk_every: int | None
    disk_stall: float
    disk_write: float = 0.0
    """Seconds after the stall until a checkpoint is complete, behind training."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Steps of one length after each other, from a step that is done."""

    saves: Saves
    first: int
    step: float
    """Seconds of one."""

    def reached(self, steps: int) -> float:
        """Seconds until so many steps are done (counted from the run's first), with the saves that follow them."""
        s, n = self.saves, steps - self.first
        seconds = n * self.step
        if s.memory_every is not None:
            seconds += (steps // s.memory_every - self.first // s.memory_every) * s.memory_stall
        if s.disk_every is not None:
            seconds += (steps // s.disk_every - self.first // s.disk_every) * s.disk_stall
        return seconds

    def after(self, seconds: float) -> int:
        """The last step that is done, its saves too, after so many seconds."""
        low, high = self.first, self.first + int(seconds / self.step) + 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.reached(middle) <= seconds + _ROUNDING:
                low = middle
            else:
                high = middle - 1
        return low

    def stalled(self, steps: int) -> float:
        """Seconds of saving among those until so many are done."""
        return self.reached(steps) - (steps - self.first) * self.step

    def saved(self, every: int | None, write: float, steps: int, seconds: float) -> int | None:
        """The newest step that is safe after so many seconds, `steps` being done; None: none since the first."""
        if every is None:
            return None
        newest = steps // every * every
        while newest > self.first and self.reached(newest) + write > seconds + _ROUNDING:
            newest -= every
        return newest if newest > self.first else None
