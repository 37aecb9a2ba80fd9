"""How long things usually take, and who takes longer: after how much silence a hang is suspected, and which rank is persistently slow.
The supervisor feeds both with what it reads off the ranks' pulses; neither knows a clock."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Mapping
from statistics import median
from typing import Protocol

_STEPS = 30
"""Steps that the usual time of one is taken from."""
_TIMES = 8.0
"""So many times the usual is suspicious."""
_RARE = 60.0
"""Seconds that an evaluation or a save may take at least: they differ from one to the next."""

_WINDOW = 20
"""Steps over which a rank must be slow to be named."""
_MOST = 15
"""In so many of them."""
_FEW = 5
"""In at most so many of them, it is slow no more."""
_CHANGED = 2.0
"""A rank that is known to be slow is named again when it is so many times slower, or faster, than was said."""


class Beat(Protocol):
    """What a rank's pulse has to say (`events/heartbeat`)."""

    @property
    def phase(self) -> str: ...
    @property
    def since(self) -> float: ...
    @property
    def step_seconds(self) -> float: ...
    @property
    def taken(self) -> int: ...


class ProgressTimeouts:
    """Learns from looks at the ranks, each as often as one likes."""

    def __init__(self, timeout: float):
        """`timeout`: seconds that a rank may take for what has no usual time: to be built, to restore, to compile in its first step."""
        self._timeout = timeout
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._taken = 0
        self._last: dict[int, Beat] = {}
        self._longest = {"evaluating": 0.0, "saving": 0.0}

    def begin(self) -> None:
        """A generation begins: other ranks, perhaps another layout. What evaluating and saving took is still the best guess."""
        self._seconds.clear()
        self._taken = 0

    def see(self, rank: int, beat: Beat) -> None:
        before, self._last[rank] = self._last.get(rank), beat
        if before is None:
            return
        # More than at the last look: whatever a page may still show of the generation before does not count.
        if beat.taken < before.taken:  # a generation has begun, whether or not that was said
            self._taken = min(self._taken, beat.taken)
        if beat.taken > before.taken and beat.taken > self._taken:
            self._taken = beat.taken
            self._seconds.append(beat.step_seconds)
        if before.phase in self._longest and beat.since > before.since:
            self._longest[before.phase] = max(self._longest[before.phase], beat.since - before.since)

    @property
    def step(self) -> float | None:
        """Seconds of a usual step of this generation; None before its first."""
        return median(self._seconds) if self._seconds else None

    def patience(self, phase: str, floor: float) -> float:
        """Seconds without progress in this phase after which ranks should be asked where they are."""
        if self.step is None or phase in ("starting", "building", "restoring", "ending"):
            return max(floor, self._timeout)
        if phase in self._longest:
            return max(floor, _RARE, _TIMES * self._longest[phase])
        return max(floor, _TIMES * self.step)


class Stragglers:
    """Compares what ranks have worked in each step, without their waiting: the whole step takes all of them the same time."""

    def __init__(self, factor: float, alike: Mapping[int, Hashable] | None = None):
        """`peer_index`: ranks that have the same to do have the same here, such as the number of their pipeline stage. A rank that is the
        only one of its kind is compared with all."""
        self._factor, self._alike = factor, alike or {}
        self._ratios: dict[int, deque[float]] = {}
        self._named: dict[int, float] = {}

    def see(self, busy: Mapping[int, float]) -> tuple[int, float] | None:
        """Seconds of work of every rank in one step. Returns a rank that has proved to be slow, and how many times: once, and again
        when that has changed much or after it was as fast as others."""
        kinds = self._kinds(busy)
        for rank, seconds in busy.items():
            usual = _middle_of_others(kinds[self._alike.get(rank)], seconds)
            self._ratios.setdefault(rank, deque(maxlen=_WINDOW)).append(seconds / usual if usual > 0 else 1.0)
        slow = [found for rank in busy if (found := self._judge(rank)) is not None]
        if not slow:
            return None
        rank, factor = max(slow, key=lambda pair: pair[1])
        self._named[rank] = factor
        return rank, factor

    def _judge(self, rank: int) -> tuple[int, float] | None:
        ratios = self._ratios[rank]
        above = [ratio for ratio in ratios if ratio >= self._factor]
        if len(above) <= _FEW:
            self._named.pop(rank, None)
        if len(above) < _MOST:
            return None
        # Of the newest: the window still remembers how it was before.
        factor = median(list(ratios)[-_MOST:])
        known = self._named.get(rank)
        if known is not None and known / _CHANGED < factor < known * _CHANGED:
            return None
        return rank, factor

    def _kinds(self, busy: Mapping[int, float]) -> dict[Hashable, list[float]]:
        """What the ranks of each kind have worked, in order; a kind of one rank stands for all."""
        found: dict[Hashable, list[float]] = {}
        for rank, seconds in busy.items():
            found.setdefault(self._alike.get(rank), []).append(seconds)
        return {kind: sorted(alike if len(alike) > 1 else busy.values()) for kind, alike in found.items()}


def _middle_of_others(ordered: list[float], own: float) -> float:
    """The median without one of the values."""
    left = len(ordered) - 1
    if not left:
        return 0.0
    gap = bisect_left(ordered, own)

    def at(index: int) -> float:
        return ordered[index if index < gap else index + 1]

    return at(left // 2) if left % 2 else (at(left // 2 - 1) + at(left // 2)) / 2
