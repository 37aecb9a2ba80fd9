"""Compares what a run's plan promised with what the run measured, and corrects the constants. `phalanx plan --compare
RUNDIR` calls it.

The prediction is made anew with the present constants, so that a second comparison shows the effect of a correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.events.log import read_events
from phalanx.events.records import Event, RunStarted, Step, StepAccounted, StepTimed
from phalanx.events.rundir import RunDir
from phalanx.planning.feedback.refit import COVERED_PARTS, Measured, corrected, refitted
from phalanx.planning.machine_fit import promised
from phalanx.planning.machines.cluster import measured_constants
from phalanx.planning.machines.cpu import FIXED, of_cores, unnamed
from phalanx.planning.request import devices_of
from phalanx.spec.errors import RunError
from phalanx.spec.load import load
from phalanx.spec.plan import Machine, Plan, Promise
from phalanx.spec.run import Run

_KINDS = {"parameters": ("parameters",), "gradients": ("gradients",), "optimizer": ("optimizer",)}
_MOVING = ("activations", "logits", "gathered", "buffers")
_WIDTHS = {"gemm": 0.3, "traffic": 0.5, "launch": 0.5, "latency": 0.5, "attention": 0.3, "overhead": 0.5}
"""How far a run may move each constant where it measured only whole steps."""
_APART = {
    "gemm": 0.3, "attention": 0.3, "traffic": 0.5, "launch": 0.5, "latency": 1.0, "island": 0.7, "network": 0.7,
    "optimizer_bytes": 1.0, "overhead": 1.5,
}  # fmt: skip
"""The same where it measured computing, messages, update and the rest separately."""
_TOGETHER = 1.5
"""How far the constants of computing may move together."""
_SURE = 0.005
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
        for name, predicted, measured in part_rows(promise.split, self.timed, self.seconds):
            yield ComparedValue(f"  {name}", predicted, measured, "s")
        if self.accounted:
            work = sum(event.flops.get("all", 0) for event in self.accounted)
            yield ComparedValue(
                "operations", self.plan.flops_per_token * self.step_events[-1].tokens, float(work) or None, "FLOP"
            )

    def _memories(self, promise: Promise) -> Iterator[ComparedValue]:
        fullest = max(self.accounted, key=lambda event: sum(event.memory.values()), default=None)
        for name, parts in (*_KINDS.items(), ("activations", _MOVING)):
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
        when = None if self.timed is None else self.timed.to_json()
        return {"steps": self.steps, "rows": rows, "timed": when, "split": self.predicted.split, "sent": self.sent}


def compare(directory: Path, machine: Machine) -> Comparison:
    """The comparison of the run in `directory`, which was trained on this machine. RunError where there is nothing to
    compare."""
    rundir = RunDir(directory)
    try:
        plan = Plan.from_json(rundir.plan_file.read_text())
    except (OSError, ValueError, KeyError, TypeError):
        raise RunError([f"{directory} holds no plan.json: name the directory of a run, such as runs/quickstart."]) from None
    run = load(rundir.run_file)
    now = promised(run, machine, plan)
    if now is None:
        raise RunError(
            [f"{directory} is a run of a model of one's own, or of a schedule of one's own: plans promise nothing for it."]
        )
    launch = _last_launch(list(read_events(rundir.events_file)))
    steps = [event for event in launch if isinstance(event, Step)]
    if len(steps) < 3:
        raise RunError(
            [f"{directory} has {len(steps)} steps in its last launch: train at least 3, of which the first two warm up."]
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
    parts = {} if comparison.timed is None else comparison.timed.by_covered_parts(comparison.seconds)
    steps = [(Measured(run=run, plan=plan, seconds=comparison.seconds, parts=parts), hardware)]
    how = (_APART, _SURE, _TOGETHER) if parts else (_WIDTHS, _SURE)
    scale = refitted(steps, plan.compute, *how)
    own = dict(measured_constants(machine, device))
    base = of_cores(machine) if device == "cpu" else {}
    informed = {name: factor for name, factor in scale.items() if abs(math.log(factor)) > _UNINFORMED}
    constants = corrected(informed, hardware, plan.compute, base, moe=run.model.moe is not None)
    if device == "cpu":
        latency = scale["latency"] * base["latency"]
        constants["cpu.overhead"] = unnamed(base, latency, scale["overhead"], plan.ranks)
        more = comparison.memory - comparison.predicted.total_memory
        constants["cpu.fixed_memory"] = max(own.get("fixed_memory", FIXED) + more, 2.0**26)
    return constants


def after(comparison: Comparison, machine: Machine, constants: dict[str, float]) -> Promise:
    """The same run's promise with corrected constants."""
    refitted_machine = replace(machine, measured=tuple((dict(machine.measured) | constants).items()))
    again = promised(comparison.run, refitted_machine, comparison.plan)
    assert again is not None, "it was promised something before"
    return again


def _last_launch(events: Sequence[Event]) -> Sequence[Event]:
    begin = max((place for place, event in enumerate(events) if isinstance(event, RunStarted)), default=0)
    return events[begin:]


NAMES = {
    "compute": "computing, launching",
    "tensor": "tensor exchange",
    "context": "context exchange",
    "expert": "expert exchange",
    "data": "gradients and shards",
    "bubble": "bubble, between stages",
    "optimizer": "optimizer, offload",
    "loading": "waiting for data",
    "other": "everything else",
}
"""Labels of the parts of a step as a run measures them."""
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
    """Seconds that add up to the step, by the keys of NAMES."""
    mean: dict[str, float]
    """The same, averaged over all ranks."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def of(self, seconds: float) -> dict[str, float]:
        """The parts of a step that takes this long."""
        return {part: spent * seconds / self.seconds for part, spent in self.parts.items()}

    def by_covered_parts(self, seconds: float) -> dict[str, float]:
        """The same by the keys of refit.COVERED_PARTS; no equation covers waiting for data."""
        parts = self.of(seconds)
        parts["other"] = parts.get("other", 0.0) + parts.pop("loading", 0.0)
        return {part: parts.get(part, 0.0) for part in COVERED_PARTS}


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
    names = [name for name in NAMES if any(event.parts.get(name) for event in middle)]
    return Timed(
        step=busiest.step,
        rank=busiest.rank,
        ranks=most,
        seconds=busiest.seconds,
        parts={name: busiest.parts[name] for name in names if busiest.parts.get(name)},
        mean={name: sum(event.parts.get(name, 0.0) for event in middle) / most for name in names},
    )


def part_rows(
    split: Mapping[str, float], timed_step: Timed | None, seconds: float
) -> Iterator[tuple[str, float | None, float | None]]:
    """For each part worth a row: its label, the promised seconds, and the seconds of a measured step of this length."""
    measured = None if timed_step is None else timed_step.of(seconds)
    for part, name in NAMES.items():
        promised = sum(split.get(name_, 0.0) for name_ in COVERED_PARTS[part]) if part in COVERED_PARTS else None
        spent = None if measured is None else measured.get(part, 0.0)
        if (promised or 0.0) > _NEGLIGIBLE * sum(split.values()) or (spent or 0.0) > _NEGLIGIBLE * seconds:
            yield name, promised, spent
