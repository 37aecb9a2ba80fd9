"""The search of `phalanx tune`: one dimension after the other, the best side so far against a changed one, under a budget of time. What is
kept was faster beyond noise twice, the second time with new processes on both sides, with the same losses; at the end the result meets the
defaults once more. Pure but for the `Bench` that measures and the clock, so that a test can put others in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal, NamedTuple

from phalanx.planning.feedback import Measured
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Machine
from phalanx.spec.run import Run
from phalanx.tuning.duel import (
    Bench,
    Duel,
    DuelLost,
    DuelResult,
    Live,
    LossesDiffer,
    Measurement,
    Role,
    expected_seconds,
    turn_steps,
)
from phalanx.tuning.paired_ratio import MIN_GAIN, Ratio
from phalanx.tuning.trial_run import Changes, Planner, Side, with_keys, words_of
from phalanx.tuning.tunable_keys import Dimension, Situation, obeyed

_ROOM = 0.9
"""Part of the memory that two sides may fill together, by the plan's promise, to stay alive at the same time."""
_LATELY = 3
"""Starts of sides that tell how long the next one takes."""
_PREDICTED_SLOWER = 1.25
"""Predicted time of a step over that of the base from which on a candidate is not tried. Most errors of the two predictions are the same."""
Outcome = Literal["kept", "not faster", "losses differ", "failed", "ruled out", "not tried", "out of time", "not repeated"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """One candidate and what became of it."""

    number: int
    """0: it was never started."""
    key: str
    """The dimension."""
    changes: Changes
    outcome: Outcome
    reason: str
    ratio: Ratio | None = None
    """Of the last duel, the repeat if there was one; None: nothing was measured."""
    seconds: float = 0.0
    """What it took."""

    @property
    def name(self) -> str:
        return ", ".join(map(words_of, self.changes.items()))


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneResult:
    """What a search has found."""

    defaults: Side
    best: Side
    """The defaults, if nothing was kept."""
    confirmation: DuelResult | None
    """The best against the defaults, with new processes; None: nothing was kept, or it did not come to that."""
    unconfirmed: str | None
    """Why what was kept is not the best after all."""
    trials: tuple[Trial, ...]
    measurements: tuple[Measurement, ...]
    interrupted: bool
    seconds: float
    steps: tuple[Measured, ...]
    """Typical times of a step of every side that was measured, for the plan."""

    @property
    def kept(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.outcome == "kept")

    @property
    def changed(self) -> bool:
        """Whether the result differs from the defaults."""
        return bool(self.best.changes)

    @property
    def keys(self) -> Changes:
        """The chosen keys by their dotted names; "layout" is a whole Layout."""
        return dict(self.best.changes)

    def apply(self, run: Run) -> Run:
        """The run with the chosen keys."""
        return with_keys(run, self.best.changes)


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneJob:
    """What to search, and where."""

    defaults: Side
    dimensions: Sequence[Dimension]
    fixed: frozenset[str]
    machine: Machine
    planner: Planner
    budget: float
    """Seconds."""
    tolerance: float
    """Largest relative difference of a loss that rounding explains."""


class _Terms(NamedTuple):
    """How a duel is held."""

    stage: str
    """"trial", "repeat" or "confirmation"."""
    steps: int
    """Counted steps of a turn."""
    fresh: bool
    """Every turn is a new process."""


@dataclass
class Tuner:
    """Runs a search. `on_status` receives what is going on, `on_trial` every finished trial."""

    job: TuneJob
    bench: Bench
    clock: Callable[[], float]
    on_status: Callable[[str], None] = lambda status: None
    on_trial: Callable[[Trial], None] = lambda trial: None
    _trials: list[Trial] = field(default_factory=list)
    _measurements: list[Measurement] = field(default_factory=list)
    _first_winner: tuple[Side, DuelResult] | None = None
    """The first side that was kept, and its duel with the defaults, with new processes."""
    _alive: Live | None = None
    """The best side so far, after its warm-up; None where sides do not fit in memory together."""
    _numbers: int = 0
    _times: dict[str, tuple[Side, list[float]]] = field(default_factory=dict)
    _seen: list[Run] = field(default_factory=list)
    """Runs that were measured or ruled out."""

    def run(self) -> TuneResult:
        """Searches until all is tried, the time is up or the user interrupts. TrialFailed if the defaults themselves do not run."""
        self._begun, self._best = self.clock(), self.job.defaults
        self._end = self._begun + self.job.budget
        interrupted, confirmation = False, None
        self._unconfirmed: str | None = None
        try:
            self._start_defaults()
            for dimension in self.job.dimensions:
                self._vary(dimension)
            confirmation = self._confirm() if self._best.changes else None
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._replace(None)
        return TuneResult(
            defaults=self.job.defaults,
            best=self._best,
            confirmation=confirmation,
            unconfirmed=self._unconfirmed,
            trials=tuple(self._trials),
            measurements=tuple(self._measurements),
            interrupted=interrupted,
            seconds=self.clock() - self._begun,
            steps=tuple(Measured(run=side.run, plan=side.plan, seconds=median(times)) for side, times in self._times.values()),
        )

    # The defaults.

    def _start_defaults(self) -> None:
        self.on_status("defaults: starting")
        live = self.bench.start(self.job.defaults, self.job.budget)
        self._losses, self._step, self._starts = live.losses, live.step_seconds, [live]
        self._loading = live.loading
        self._turn = turn_steps(self._step)
        self._seen.append(self.job.defaults.run)
        self._replace(live)

    def _replace(self, live: Live | None) -> None:
        """Has another side stay alive as the base."""
        if self._alive is not None and self._alive is not live:
            self._alive.close()
        self._alive = live

    # One dimension.

    def _vary(self, dimension: Dimension) -> None:
        """Tries the values of a dimension, then those next to a winner."""
        if keys := obeyed(dimension, self.job.fixed):
            self._skip(dimension, {}, "not tried", f"the run file sets {', '.join(keys)}")
            return
        while (changes := self._next_value(dimension)) is not None:
            self._try(dimension, changes)

    def _next_value(self, dimension: Dimension) -> Changes | None:
        now = Situation(base=self._best, machine=self.job.machine, fixed=self.job.fixed, loading=self._loading)
        for changes in dimension.values(now):
            run = with_keys(self._best.run, changes)
            if run not in self._seen:
                self._seen.append(run)
                return changes
        return None

    def _skip(self, dimension: Dimension, changes: Changes, outcome: Outcome, reason: str) -> None:
        self._end_trial(Trial(number=0, key=dimension.key, changes=changes, outcome=outcome, reason=reason))

    def _end_trial(self, trial: Trial) -> None:
        self._trials.append(trial)
        self.on_trial(trial)

    def _try(self, dimension: Dimension, changes: Changes) -> None:
        """One candidate, unless the plan rules it out or it cannot be finished in time."""
        try:
            side = self.job.planner.changed(self._best, changes)
        except RunError as error:
            self._skip(dimension, changes, "ruled out", error.problems[0])
            return
        if reason := _predicted_slower(self._best, side):
            self._skip(dimension, changes, "ruled out", reason)
            return
        steps = turn_steps(self._step, side.run.data.prefetch if "data.prefetch" in changes else 0)
        fresh = not self._fit_together(side)
        begun = self.clock()
        needed = self._duel_seconds(steps, 1, fresh) + (0.0 if fresh else self._duel_seconds(steps, 2, fresh))
        left = self._end - self._reserve - begun
        if needed > left:
            reason = f"{max(left, 0.0):.0f} s were left, and it may take {needed:.0f} s: raise --minutes"
            self._skip(dimension, changes, "out of time", reason)
            return
        self._numbers += 1
        made = Trial(number=self._numbers, key=dimension.key, changes=changes, outcome="failed", reason="")
        made = self._measure(made, side, steps, fresh=fresh)
        self._end_trial(replace(made, seconds=self.clock() - begun))

    @property
    def _reserve(self) -> float:
        """Seconds of the confirmation."""
        if not self._best.changes:
            return 0.0  # the repeat of the first winner is one
        return self._duel_seconds(self._turn, 2, not self._fit_together(self.job.defaults))

    @property
    def _start(self) -> float:
        """Seconds until a new side has warmed up, as long as it took lately."""
        return max(live.start_seconds for live in self._starts[-_LATELY:])

    @property
    def _restart(self) -> float:
        """The same of a side that has been started before."""
        return max(live.warm_seconds for live in self._starts[-_LATELY:])

    def _duel_seconds(self, steps: int, starts: int, fresh: bool) -> float:
        start = self._start if starts == 1 else self._restart
        return expected_seconds(start, self._step, steps, starts=starts, fresh=fresh)

    def _fit_together(self, side: Side) -> bool:
        machine, device = self.job.machine, side.plan.device
        memory = machine.memory if device == "cpu" else min(gpu.memory for gpu in machine.gpus)
        return side.device_bytes + self._best.device_bytes <= _ROOM * memory

    # One candidate.

    def _measure(self, made: Trial, side: Side, steps: int, *, fresh: bool) -> Trial:
        """The duel and, with new processes, the repeat of one that is won."""
        try:
            result = self._duel(made, side, _Terms("trial", steps, fresh))
            if result.faster and not fresh:
                result = replace(self._duel(made, side, _Terms("repeat", steps, fresh)), repeated=True)
        except LossesDiffer as differ:
            return replace(made, outcome="losses differ", reason=differ.reason)
        except DuelLost as lost:
            if lost.failed.out_of_memory and not fresh:  # perhaps because two sides are alive
                return self._measure_alone(made, side, steps)
            whose = "" if lost.role == "candidate" else "the base failed meanwhile: "
            return replace(made, outcome="failed", reason=whose + lost.failed.reason)
        if result.faster:
            if not self._best.changes:
                self._first_winner = side, result
            self._best, self._step = side, self._step * result.ratio.median
            self._turn = turn_steps(self._step)
        return replace(made, ratio=result.ratio, **_outcome(result))

    def _measure_alone(self, made: Trial, side: Side, steps: int) -> Trial:
        """The same with a new process for each turn, if there is time for it."""
        if self.clock() + self._duel_seconds(steps, 2, fresh=True) + self._reserve > self._end:
            reason = "out of memory next to the base, and no time to measure it alone: raise --minutes"
            return replace(made, outcome="out of time", reason=reason)
        return self._measure(made, side, steps, fresh=True)

    def _duel(self, made: Trial, side: Side, terms: _Terms) -> DuelResult:
        """A duel with the best so far. Its process stays alive if it wins, and that of the candidate after a repeat; before a repeat,
        nothing stays. DuelLost if a side fails, LossesDiffer."""
        repeats = terms.stage == "trial" and not terms.fresh
        if terms.fresh:
            self._replace(None)
        base = self._alive
        alive: dict[Role, Live] = {} if base is None else {"base": base}
        reserved = self._reserve + (self._duel_seconds(terms.steps, 2, terms.fresh) if repeats else 0.0)
        duel = self._make_duel(made, {"base": self._best, "candidate": side}, alive, terms, self._end - reserved)
        keep: Role | None = "base"
        try:
            result = duel.run()
            if result.faster:
                keep = None if repeats else "candidate"
            return result
        except DuelLost as lost:
            keep = "base" if lost.role == "candidate" else None
            raise
        except KeyboardInterrupt:
            keep = None
            raise
        finally:
            self._alive = None if keep is None else alive.pop(keep, None)
            for live in alive.values():
                live.close()

    def _make_duel(self, made: Trial, sides: dict[Role, Side], alive: dict[Role, Live], terms: _Terms, deadline: float) -> Duel:
        self.on_status(f"{made.name}: {terms.stage}")

        def record(pair: int, role: Role, position: int, seconds: float) -> None:
            side = sides[role]
            self._times.setdefault(side.name, (side, []))[1].append(seconds)
            self._measurements.append(
                Measurement(
                    trial=made.number,
                    stage=terms.stage,
                    candidate=made.name,
                    role=role,
                    setting=side.name,
                    pair=pair + 1,
                    position=position,
                    steps=terms.steps,
                    seconds=seconds,
                )
            )

        def show(ratio: Ratio) -> None:
            self.on_status(f"{made.name}: {terms.stage}, pair {ratio.pairs}: {ratio.words} of time a step")

        return Duel(
            bench=self.bench,
            sides=sides,
            alive=alive,
            fresh=terms.fresh,
            steps=terms.steps,
            step_seconds=self._step,
            start_seconds=self._start,
            on_start=self._starts.append,
            now=self.clock,
            deadline=deadline,
            losses=self._losses,
            tolerance=self.job.tolerance,
            record=record,
            on_pair=show,
        )

    # The end.

    def _confirm(self) -> DuelResult | None:
        """The best against the defaults, with new processes. What is not faster beyond noise is given up. Where the time is too short for
        that, the first winner stays, which has met the defaults already."""
        assert self._first_winner is not None, "something was kept"
        self._replace(None)
        first, result = self._first_winner
        if first is self._best:
            return result
        best, defaults = self._best, self.job.defaults
        terms = _Terms("confirmation", self._turn, fresh=not self._fit_together(defaults))
        made = Trial(number=0, key="", changes=best.changes, outcome="kept", reason="")
        alive: dict[Role, Live] = {}
        duel = self._make_duel(made, {"base": defaults, "candidate": best}, alive, terms, self._end)
        try:
            found = duel.run()
        except DuelLost as lost:
            found = None
            self._unconfirmed = f"{best.name}: the confirmation failed: {lost.failed.reason}"
        finally:
            for live in alive.values():
                live.close()
        if found is not None and not found.faster and not found.out_of_time:
            self._best = defaults
            self._unconfirmed = f"{best.name}: {found.ratio.words} of time a step in the confirmation, not faster beyond noise"
        elif found is None or found.out_of_time:
            self._best = first
            self._unconfirmed = self._unconfirmed or f"{best.name}: no time was left to confirm them: raise --minutes"
            return result
        return found


def _outcome(result: DuelResult) -> dict[str, Any]:
    """What a duel says about a candidate."""
    if result.faster:
        return {"outcome": "kept", "reason": f"{1 - result.ratio.median:.1%} less time a step"}
    if result.repeated and not result.out_of_time:
        return {"outcome": "not repeated", "reason": "faster at first, but not again with new processes"}
    if result.out_of_time:
        return {"outcome": "out of time", "reason": "the time was up before it was clear: raise --minutes"}
    if result.ratio.median <= 1 - MIN_GAIN:
        return {"outcome": "not faster", "reason": "not beyond noise"}
    slower = result.ratio.low > 1
    return {"outcome": "not faster", "reason": "slower" if slower else "not faster"}


def _predicted_slower(base: Side, side: Side) -> str | None:
    """Why the plan rules a candidate out by its time."""
    before, after = base.plan.promise, side.plan.promise
    if before is None or after is None or after.seconds <= _PREDICTED_SLOWER * before.seconds:
        return None
    return f"the plan predicts {after.seconds / before.seconds - 1:.0%} more time a step"
