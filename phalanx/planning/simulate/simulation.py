"""Simulates a whole run many times (`simulated_run`): its goodput, when it ends, how many spare nodes pay off, how often to save."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from statistics import fmean
from typing import Any

from phalanx.planning.cost.run_cost import DETECT, best_interval, goodput, saved_bytes, upkeep
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.search.candidate import Candidate
from phalanx.planning.search.search import judge
from phalanx.planning.simulate.simulated_policy import DecisionCache, fault_kind, mean_detection_seconds
from phalanx.planning.simulate.simulated_run import TIME_USES, SaveSchedule, Scenario, StateSource, Trial, run_trial
from phalanx.recovery.policy import WINDOW
from phalanx.recovery.relayout import replicated_elsewhere
from phalanx.schedules.makers import schedule_for
from phalanx.spec.adapted_layers import trained_parameters
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run

DAY = 86400.0
_COPY_BUDGET = 0.005
"""Fraction of the time that default copies into host memory may take, as in the live trainer."""
_LONGEST = 10.0
"""A run that does not end is given up after this many times its days without failures."""
_STUDY_RUNS = 6
"""Runs for each number of spares and each interval: they meet the same failures, so a few runs are enough to compare them."""
_AROUND = (0.25, 0.5, 0.71, 1.0, 1.41, 2.0, 4.0)
"""Intervals to try, as multiples of the closed form's best."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationRequest:
    """The settings of a simulation."""

    days: float | None = None
    """Longest simulated time; None: until the run ends."""
    seed: int = 0
    runs: int = 20
    spares: int | None = None
    """Nodes beyond those of the layout; None: resilience.spares, or the rest of the cluster."""
    interval: float | None = None
    """Seconds between saves; None: as the run file says, or the best of the closed form."""
    keep: StateSource | None = None
    """Where a run finds its state after a failure; None: as in the live system."""
    restart: float | None = None
    """Seconds from the decision about a failure to the next step; None: the value of planning/cost/run_cost."""
    stall: float | None = None
    """Seconds that training waits for a save; None: the value of planning/cost/run_cost."""
    repair: float = 4 * 3600.0
    """Mean seconds until a lost node returns; resilience.node_return takes precedence."""
    relaunch: float = 1800.0
    """Seconds until a person restarts a run that has given up."""
    maintenance: tuple[float, float] | None = None
    """Seconds between planned pauses, and seconds of one pause."""
    study: bool = True
    """Whether to also try other numbers of spares and other intervals."""


