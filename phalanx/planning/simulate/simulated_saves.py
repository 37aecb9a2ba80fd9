"""How often a simulated run saves, what a save costs, and how far the run gets in a given time, in closed form.

`planning/simulate/simulated_run` uses it between two failures, so that no step is simulated one by one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

StateSource = Literal["replicas", "memory", "disk"]
"""Where a run finds its state after a failure: on ranks that hold the same, in replicas in host memory, or on disk."""

_ROUNDING = 1e-6
"""Seconds of tolerance: rounding errors of months of simulated time must not hide that a step has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSchedule:
    """When a run saves and what that costs. Steps are numbered from 1; a save belongs to the step before it."""

    keep: StateSource
    memory_every: int | None
    """Steps between copies into host memory; None: no copies."""
    memory_stall: float
    """Seconds that training waits for one copy."""
    disk_every: int | None
    """Steps between checkpoints on disk; None: no checkpoints."""
    disk_stall: float
    """Seconds that training waits for one checkpoint."""
    disk_write: float = 0.0
    """Seconds after the stall until a checkpoint is complete; training continues meanwhile."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive steps of equal length after the completed step `first`."""

    saves: SaveSchedule
    first: int
    step: float
    """Seconds of one step."""

    def seconds_until(self, step: int) -> float:
        """Seconds until `step` is done, counted from the run's first step, including the saves after each step."""
        saves, steps = self.saves, step - self.first
        seconds = steps * self.step
        if saves.memory_every is not None:
            seconds += (step // saves.memory_every - self.first // saves.memory_every) * saves.memory_stall
        if saves.disk_every is not None:
            seconds += (step // saves.disk_every - self.first // saves.disk_every) * saves.disk_stall
        return seconds

    def step_after(self, seconds: float) -> int:
        """The last step that is done, with its saves, after `seconds`."""
        low, high = self.first, self.first + int(seconds / self.step) + 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.seconds_until(middle) <= seconds + _ROUNDING:
                low = middle
            else:
                high = middle - 1
        return low

    def stall_until(self, step: int) -> float:
        """Seconds that saves take until `step` is done."""
        return self.seconds_until(step) - (step - self.first) * self.step

    def last_saved(self, every: int | None, write: float, step: int, seconds: float) -> int | None:
        """The newest step with a complete save after `seconds`, when `step` is done; None if there is none since `first`."""
        if every is None:
            return None
        newest = step // every * every
        while newest > self.first and self.seconds_until(newest) + write > seconds + _ROUNDING:
            newest -= every
        return newest if newest > self.first else None
