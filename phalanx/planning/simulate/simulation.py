"""Simulates a whole run many times: its goodput, when it ends, how many spare nodes pay off, how often to save.

`phalanx simulate` calls `simulate`; `planning/simulate/simulated_run` simulates each run with the live recovery policy.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.search.candidate import Candidate
from phalanx.planning.simulate.cluster_model import DAY, ClusterModel, EvaluateLayout, SimulationRequest
from phalanx.planning.simulate.simulated_policy import FaultSampler
from phalanx.planning.simulate.simulated_run import TIME_USES, Scenario, Trial, run_trial
from phalanx.planning.simulate.simulated_saves import StateSource
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run

_STUDY_RUNS = 6
"""Runs for each number of spares and each interval: they meet the same failures, so a few runs are enough to compare them."""
_AROUND = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)
"""Intervals to try, as multiples of the closed form's best."""


@dataclass(frozen=True, slots=True)
class Band:
    """Mean, P10 and P90 over the simulated runs."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Variation:
    """The same simulation with another interval or another number of spares."""

    value: float
    """Seconds, or nodes."""
    goodput: float
    closed: float | None
    """Goodput of the closed form, which assumes enough nodes."""
    days: float
    """Days of the whole run."""
    cost: float
    """Cost of the whole run with all nodes, in US dollars; in device-hours if no price is known (`SimulationReport.priced`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationReport:
    """The result of a simulation. The dashboard and `--json` render it."""

    candidate: Candidate
    ranks: int
    runs: int
    nodes: int
    spares: int
    keep: StateSource
    interval: float | None
    """Seconds of training between saves; None: other ranks hold the state, and failures need no saves."""
    mtbf: float | None
    """Mean seconds between failures; None: nothing fails."""
    goodput: Band
    finish: Band
    """Days until the last step."""
    closed: float
    """Goodput of the closed form for the same rates, interval, stall and restart."""
    best: float | None
    """Best interval of the closed form."""
    failures: Mapping[str, float]
    """Failures of one run, by component."""
    actions: Mapping[str, float]
    """Decisions of one run: restart, spare, shrink, grow, wait, end, maintenance."""
    spent: Mapping[str, float]
    """Fractions of the time, by `TIME_USES`."""
    intervals: tuple[Variation, ...]
    spare_nodes: tuple[Variation, ...]
    pays: int | None
    """Number of spare nodes with which the whole run costs least."""
    priced: bool
    trial: Trial
    """The first run, with its timeline."""
    decisions: int
    """Decisions of the live policy."""
    seconds: float
    """CPU time of the simulation."""
    assumptions: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `phalanx simulate --json` prints."""
        return {
            "ranks": self.ranks,
            "nodes": self.nodes,
            "spares": self.spares,
            "keep": self.keep,
            "closed": self.closed,
            "failures": self.failures,
            "actions": self.actions,
            "spent": self.spent,
            "pays": self.pays,
            "priced": self.priced,
            "decisions": self.decisions,
            "assumed": self.assumptions,
            "goodput": self.goodput.mean,
            "goodput_p10": self.goodput.low,
            "goodput_p90": self.goodput.high,
            "finish_days": self.finish.mean,
            "finish_days_p10": self.finish.low,
            "finish_days_p90": self.finish.high,
            "intervals": [asdict(variation) for variation in self.intervals],
            "spare_nodes": [asdict(variation) for variation in self.spare_nodes],
            "interval_seconds": self.interval,
            "best_interval_seconds": self.best,
            "mtbf_seconds": self.mtbf,
            "step_seconds": self.candidate.seconds,
            "layout": asdict(self.candidate.layout),
            "cpu_seconds": self.seconds,
            "simulated_days": self.trial.seconds / DAY,
            "runs": self.runs,
        }


def simulate(
    run: Run, hardware: Hardware, candidate: Candidate, request: SimulationRequest, evaluate: EvaluateLayout
) -> SimulationReport:
    """Simulates a run on the layout `candidate`; `evaluate` plans it on the other layouts that recovery may choose."""
    start = time.process_time()
    _check(hardware, candidate, request)
    model = ClusterModel(run, hardware, candidate, request, evaluate)
    scenario = model.scenario
    trials = [run_trial(scenario, FaultSampler(request.seed, number)) for number in range(request.runs)]
    study = _Study(model, hardware, request)
    intervals, spares = (study.intervals(), study.spares()) if request.study else ((), ())
    return SimulationReport(
        candidate=candidate,
        ranks=candidate.layout.ranks,
        runs=request.runs,
        nodes=scenario.nodes,
        spares=scenario.nodes - model.used,
        keep=model.keep,
        interval=model.interval,
        mtbf=model.mtbf if math.isfinite(model.mtbf) else None,
        goodput=_band([trial.goodput for trial in trials]),
        finish=_band([model.days(trial) for trial in trials]),
        closed=model.closed_form_goodput(model.interval),
        best=model.best,
        failures=_mean(trial.components for trial in trials),
        actions=_mean(trial.actions for trial in trials),
        spent={name: sum(trial.spent[name] for trial in trials) / sum(trial.seconds for trial in trials) for name in TIME_USES},
        intervals=intervals,
        spare_nodes=spares,
        pays=int(min(spares, key=lambda variation: (variation.cost, variation.value)).value) if spares else None,
        priced=hardware.price is not None,
        trial=trials[0],
        decisions=scenario.cache.decided,
        seconds=time.process_time() - start,
        assumptions=model.assumptions(),
    )


def _check(hardware: Hardware, candidate: Candidate, request: SimulationRequest) -> None:
    options = {"--days": request.days, "--interval": request.interval, "--runs": request.runs}
    problems = [
        f"{name} {value}: give a number above 0." for name, value in options.items() if value is not None and not value > 0
    ]
    if request.spares is not None and request.spares < 0:
        problems.append(f"--spares {request.spares}: give 0 or more nodes.")
    if request.maintenance is not None and request.maintenance[1] >= request.maintenance[0]:
        problems.append(
            "--maintenance: a pause must be shorter than the time between two pauses: give interval and length, such as 7d/4h."
        )
    if candidate.layout.ranks > hardware.gpus:
        problems.append(
            f"The layout has {candidate.layout.ranks:,} ranks but the cluster has {hardware.gpus:,} devices: "
            "set cluster.gpus to at least the number of ranks, or remove layout.data."
        )
    if problems:
        raise RunError(problems)


class _Study:
    """Repeats a simulation with other intervals and other numbers of spares."""

    def __init__(self, model: ClusterModel, hardware: Hardware, request: SimulationRequest):
        self._model, self._hardware, self._request = model, hardware, request

    def intervals(self) -> tuple[Variation, ...]:
        """Other intervals between saves."""
        model = self._model
        if model.best is None:
            return ()
        intervals = sorted({max(model.step, round(model.best * factor / model.step) * model.step) for factor in _AROUND})
        return tuple(
            self._variation(interval, replace(model.scenario, saves=model.saves(interval)), model.closed_form_goodput(interval))
            for interval in intervals
        )

    def spares(self) -> tuple[Variation, ...]:
        """Other numbers of spare nodes."""
        model = self._model
        if model.used == 1 or self._hardware.failures is None:
            return ()
        given = model.scenario.nodes - model.used
        numbers = sorted({0, 1, 2, 4, 8, 16, given} if given <= 16 else {0, 4, 8, 16, given // 2, given})
        return tuple(self._variation(spares, replace(model.scenario, nodes=model.used + spares), None) for spares in numbers)

    def _variation(self, value: float, scenario: Scenario, closed: float | None) -> Variation:
        runs = min(self._request.runs, _STUDY_RUNS)
        trials = [run_trial(scenario, FaultSampler(self._request.seed, number)) for number in range(runs)]
        days = fmean(self._model.days(trial) for trial in trials)
        hours = scenario.nodes * self._hardware.node * days * 24
        return Variation(value, fmean(trial.goodput for trial in trials), closed, days, hours * (self._hardware.price or 1.0))


def _band(values: Sequence[float]) -> Band:
    ordered = sorted(values)

    def quantile(fraction: float) -> float:
        index = fraction * (len(ordered) - 1)
        low = math.floor(index)
        return ordered[low] + (index - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])

    return Band(fmean(ordered), quantile(0.1), quantile(0.9))


def _mean(counters: Iterable[Counter[str]]) -> dict[str, float]:
    counters = list(counters)
    total: Counter[str] = sum(counters, Counter())
    return {name: count / len(counters) for name, count in total.most_common()}
