"""A duel: base and candidate take turns until their times tell which is faster, or nothing more can be learned. Where both fit in memory,
their processes stay alive and take turns; otherwise every turn is a new process. `tuning/tuner` decides which duels there are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from phalanx.tuning.paired_ratio import ALIVE, FRESH, Looks, Ratio, ratio_of
from phalanx.tuning.trial_run import Side

_TURN_SECONDS = 0.5
WARM_UP = 8
"""Steps before the measured ones, whose losses are compared. In the first six, code is compiled, a step is accounted, some are timed by part
and CUDA graphs are recorded."""
_MIN_STEPS, _MAX_STEPS = 2, 50
"""Steps of a turn that count. One more before them fills caches that the other side has used."""
_PER_PREFETCHED = 3
"""A turn has this many steps for each batch that is prepared in advance, so that those prepared in a pause do not decide."""
_PATIENCE = 30.0
_SLOWER = 20.0
"""A turn that takes longer than both, the seconds and the multiple of the expected time, counts as hanging."""
_START_PATIENCE = 120.0
_SLOWER_START = 6.0
"""The same for the start of a side, which may compile its blocks."""
_COUNTED_AS = 1.2
"""A duel is expected to take this many times as long as its turns: nothing is as quiet as the first steps."""

Role = Literal["base", "candidate"]


class TrialFailed(Exception):
    """A side could not be built, or could not go on."""

    def __init__(self, reason: str, *, out_of_memory: bool = False, timed_out: bool = False):
        super().__init__(reason)
        self.reason, self.out_of_memory, self.timed_out = reason, out_of_memory, timed_out


class Live(Protocol):
    """A side whose processes are alive."""

    losses: tuple[float, ...]
    """Of the first steps, which warm up."""
    step_seconds: float
    """Of the last steps of the warm-up."""
    start_seconds: float
    """From its start to the end of the warm-up, without the time that its steps usually take."""
    warm_seconds: float
    """What it may take the next time, when its code is compiled already."""
    loading: float | None
    """Part of a step spent waiting for the batch; None: not measured."""

    def take(self, steps: int, seconds: float) -> Sequence[float]:
        """Seconds of further steps. TrialFailed after so many seconds, or if a rank fails."""
        ...

    def close(self) -> None:
        """Ends its processes."""
        ...


class Bench(Protocol):
    """Starts sides. A test has its own."""

    def start(self, side: Side, seconds: float) -> Live:
        """The side after its warm-up. TrialFailed after so many seconds, or if a rank fails."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """One turn, a row of trials.csv."""

    trial: int
    stage: str
    """"trial", "repeat" or "confirmation"."""
    candidate: str
    role: Role
    setting: str
    pair: int
    position: int
    """0: the first turn of its pair."""
    steps: int
    seconds: float
    """Mean time of a step."""


class LossesDiffer(Exception):
    """The candidate computes something else."""

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason


class DuelLost(Exception):
    """A side failed."""

    def __init__(self, role: Role, failed: TrialFailed):
        super().__init__(failed.reason)
        self.role, self.failed = role, failed


@dataclass(frozen=True, kw_only=True, slots=True)
class DuelResult:
    """How a duel has ended."""

    ratio: Ratio
    faster: bool
    """The candidate is faster beyond noise, at one of the looks."""
    out_of_time: bool = False
    repeated: bool = False
    """It is the second one of its candidate."""


@dataclass
class Duel:
    """Two sides that take turns. `alive` holds the processes that exist already and those that stay; its owner closes them."""

    bench: Bench
    sides: dict[Role, Side]
    alive: dict[Role, Live]
    fresh: bool
    """Every turn is a new process."""
    steps: int
    """Counted steps of a turn."""
    step_seconds: float
    """Expected time of a step."""
    start_seconds: float
    """Expected time until a side has warmed up, as in `Live`."""
    now: Callable[[], float]
    deadline: float
    """When it must have ended."""
    losses: tuple[float, ...]
    """Of the first steps of the defaults."""
    tolerance: float
    """Largest relative difference of a loss that rounding explains."""
    record: Callable[[int, Role, int, float], None] = lambda pair, role, position, seconds: None
    on_pair: Callable[[Ratio], None] = lambda ratio: None
    on_start: Callable[[Live], None] = lambda live: None
    pairs: list[tuple[float, float]] = field(default_factory=list)

    @property
    def looks(self) -> Looks:
        return FRESH if self.fresh else ALIVE

    def run(self) -> DuelResult:
        """Takes pairs of turns until a look decides or the time is up. DuelLost if a side fails, LossesDiffer."""
        if not self.fresh:
            for role in self.sides:
                self._open(role)
        while True:
            self._pair(len(self.pairs))
            ratio = ratio_of(self.pairs)
            self.on_pair(ratio)
            verdict = self.looks.verdict(self.pairs)
            if verdict != "go on":
                return DuelResult(ratio=ratio, faster=verdict == "faster")
            count, ends = len(self.pairs), self.looks.at
            more = next(end for end in ends if end > count) - count if count in ends else 1  # half a look says nothing
            if self.now() + more * self.pair_seconds > self.deadline:
                return DuelResult(ratio=ratio, faster=False, out_of_time=True)

    @property
    def pair_seconds(self) -> float:
        turns = 2 * (self.steps + 1) * self.step_seconds
        return turns + 2 * (self.start_seconds + WARM_UP * self.step_seconds) if self.fresh else turns

    def _pair(self, number: int) -> None:
        order: tuple[Role, Role] = ("base", "candidate")
        if number % 2:  # a steady drift affects both alike
            order = ("candidate", "base")
        taken: dict[Role, float] = {}
        for position, role in enumerate(order):
            taken[role] = self._turn(role)
            self.record(number, role, position, taken[role])
        self.pairs.append((taken["base"], taken["candidate"]))

    def _turn(self, role: Role) -> float:
        """Mean time of a step in one turn."""
        live = self._open(role)
        try:
            expected = (self.steps + 1) * max(self.step_seconds, live.step_seconds)
            seconds = live.take(self.steps + 1, max(_PATIENCE, _SLOWER * expected))[1:]
        except TrialFailed as failed:
            raise DuelLost(role, failed) from None
        finally:
            if self.fresh:
                self.alive.pop(role).close()
        return math.fsum(seconds) / len(seconds)

    def _open(self, role: Role) -> Live:
        if role not in self.alive:
            patience = max(_START_PATIENCE, _SLOWER_START * (self.start_seconds + WARM_UP * self.step_seconds))
            left = self.deadline - self.now()
            try:
                self.alive[role] = self.bench.start(self.sides[role], max(min(patience, left), 1.0))
            except TrialFailed as failed:
                if failed.timed_out and left < patience:
                    failed = TrialFailed(f"not ready within the {left:.0f} s that were left for it: raise --minutes")
                raise DuelLost(role, failed) from None
            self.on_start(self.alive[role])
            if role == "candidate":
                self._check_losses(self.alive[role].losses)
        return self.alive[role]

    def _check_losses(self, losses: tuple[float, ...]) -> None:
        for step, (found, expected) in enumerate(zip(losses, self.losses, strict=True), start=1):
            apart = abs(found - expected) / max(abs(expected), 1e-30)
            if not apart <= self.tolerance:
                raise LossesDiffer(f"the loss of step {step} differs by {apart:.1e}; rounding explains {self.tolerance:.0e}")


def turn_steps(step_seconds: float, prefetch: int = 0) -> int:
    """Counted steps of a turn. `prefetch`: of the side that prepares more batches, in a duel about that."""
    steps = min(max(math.ceil(_TURN_SECONDS / step_seconds), _MIN_STEPS), _MAX_STEPS)
    return max(steps, _PER_PREFETCHED * prefetch)


def expected_seconds(start_seconds: float, step_seconds: float, steps: int, *, starts: int, fresh: bool) -> float:
    """How long a duel takes that is decided at its first look. `starts`: new processes, if they stay alive."""
    pairs = (FRESH if fresh else ALIVE).at[0]
    turns = pairs * 2 * (steps + 1) * step_seconds
    return _COUNTED_AS * (turns + (2 * pairs if fresh else starts) * (start_seconds + WARM_UP * step_seconds))
