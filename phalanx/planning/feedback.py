"""Corrects the constants of the time model by measured steps. `phalanx bench` fits them to steps of small models;
`phalanx plan --compare RUNDIR` compares what a run's plan promised with what the run measured, and fits them to its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from phalanx.events.log import read_events
from phalanx.events.records import RunStarted, Step, StepAccounted, StepTimed
from phalanx.events.rundir import RunDir
from phalanx.planning.cost.job_table import OFFLOAD, RECOMPUTE, JobTable
from phalanx.planning.cost.step_time import BUS, Times, step_times
from phalanx.planning.machine_fit import need_and_promise
from phalanx.planning.machines.cluster import Hardware, measured_constants
from phalanx.planning.machines.cpu import FIXED, of_cores, unnamed
from phalanx.planning.machines.rates import Rates, rates_for
from phalanx.planning.request import devices_of
from phalanx.planning.search.space import layout_columns, space
from phalanx.spec.errors import RunError
from phalanx.spec.load import load
from phalanx.spec.plan import Machine, Plan, Promise
from phalanx.spec.run import Run

_SCATTER = 0.05
"""Relative scatter of a measured step."""
_PART_SCATTER = 0.1
"""Relative scatter of one part of a step."""
_SMALL = 0.01
"""Fraction of the step below which a part is measured badly and matters little."""

MEASURED_PARTS = {
    "compute": ("computing, launching", ("compute", "launch")),
    "tensor": ("tensor exchange", ("tensor",)),
    "context": ("context exchange", ("context",)),
    "expert": ("expert exchange", ("expert",)),
    "data": ("gradients and shards", ("data",)),
    "bubble": ("bubble, between stages", ("bubble", "pipeline")),
    "optimizer": ("optimizer, offload", ("optimizer", "offload")),
    "loading": ("waiting for data", ()),
    "other": ("everything else", ("other",)),
}
"""Parts of a step that a run measures: the label, and the parts of `cost/step_time` that each covers, which cannot be
separated within a rank. No equation covers waiting for data."""

WIDTHS = {
    "gemm": 0.2, "knee": 0.4, "attention": 0.5, "traffic": 0.7, "launch": 0.7, "optimizer_bytes": 0.4, "overhead": 1.0,
}  # fmt: skip
"""How far each constant may move: the standard deviation of its logarithm."""
EIGHT_BITS = {"gemm": 0.2, "rounding": 0.4}
"""The same for steps in fp8, after those in bf16 have determined the rest."""
_ALIKE = {"gemm": -1.0, "attention": -1.0, "traffic": 1.0}
"""Constants that are all worse on a slow device, and in which direction; on CPUs launching is too."""
_OF_FORMAT = ("gemm", "attention")
"""Constants of one number format; the others hold for all formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured step."""

    run: Run
    plan: Plan
    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the step was made of, by the keys of MEASURED_PARTS; empty: not measured."""


def jobs_of(run: Run, plan: Plan, hardware: Hardware) -> JobTable:
    """The one job that a plan describes."""
    memory = run.memory
    given = replace(run, layout=plan.layout, train=replace(run.train, micro_batch=plan.micro_batch))
    columns = layout_columns(
        [plan.layout],
        recompute=[RECOMPUTE.index(memory.recompute) if memory.recompute != "auto" else 0],
        offload=[OFFLOAD.index(memory.offload) if memory.offload != "auto" else 0],
        micro_batch=[plan.micro_batch],
    )
    return space(given, hardware, plan.ranks).jobs(columns)