class ClusterModel:
    """The cluster that a simulation assumes, from the run file, the catalogue and the plan: its nodes, failures, saves and
    other layouts, and the closed form for them."""

    def __init__(self, run: Run, hardware: Hardware, candidate: Candidate, request: SimulationRequest):
        self._run, self.hardware, self._candidate, self.request = run, hardware, candidate, request
        self._on = cache(self._evaluated)
        self.step = candidate.seconds
        self.used = -(-candidate.layout.ranks // hardware.node)
        state = saved_bytes(trained_parameters(run.model, run.lora), candidate.layout)
        unsaved = None if run.checkpoint.save else candidate.seconds
        costs = upkeep(hardware, state=state, ranks=candidate.layout.ranks, step=candidate.seconds, unsaved=unsaved)
        self.mtbf = costs.mtbf
        # `upkeep` counts detection as part of the restart. Here detection depends on the kind of failure.
        self._restart = request.restart if request.restart is not None else costs.restart - DETECT
        self._stall = request.stall if request.stall is not None else costs.stall
        write = 0.0 if request.stall is not None else state * hardware.node / hardware.storage
        self._disk = (self._stall, write) if run.checkpoint.async_save else (self._stall + write, 0.0)
        """Seconds that training waits for a checkpoint, and seconds until it is complete in the background."""
        decisions = DecisionCache(
            candidate.layout, hardware.node, lambda layout: self._on(layout) is not None, run.resilience, run.batch
        )
        self.keep = request.keep or self._live_source(decisions, costs.in_memory)
        if self.keep == "none" and request.interval is not None:
            raise RunError(
                f"--interval {request.interval:g} s: there are no saves, as checkpoint.save = false and the state has no room in host memory: "
                "remove one of them."
            )
        self.best = None if self.keep in ("replicas", "none") or not math.isfinite(self.mtbf) else self._best()
        self.interval = self._interval()
        spares = (run.resilience.spares or None) if request.spares is None else request.spares
        self.scenario = Scenario(
            cache=decisions,
            nodes=max(hardware.nodes, self.used) if spares is None else self.used + spares,
            failures=hardware.failures,
            step=self._seconds,
            saves=self.saves(self.interval),
            restart=self._restart,
            repair=request.repair,
            relaunch=request.relaunch,
            horizon=request.days * DAY if request.days is not None else _LONGEST * candidate.days * DAY,
            steps=run.steps,
            maintenance=request.maintenance,
        )

    # --- the scenario ---

    def _live_source(self, decisions: DecisionCache, in_memory: bool) -> StateSource:
        """The choice of control/recover: in-memory replicas if some node holds state that no other node has, or its processes are not kept."""
        copies = self._run.checkpoint.memory_every is not None
        reused = self._run.optimizer.sync_every == 1 and self._candidate.engine == "torch"
        if not copies and reused and replicated_elsewhere(self._candidate.layout, decisions.initial.assignment):
            return "replicas"
        if in_memory or copies:
            return "memory"
        return "disk" if self._run.checkpoint.save else "none"

    def _best(self) -> float:
        """The best interval between saves by the closed form, but not shorter than a step or than the time to write a checkpoint."""
        stall, write = self._disk if self.keep == "disk" else (self._stall, 0.0)
        return max(best_interval(self.mtbf, stall), write, self.step)

    def _interval(self) -> float | None:
        """Seconds of training between the saves that a failure rolls back to."""
        if self.keep in ("replicas", "none"):
            return None
        if self.request.interval is not None:
            return self.request.interval
        in_memory, checkpoint = self.keep == "memory", self._run.checkpoint
        every = checkpoint.memory_every if in_memory else checkpoint.every
        if every is None and in_memory:  # the default of the trainer
            every = max(1, math.ceil(self._stall / _COPY_BUDGET / self.step))
        return every * self.step if every is not None else self.best or _LONGEST * self._candidate.days * DAY

    def saves(self, interval: float | None) -> SaveSchedule:
        """The saves of a run that saves every `interval` seconds."""
        every = None if interval is None else max(1, round(interval / self.step))
        stall, write = self._disk
        checkpoint = self._run.checkpoint
        disk = None if not checkpoint.save else every if self.keep == "disk" else checkpoint.every
        if disk is None and self.best and checkpoint.save:  # for a failure that loses all replicas
            rare = max(best_interval(self.mtbf * 100, stall), write, interval or 0.0)
            disk = max(1, round(rare / self.step))
        if disk is not None:  # a checkpoint starts when the one before it is complete
            stall += max(0.0, write - disk * self.step)
        return SaveSchedule(
            keep=self.keep,
            memory_every=every if self.keep == "memory" else None,
            memory_stall=self._stall,
            disk_every=disk,
            disk_stall=stall,
            disk_write=write,
            on_stop=checkpoint.save,
        )

    # --- other layouts ---

    def _seconds(self, layout: Layout) -> float:
        candidate = self._on(layout)
        assert candidate is not None, "the policy uses legal layouts only"
        return candidate.seconds

    def _evaluated(self, layout: Layout) -> Candidate | None:
        """The run on another layout, as control/recover builds it: the same batch, and a micro-batch that divides a replica's share.
        None if the layout is illegal or does not fit."""
        run, candidate = self._run, self._candidate
        if layout == candidate.layout:
            return candidate
        if run.batch % layout.replicas or (run.optimizer.sync_every > 1 and layout.data != candidate.layout.data):
            return None
        share = run.batch // layout.replicas
        train = replace(run.train, micro_batch=math.gcd(share, candidate.micro_batch))
        memory = replace(run.memory, recompute=candidate.recompute, offload=candidate.offload)
        run = replace(run, layout=layout, train=train, memory=memory)
        if any(layout_findings(run)):
            return None
        try:
            order = schedule_for(layout, share // math.gcd(share, candidate.micro_batch))
            if order is not None and order.stages > run.model.layers:
                return None
            evaluated = judge(run, replace(self.hardware, gpus=layout.ranks))
        except RunError:
            return None
        return evaluated if evaluated.fits else None

    # --- results ---

    def days(self, trial: Trial) -> float:
        """Days of the whole run, at the pace of one trial."""
        days = trial.seconds / DAY
        return days if trial.finished else days * self._run.steps / max(trial.steps, 1)

    def closed_form_goodput(self, interval: float | None) -> float:
        """Goodput of the closed form for the simulated saves, with enough nodes."""
        saves, failures = self.saves(interval), self.hardware.failures
        every = {"replicas": 1, "memory": saves.memory_every, "disk": saves.disk_every, "none": self._run.steps}[self.keep]
        assert every is not None, "state that is saved has an interval"
        stall = saves.memory_stall if self.keep == "memory" else 0.0
        if saves.disk_every is not None:
            stall += saves.disk_stall * every / saves.disk_every
        trained = every * self.step
        if failures is None or not math.isfinite(self.mtbf):
            return trained / (trained + stall)
        restart = self._restart + mean_detection_seconds(failures, self._run.resilience, self.step)
        if self.keep == "disk":
            restart += saves.disk_write
        kept, node_failures = 1.0, sum(rate for name, rate in failures.rates if fault_kind(name) == "node") / failures.rate
        if self.keep != "disk" and self.used == 1 and saves.disk_every is not None:
            # The loss of the only node costs half a checkpoint interval.
            restart += node_failures * (saves.disk_every * self.step / 2 + saves.disk_write)
        elif self.keep != "none" and self.used == 1 and node_failures and not saves.on_stop:
            kept = goodput(self._run.steps * self.step, self.mtbf / node_failures, 0.0, 0.0)  # it costs everything
        return kept * goodput(trained, self.mtbf, stall, restart)

    def assumptions(self) -> tuple[str, ...]:
        """Sentences: what the simulation assumes about the cluster."""
        failures, resilience = self.hardware.failures, self._run.resilience
        pauses = f"The next step follows {self._restart:.0f} s after a decision; a save stops training for {self._stall:.2f} s."
        if failures is None:
            return *self.hardware.assumed, "No failures: no failure rate is known for these machines.", pauses
        returns = f"A lost node returns after {self.request.repair / 3600:.1f} h on average."
        gives_up = (
            f"A run gives up after more than resilience.restarts = {resilience.restarts} failures within {WINDOW:,} "
            f"steps; a person restarts it from {'disk' if self._run.checkpoint.save else 'its beginning'} after "
            f"{self.request.relaunch / 60:.0f} min."
        )
        lines = [failures.sentence, *([returns] if resilience.node_return is None else []), pauses, gives_up]
        return *self.hardware.assumed, *lines


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
    runs: int
    nodes: int
    spares: int
    keep: StateSource
    interval_seconds: float | None
    """Seconds of training between saves; None: other ranks hold the state, and failures need no saves."""
    mtbf_seconds: float | None
    """Mean seconds between failures; None: nothing fails."""
    goodput: Band
    finish_days: Band
    """Days until the last step."""
    closed: float
    """Goodput of the closed form for the same rates, interval, stall and restart."""
    best_interval_seconds: float | None
    """By the closed form."""
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
    cpu_seconds: float
    """CPU time of the simulation."""
    assumed: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """The object that `phalanx simulate --json` prints."""
        table = {field.name: getattr(self, field.name) for field in fields(self) if field.name not in ("candidate", "trial")}
        for name in ("goodput", "finish_days"):
            band = table[name]
            table |= {name: band.mean, f"{name}_p10": band.low, f"{name}_p90": band.high}
        for name in ("intervals", "spare_nodes"):
            table[name] = [asdict(variation) for variation in table[name]]
        layout = self.candidate.layout
        step = {"ranks": layout.ranks, "layout": asdict(layout), "step_seconds": self.candidate.seconds}
        return table | step | {"simulated_days": self.trial.seconds / DAY}


def simulate(run: Run, hardware: Hardware, candidate: Candidate, request: SimulationRequest) -> SimulationReport:
    """Simulates a run on the layout of `candidate`, and on the other layouts that recovery may choose."""
    start = time.process_time()
    _check(run, hardware, candidate, request)
    model = ClusterModel(run, hardware, candidate, request)
    trials = _trials(model, model.scenario, request.runs)
    intervals, spares = (_other_intervals(model), _other_spares(model)) if request.study else ((), ())
    seconds = sum(trial.seconds for trial in trials)
    return SimulationReport(
        candidate=candidate,
        runs=request.runs,
        nodes=model.scenario.nodes,
        spares=model.scenario.nodes - model.used,
        keep=model.keep,
        interval_seconds=model.interval,
        mtbf_seconds=model.mtbf if math.isfinite(model.mtbf) else None,
        goodput=_band([trial.goodput for trial in trials]),
        finish_days=_band([model.days(trial) for trial in trials]),
        closed=model.closed_form_goodput(model.interval),
        best_interval_seconds=model.best,
        failures=_mean([trial.components for trial in trials]),
        actions=_mean([trial.actions for trial in trials]),
        spent={name: sum(trial.spent[name] for trial in trials) / seconds for name in TIME_USES},
        intervals=intervals,
        spare_nodes=spares,
        pays=int(min(spares, key=lambda variation: (variation.cost, variation.value)).value) if spares else None,
        priced=hardware.price is not None,
        trial=trials[0],
        decisions=model.scenario.cache.decided,
        cpu_seconds=time.process_time() - start,
        assumed=model.assumptions(),
    )


def _check(run: Run, hardware: Hardware, candidate: Candidate, request: SimulationRequest) -> None:
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
    if request.keep == "disk" and not run.checkpoint.save:
        problems.append("--keep disk: nothing is saved there, as checkpoint.save = false: remove one of them.")
    if candidate.layout.ranks > hardware.gpus:
        problems.append(
            f"The layout has {candidate.layout.ranks:,} ranks but the cluster has {hardware.gpus:,} devices: "
            "set cluster.gpus to at least the number of ranks, or remove layout.data."
        )
    if problems:
        raise RunError(problems)


def _trials(model: ClusterModel, scenario: Scenario, runs: int) -> list[Trial]:
    return [run_trial(scenario, model.request.seed, number) for number in range(runs)]


def _other_intervals(model: ClusterModel) -> tuple[Variation, ...]:
    """The same simulation with other intervals between saves."""
    if model.best is None:
        return ()
    intervals = sorted({max(model.step, round(model.best * factor / model.step) * model.step) for factor in _AROUND})
    return tuple(
        _variation(model, interval, replace(model.scenario, saves=model.saves(interval)), model.closed_form_goodput(interval))
        for interval in intervals
    )


def _other_spares(model: ClusterModel) -> tuple[Variation, ...]:
    """The same simulation with other numbers of spare nodes."""
    if model.used == 1 or model.hardware.failures is None:
        return ()
    given = model.scenario.nodes - model.used
    numbers = sorted({0, 1, 2, 4, 8, 16, given} if given <= 16 else {0, 4, 8, 16, given // 2, given})
    return tuple(_variation(model, spares, replace(model.scenario, nodes=model.used + spares), None) for spares in numbers)


def _variation(model: ClusterModel, value: float, scenario: Scenario, closed: float | None) -> Variation:
    trials = _trials(model, scenario, min(model.request.runs, _STUDY_RUNS))
    days = fmean(model.days(trial) for trial in trials)
    hours = scenario.nodes * model.hardware.node * days * 24
    return Variation(value, fmean(trial.goodput for trial in trials), closed, days, hours * (model.hardware.price or 1.0))


def _band(values: Sequence[float]) -> Band:
    ordered = sorted(values)

    def quantile(fraction: float) -> float:
        index = fraction * (len(ordered) - 1)
        low = math.floor(index)
        return ordered[low] + (index - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])

    return Band(fmean(ordered), quantile(0.1), quantile(0.9))


def _mean(counters: Sequence[Counter[str]]) -> dict[str, float]:
    total: Counter[str] = sum(counters, Counter())
    return {name: count / len(counters) for name, count in total.most_common()}
