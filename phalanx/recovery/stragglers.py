"""Learns from heartbeats, without a clock, how long phases of a step usually take: after how much silence a hang is suspected, and which
rank is persistently slow."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Mapping
from statistics import median

from phalanx.events.heartbeat import Beat

_STEPS = 30  # steps whose median is the usual duration
_SUSPICIOUS = 8.0  # a step that takes this many times the usual duration is suspicious
_COMPILE_SECONDS = 3600.0  # timeout of a compiler, which shows no progress
_RARE_SECONDS = 60.0  # least timeout of evaluating and saving, whose durations vary

_WINDOW = 20  # steps over which ranks are compared
_SLOW_STEPS = 15  # a rank that is slow in this many of them is a straggler
_RECOVERED_STEPS = 5  # a straggler that is slow in at most this many of them is one no longer
_CHANGE = 2.0  # a known straggler is reported again when its factor changes by this ratio


class ProgressTimeouts:
    """Timeouts for each phase, learned from the heartbeats of all ranks."""

    def __init__(self, timeout: float):
        """`timeout`: seconds for phases without a usual duration, such as building, restoring and the first step."""
        self._timeout = timeout
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._steps_taken = 0
        self._last: dict[int, Beat] = {}
        self._longest = {"evaluating": 0.0, "saving": 0.0}

    def restart(self) -> None:
        """Forget the duration of steps, for a new generation. Durations of evaluating and saving remain the best guess."""
        self._seconds.clear()
        self._steps_taken = 0

    def observe(self, rank: int, beat: Beat) -> None:
        before, self._last[rank] = self._last.get(rank), beat
        if before is None:
            return
        # Only an increase since the last heartbeat counts: a page may still show the previous generation.
        if beat.steps_taken < before.steps_taken:  # a new generation began without `restart`
            self._steps_taken = min(self._steps_taken, beat.steps_taken)
        if beat.steps_taken > before.steps_taken and beat.steps_taken > self._steps_taken:
            self._steps_taken = beat.steps_taken
            self._seconds.append(beat.step_seconds)
        if before.phase in self._longest and beat.since > before.since:
            self._longest[before.phase] = max(self._longest[before.phase], beat.since - before.since)

    @property
    def step(self) -> float | None:
        """Usual seconds of a step of this generation; None before the first."""
        return median(self._seconds) if self._seconds else None

    def timeout(self, phase: str, floor: float) -> float:
        """Seconds without progress in this phase after which a hang is suspected."""
        if phase == "compiling":
            return max(floor, self._timeout, _COMPILE_SECONDS)
        if self.step is None or phase in ("starting", "building", "restoring", "ending"):
            return max(floor, self._timeout)
        if phase in self._longest:
            return max(floor, _RARE_SECONDS, _SUSPICIOUS * self._longest[phase])
        return max(floor, _SUSPICIOUS * self.step)


class Stragglers:
    """Compares the compute time of ranks in each step. Waiting is not counted: the whole step takes all ranks equally long."""

    def __init__(self, factor: float, kinds: Mapping[int, Hashable] | None = None):
        """`factor`: how many times slower than the others a straggler is. `kinds`: rank to a value that is equal for ranks with equal
        work, such as the pipeline stage. A rank that is the only one of its kind is compared with all."""
        self._factor, self._kinds = factor, kinds or {}
        self._ratios: dict[int, deque[float]] = {}
        self._reported: dict[int, float] = {}

    def observe(self, busy: Mapping[int, float]) -> tuple[int, float] | None:
        """Add the compute seconds of all ranks in one step. Returns a straggler and its factor once it is certain, and again when the
        factor has changed much or the rank had been fast in between."""
        peers = self._peers(busy)
        for rank, seconds in busy.items():
            usual = _median_of_others(peers[self._kinds.get(rank)], seconds)
            self._ratios.setdefault(rank, deque(maxlen=_WINDOW)).append(seconds / usual if usual > 0 else 1.0)
        slow = [(rank, factor) for rank in busy if (factor := self._straggler_factor(rank)) is not None]
        if not slow:
            return None
        rank, factor = max(slow, key=lambda pair: pair[1])
        self._reported[rank] = factor
        return rank, factor

    def _straggler_factor(self, rank: int) -> float | None:
        ratios = self._ratios[rank]
        slow_steps = sum(ratio >= self._factor for ratio in ratios)
        if slow_steps <= _RECOVERED_STEPS:
            self._reported.pop(rank, None)
        if slow_steps < _SLOW_STEPS:
            return None
        # Of the newest steps: the window still contains how it was before.
        factor = median(list(ratios)[-_SLOW_STEPS:])
        reported = self._reported.get(rank)
        if reported is not None and reported / _CHANGE < factor < reported * _CHANGE:
            return None
        return factor

    def _peers(self, busy: Mapping[int, float]) -> dict[Hashable, list[float]]:
        """Sorted compute seconds of the ranks of each kind; of all ranks for a kind of one rank."""
        peers: dict[Hashable, list[float]] = {}
        for rank, seconds in busy.items():
            peers.setdefault(self._kinds.get(rank), []).append(seconds)
        return {kind: sorted(equal if len(equal) > 1 else busy.values()) for kind, equal in peers.items()}


def _median_of_others(ordered: list[float], own: float) -> float:
    """The median without one occurrence of `own`."""
    left = len(ordered) - 1
    if not left:
        return 0.0
    gap = bisect_left(ordered, own)

    def at(index: int) -> float:
        return ordered[index if index < gap else index + 1]

    return at(left // 2) if left % 2 else (at(left // 2 - 1) + at(left // 2)) / 2