def refitted(
    steps: Sequence[tuple[Measured, Hardware]],
    compute: str,
    widths: Mapping[str, float] = WIDTHS,
    sure: float = _SCATTER,
    common: float = 0.0,
) -> dict[str, float]:
    """Factors on the constants that explain the steps best and stay near one: Gauss-Newton on logarithms. `sure`: scatter
    of a step. `common`: how far the constants of computing may move together, where steps determine only their sum; that
    costs less than moving one of them."""
    tables = [jobs_of(step.run, step.plan, hardware) for step, hardware in steps]
    firsts = [rates_for(hardware, compute, moe=step.run.model.moe is not None) for step, hardware in steps]
    names, spread = list(widths), np.array(list(widths.values()))
    alike = _ALIKE | ({"launch": 1.0} if all(hardware.device == "cpu" for _, hardware in steps) else {})
    together = common * np.array([alike.get(name, 0.0) for name in names])
    likely = np.linalg.inv(np.diag(spread**2) + np.outer(together, together))

    def misses(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        scale = dict(zip(names, np.exp(logs), strict=True))
        errors = [
            _errors(step_times(jobs, _scaled(rates, scale)), step, sure)
            for (step, _), jobs, rates in zip(steps, tables, firsts, strict=True)
        ]
        return np.concatenate(errors)

    logs = np.zeros(len(names))
    for _ in range(12):
        miss = misses(logs)
        slopes = np.stack([(misses(logs + 1e-3 * unit) - miss) / 1e-3 for unit in np.eye(len(names))], axis=1)
        square = slopes.T @ slopes + likely
        slope = slopes.T @ miss + likely @ logs
        move = np.clip(np.linalg.solve(square, -slope), -0.7, 0.7)
        logs = logs + move
        if np.abs(move).max() < 1e-3:
            break
    return {name: float(np.exp(log)) for name, log in zip(names, logs, strict=True)}


def corrected(
    scale: Mapping[str, float], hardware: Hardware, compute: str, base: Mapping[str, float], *, moe: bool = False
) -> dict[str, float]:
    """The corrected constants, by the names of the machine's profile. `base`: the constants that differ from those of
    `rates_for`, such as a core's before ranks share it. `moe`: the steps were of a model with experts."""
    rates = rates_for(hardware, compute, moe=moe)
    constants = {}
    for name, factor in scale.items():
        prefix = f"{hardware.device}.{compute}" if hardware.device == "cuda" and name in _OF_FORMAT else hardware.device
        constants[f"{prefix}.{name}"] = float(base.get(name, getattr(rates, name))) * factor
    if "island" in scale and hardware.device == "cuda" and hardware.island_bandwidth < BUS:
        constants["cuda.island"] *= float(rates.bus)  # what is measured is taken for that of the bus
    if "launch" in scale and hardware.device == "cuda" and not moe:
        # The steps were of dense models, whose launches say nothing about experts: the cost of experts stays what it was.
        constants[f"{hardware.device}.expert_kernels"] = float(rates.expert_kernels) / scale["launch"]
    return constants


def _scaled(rates: Rates, scale: Mapping[str, float]) -> Rates:
    return replace(rates, **{name: getattr(rates, name) * value for name, value in scale.items()})


def _errors(times: Times, step: Measured, sure: float) -> npt.NDArray[np.float64]:
    """How far a step and its measured parts are from the prediction, in units of their scatter."""
    errors = [np.log(float(np.ravel(times.step)[0]) / step.seconds) / sure]
    small = _SMALL * step.seconds
    for part, seconds in step.parts.items():
        predicted = sum(float(np.ravel(times.parts[name])[0]) for name in MEASURED_PARTS[part][1])
        errors.append(np.log((predicted + small) / (seconds + small)) / _PART_SCATTER)
    return np.array(errors)


_MOVING = ("activations", "logits", "gathered", "buffers")
_RUN_WIDTHS = {"gemm": 0.3, "traffic": 0.5, "launch": 0.5, "latency": 0.5, "attention": 0.3, "overhead": 0.5}
"""How far a run may move each constant where it measured only whole steps."""
_APART = {
    "gemm": 0.3, "attention": 0.3, "traffic": 0.5, "launch": 0.5, "latency": 1.0, "island": 0.7, "network": 0.7,
    "optimizer_bytes": 1.0, "overhead": 1.5,
}  # fmt: skip
"""The same where it measured computing, messages, update and the rest separately."""
_TOGETHER = 1.5
"""How far the constants of computing may move together."""
_RUN_SCATTER = 0.005
_SETTING_SCATTER = 0.02
"""Scatter of one setting's step around the equations, which do not know all that a setting changes."""
_UNINFORMED = 1e-5
"""Logarithm of a factor below which the run says nothing about a constant, such as the network's where nothing is sent."""


@dataclass(frozen=True, slots=True)
class ComparedValue:
    """One number of the plan and of the run; None: not known."""

    name: str
    predicted: float | None
    measured: float | None
    unit: str
    """"s", "B", "FLOP" or "tokens/s"."""

    @property
    def error(self) -> float | None:
        """Relative error of the prediction; positive if it is too large."""
        if not self.predicted or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The last launch of a run directory, compared with its plan."""

    run: Run
    plan: Plan
    predicted: Promise
    """Predicted with the present constants."""
    step_events: tuple[Step, ...]
    """Every step of the launch."""
    accounted: tuple[StepAccounted, ...]
    timed: Timed | None
    """What a step was made of; None where that was not measured."""

    @property
    def steps(self) -> int:
        """Number of measured steps: the first warms up, the second is counted operation by operation."""
        return len(self.step_events) - 2

    @property
    def seconds(self) -> float:
        """Measured time of a step."""
        return median(step.seconds for step in (self.step_events[2:] if len(self.step_events) > 3 else self.step_events[-1:]))

    @property
    def memory(self) -> float:
        """Measured bytes of the fullest rank."""
        return float(max(step.memory for step in self.step_events))

    @property
    def sent(self) -> dict[str, dict[str, int]]:
        """Bytes that rank 0 sent in a step, by technique and collective."""
        return next((event.sent for event in self.accounted if event.rank == 0), {})

    @property
    def rows(self) -> tuple[ComparedValue, ...]:
        return self.against(self.predicted)

    def against(self, promise: Promise) -> tuple[ComparedValue, ...]:
        """The measurements next to one promise."""
        return (*self._times(promise), *self._memories(promise))

    def _times(self, promise: Promise) -> Iterator[ComparedValue]:
        speed = median(step.tokens_per_second for step in self.step_events[2:] or self.step_events)
        yield ComparedValue("step", promise.seconds, self.seconds, "s")
        yield ComparedValue("speed", promise.tokens_per_second, speed, "tokens/s")
        parts = None if self.timed is None else self.timed.of(self.seconds)
        least = _NEGLIGIBLE * sum(promise.split.values()), _NEGLIGIBLE * self.seconds
        for part, (label, covered) in MEASURED_PARTS.items():
            predicted = sum(promise.split.get(name, 0.0) for name in covered) if covered else None
            measured = None if parts is None else parts.get(part, 0.0)
            if (predicted or 0.0) > least[0] or (measured or 0.0) > least[1]:
                yield ComparedValue(f"  {label}", predicted, measured, "s")
        if self.accounted:
            work = sum(event.flops.get("all", 0) for event in self.accounted)
            flops = self.plan.flops_per_token * self.step_events[-1].tokens
            yield ComparedValue("operations", flops, float(work) or None, "FLOP")

    def _memories(self, promise: Promise) -> Iterator[ComparedValue]:
        fullest = max(self.accounted, key=lambda event: sum(event.memory.values()), default=None)
        for name in ("parameters", "gradients", "optimizer", "activations"):
            parts = _MOVING if name == "activations" else (name,)
            predicted = math.fsum(promise.memory.get(part, 0.0) for part in parts)
            yield ComparedValue(name, predicted, float(fullest.memory[name]) if fullest else None, "B")
        yield ComparedValue("fixed", promise.memory.get("fixed", 0.0), None, "B")
        yield ComparedValue("memory", promise.total_memory, self.memory, "B")

    def to_json(self, again: Promise | None = None) -> dict[str, Any]:
        """`again`: the same run's promise with corrected constants, as a further column."""
        rows = [asdict(row) | {"error": row.error} for row in self.rows]
        if again is not None:
            later = {row.name: row.predicted for row in self.against(again)}
            rows = [row | {"refitted": later.get(row["name"])} for row in rows]
        when = None if self.timed is None else asdict(self.timed)
        return {"steps": self.steps, "rows": rows, "timed": when, "split": self.predicted.split, "sent": self.sent}


def compare(directory: Path, machine: Machine) -> Comparison:
    """The comparison of the run in `directory`, which was trained on this machine. RunError where there is nothing to
    compare."""
    rundir = RunDir(directory)
    try:
        plan = Plan.from_json(rundir.plan_file.read_text())
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError(f"{directory} holds no plan.json: name the directory of a run, such as runs/quickstart.") from None
    run = load(rundir.run_file)
    _, now = need_and_promise(run, machine, plan)
    if now is None:
        raise RunError(f"{directory} is a run of a custom module or of a custom schedule: plans of such runs are not compared.")
    events = list(read_events(rundir.events_file))
    launch = events[max((place for place, event in enumerate(events) if isinstance(event, RunStarted)), default=0) :]
    steps = [event for event in launch if isinstance(event, Step)]
    if len(steps) < 3:
        raise RunError(
            f"{directory} has {len(steps)} steps in its last launch: train at least 3, of which the first two warm up."
        )
    return Comparison(
        run=run,
        plan=plan,
        predicted=now,
        step_events=tuple(steps),
        accounted=tuple(event for event in launch if isinstance(event, StepAccounted)),
        timed=timed([event for event in launch if isinstance(event, StepTimed)]),
    )


def correction(comparison: Comparison, machine: Machine) -> dict[str, float]:
    """Constants with which the run would have been predicted as it was measured, by the names of the machine's profile:
    each from the part of the step that it determines, where the run measured its parts."""
    run, plan, device = comparison.run, comparison.plan, comparison.plan.device
    hardware = devices_of(run, machine, plan.ranks, plan.threads, device)
    parts = {} if comparison.timed is None else comparison.timed.predictable(comparison.seconds)
    steps = [(Measured(run=run, plan=plan, seconds=comparison.seconds, parts=parts), hardware)]
    how = (_APART, _RUN_SCATTER, _TOGETHER) if parts else (_RUN_WIDTHS, _RUN_SCATTER)
    constants = _constants(refitted(steps, plan.compute, *how), steps[0][0], hardware, machine)
    if device == "cpu":
        own = dict(measured_constants(machine, device))
        more = comparison.memory - comparison.predicted.total_memory
        constants["cpu.fixed_memory"] = max(own.get("fixed_memory", FIXED) + more, 2.0**26)
    return constants


def _constants(scale: Mapping[str, float], step: Measured, hardware: Hardware, machine: Machine) -> dict[str, float]:
    """Factors on the constants of a step's devices as constants of the machine, by the names of its profile."""
    plan = step.plan
    base = of_cores(machine) if plan.device == "cpu" else {}
    informed = {name: factor for name, factor in scale.items() if abs(math.log(factor)) > _UNINFORMED}
    constants = corrected(informed, hardware, plan.compute, base, moe=step.run.model.moe is not None)
    if plan.device == "cpu":
        latency = scale["latency"] * base["latency"]
        constants["cpu.overhead"] = unnamed(base, latency, scale["overhead"], plan.ranks)
    return constants


def learned(steps: Sequence[Measured], machine: Machine) -> dict[str, float]:
    """Constants that explain whole steps of one run with several settings, by the names of the machine's
    profile. Empty where the cost model does not know the run."""
    if not steps or need_and_promise(steps[0].run, machine, steps[0].plan)[1] is None:
        return {}
    plans = [step.plan for step in steps]
    hardware = [devices_of(step.run, machine, step.plan.ranks, step.plan.threads, step.plan.device) for step in steps]
    scale = refitted(list(zip(steps, hardware, strict=True)), plans[0].compute, _RUN_WIDTHS, _SETTING_SCATTER)
    return _constants(scale, steps[0], hardware[0], machine)


def after(comparison: Comparison, machine: Machine, constants: dict[str, float]) -> Promise:
    """The same run's promise with corrected constants."""
    refitted_machine = replace(machine, measured=tuple((dict(machine.measured) | constants).items()))
    _, again = need_and_promise(comparison.run, refitted_machine, comparison.plan)
    assert again is not None, "it was promised something before"
    return again


_OWN = ("compute", "optimizer", "loading")
"""Parts in which a rank does not wait for others."""
_NEGLIGIBLE = 1e-4
"""Fraction of a step below which a part gets no row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One step of a run on the rank that waited least for others, in the parts of the time model."""

    step: int
    rank: int
    ranks: int
    """Ranks that were timed."""
    seconds: float
    parts: dict[str, float]
    """Seconds that add up to the step, by the keys of MEASURED_PARTS."""
    mean: dict[str, float]
    """The same, averaged over all ranks."""

    def of(self, seconds: float) -> dict[str, float]:
        """The parts of a step that takes this long."""
        return {part: spent * seconds / self.seconds for part, spent in self.parts.items()}

    def predictable(self, seconds: float) -> dict[str, float]:
        """The same with waiting for data, which no equation covers, as part of "other"."""
        parts = self.of(seconds)
        parts["other"] = parts.get("other", 0.0) + parts.pop("loading", 0.0)
        return {part: parts.get(part, 0.0) for part, (_, covered) in MEASURED_PARTS.items() if covered}


def timed(events: Sequence[StepTimed]) -> Timed | None:
    """Of the timed steps, the one of median length; None where there is none."""
    by_step: dict[int, dict[int, StepTimed]] = {}
    for event in events:
        by_step.setdefault(event.step, {})[event.rank] = event
    most = max((len(ranks) for ranks in by_step.values()), default=0)
    steps = sorted(
        (list(ranks.values()) for ranks in by_step.values() if len(ranks) == most),
        key=lambda ranks: max(event.seconds for event in ranks),
    )
    if not steps:
        return None
    middle = steps[(len(steps) - 1) // 2]
    busiest = max(middle, key=lambda event: sum(event.parts.get(part, 0.0) for part in _OWN))
    names = [name for name in MEASURED_PARTS if any(event.parts.get(name) for event in middle)]
    return Timed(
        step=busiest.step,
        rank=busiest.rank,
        ranks=most,
        seconds=busiest.seconds,
        parts={name: busiest.parts[name] for name in names if busiest.parts.get(name)},
        mean={name: sum(event.parts.get(name, 0.0) for event in middle) / most for name in names},
    )
