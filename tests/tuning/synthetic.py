"""A machine that exists only as numbers: sides take steps on a clock of their own, with seeded noise, and fail as a test has written down."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comparison.step_jobs import tiny_run

from phalanx.spec.plan import Machine
from phalanx.spec.run import Run
from phalanx.tuning.duel import TrialFailed
from phalanx.tuning.trial_run import Planner, Side, trial_run
from phalanx.tuning.tunable_keys import Dimension, Situation
from phalanx.tuning.tuner import TuneJob, Tuner, TuneResult

MACHINE = Machine(host="h", cpu="a CPU", cores=4, memory=64 << 30, core_flops=1e11)
LOSSES = (5.5, 5.3, 5.0)
STEP = 0.1


@dataclass
class SyntheticLive:
    bench: SyntheticBench
    side: Side
    luck: float
    """What this process is slower or faster by, whatever its settings are."""
    losses: tuple[float, ...] = LOSSES
    step_seconds: float = STEP
    start_seconds: float = 4.0
    warm_seconds: float = 4.0
    loading: float | None = None

    def take(self, steps: int, seconds: float) -> Sequence[float]:
        self.bench.fail(self.side, "step")
        if "hang" in self.side.name and self.bench.hangs == "step":
            self.bench.now += seconds
            raise TrialFailed(f"no answer within {seconds:.0f} s", timed_out=True)
        taken = [self.bench.step_seconds(self.side) * self.luck for _ in range(steps)]
        self.bench.now += sum(taken)
        return taken

    def close(self) -> None:
        self.bench.alive.remove(self)


@dataclass
class SyntheticBench:
    """`factor`: of the time of a step, by side. `noise`: standard deviation of the logarithm of one step. `luck`: the same of a process.
    `bursts`: part of the time in which the machine is three times slower."""

    factor: Callable[[Side], float] = lambda side: 1.0
    noise: float = 0.05
    luck: float = 0.0
    bursts: float = 0.0
    seed: int = 0
    failures: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """A word of a side's name to when it fails ("start" or "step") and the reason."""
    out_of_memory: bool = False
    """Whether they fail for lack of memory."""
    hangs: str = ""
    other_losses: Mapping[str, float] = field(default_factory=dict)
    start_seconds: float = 4.0
    now: float = 1000.0
    alive: list[SyntheticLive] = field(default_factory=list)
    started: list[str] = field(default_factory=list)
    room: int = 2
    """Sides that fit in memory together."""

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)
        self._burst_until = 0.0

    def fail(self, side: Side, when: str) -> None:
        for word, (at, reason) in self.failures.items():
            if word in side.name and at == when:
                raise TrialFailed(reason, out_of_memory=self.out_of_memory)

    def step_seconds(self, side: Side) -> float:
        if self.bursts and self.now > self._burst_until and self._dice.random() < self.bursts / 20:
            self._burst_until = self.now + self._dice.expovariate(1 / 2.0)
        busy = 3.0 if self.now < self._burst_until else 1.0
        return STEP * self.factor(side) * busy * math.exp(self._dice.gauss(0, self.noise))

    def start(self, side: Side, seconds: float) -> SyntheticLive:
        self.started.append(side.name)
        if self.hangs == "start" and "hang" in side.name:
            self.now += seconds
            raise TrialFailed(f"no answer within {seconds:.0f} s", timed_out=True)
        self.now += min(self.start_seconds, seconds)
        if self.start_seconds > seconds:
            raise TrialFailed(f"no answer within {seconds:.0f} s", timed_out=True)
        if len(self.alive) >= self.room:
            raise TrialFailed("out of memory", out_of_memory=True)
        self.fail(side, "start")
        loss = next((shift for word, shift in self.other_losses.items() if word in side.name), 0.0)
        live = SyntheticLive(self, side, math.exp(self._dice.gauss(0, self.luck)))
        live.losses = tuple(value * (1 + loss) for value in LOSSES)
        self.alive.append(live)
        return live


def options(*names: str) -> Dimension:
    """A dimension whose values are names that only the synthetic bench understands: the folder of the cache has no other effect."""

    def values(now: Situation) -> Iterator[Mapping[str, Any]]:
        for name in names:
            yield {"data.cache": name}

    return Dimension(key="data.cache", values=values)


def search(
    bench: SyntheticBench, *dimensions: Dimension, minutes: float = 60.0, fixed: frozenset[str] = frozenset(), **changes: Any
) -> TuneResult:
    tuner = Tuner(job(*dimensions, minutes=minutes, fixed=fixed), bench, lambda: bench.now, **changes)
    result = tuner.run()
    assert not bench.alive, "every process is ended"
    return result


def job(*dimensions: Dimension, minutes: float = 60.0, fixed: frozenset[str] = frozenset(), run: Run | None = None) -> TuneJob:
    one, machine = trial_run(run or tiny_run(), MACHINE)
    planner = Planner(machine)
    return TuneJob(
        defaults=planner.defaults(one),
        dimensions=dimensions,
        fixed=fixed,
        machine=machine,
        planner=planner,
        budget=60 * minutes,
        tolerance=1e-5,
    )
