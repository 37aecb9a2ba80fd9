"""What a run's plan promised beside what the run measured, and constants corrected by it. `phalanx plan --compare RUNDIR` calls it.

The prediction is made anew with the constants of now, so that a second comparison shows what a correction has brought.
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
from phalanx.planning.feedback.refit import TOLD_BY, Measured, corrected, refitted
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
"""How far a run may move each constant where it tells of their sum only …"""
_APART = {
    "gemm": 0.3, "attention": 0.3, "traffic": 0.5, "launch": 0.5, "latency": 1.0, "island": 0.7, "network": 0.7,
    "optimizer_bytes": 1.0, "overhead": 1.5,
}  # fmt: skip
"""… and where it tells what computing, messages, the update and the rest took …"""
_TOGETHER = 1.5
"""… and those of computing all together."""
_SURE = 0.005
_NOTHING = 1e-5
"""Logarithm of a factor to a constant of which the run tells nothing, such as that of messages where none are sent."""


@dataclass(frozen=True, slots=True)
class Beside:
    """One number of the plan and of the run; None: there is none."""

    name: str
    predicted: float | None
    measured: float | None
    unit: str
    """"s", "B", "FLOP" or "tokens/s"."""

    @property
    def error(self) -> float | None:
        """How much the prediction is too large, as a part of what was measured."""
        if not self.predicted or not self.measured:
            return None
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A run directory's last launch against its plan."""

    run: Run
    plan: Plan
    now: Promise
    """Predicted with the constants of now."""
    taken: tuple[Step, ...]
    """Every step of the launch."""
    accounted: tuple[StepAccounted, ...]
    timed: Timed | None
    """What a step was made of; None where that could not be told."""

    @property
    def steps(self) -> int:
        """That were measured: the first warms up, the second is counted operation by operation."""
        return len(self.taken) - 2

    @property
    def seconds(self) -> float:
        """Measured, of a step."""
        return median(step.seconds for step in (self.taken[2:] if len(self.taken) > 3 else self.taken[-1:]))

    @property
    def memory(self) -> float:
        """Measured, of the fullest rank."""
        return float(max(step.memory for step in self.taken))

    @property
    def sent(self) -> dict[str, dict[str, int]]:
        """Bytes that rank 0 sent in a step, by technique and collective."""
        return next((event.sent for event in self.accounted if event.rank == 0), {})

    @property
    def rows(self) -> tuple[Beside, ...]:
        return self.against(self.now)

    def against(self, promise: Promise) -> tuple[Beside, ...]:
        """What was measured beside one promise."""
        return (*self._times(promise), *self._memories(promise))

    def _times(self, promise: Promise) -> Iterator[Beside]:
        speed = median(step.tokens_per_second for step in self.taken[2:] or self.taken)
        yield Beside("step", promise.seconds, self.seconds, "s")
        yield Beside("speed", promise.tokens_per_second, speed, "tokens/s")
        for name, predicted, measured in beside(promise.split, self.timed, self.seconds):
            yield Beside(f"  {name}", predicted, measured, "s")
        if self.accounted:
            work = sum(event.flops.get("all", 0) for event in self.accounted)
            yield Beside("operations", self.plan.flops_per_token * self.taken[-1].tokens, float(work) or None, "FLOP")

    def _memories(self, promise: Promise) -> Iterator[Beside]:
        fullest = max(self.accounted, key=lambda event: sum(event.memory.values()), default=None)
        for name, parts in (*_KINDS.items(), ("activations", _MOVING)):
            predicted = math.fsum(promise.memory.get(part, 0.0) for part in parts)
            yield Beside(name, predicted, float(fullest.memory[name]) if fullest else None, "B")
        yield Beside("fixed", promise.memory.get("fixed", 0.0), None, "B")
        yield Beside("memory", promise.total_memory, self.memory, "B")

    def to_json(self, again: Promise | None = None) -> dict[str, Any]:
        """`again`: the same run's promise with corrected constants, as a further column."""
        rows = [asdict(row) | {"error": row.error} for row in self.rows]
        if again is not None:
            later = {row.name: row.predicted for row in self.against(again)}
            rows = [row | {"refitted": later.get(row["name"])} for row in rows]
        when = None if self.timed is None else self.timed.to_json()
        return {"steps": self.steps, "rows": rows, "timed": when, "split": self.now.split, "sent": self.sent}


def compare(directory: Path, machine: Machine) -> Comparison:
    """Of the run in `directory`, which was trained on this machine. RunError where there is nothing to compare."""
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
        now=now,
        taken=tuple(steps),
        accounted=tuple(event for event in launch if isinstance(event, StepAccounted)),
        timed=timed([event for event in launch if isinstance(event, StepTimed)]),
    )


def correction(found: Comparison, machine: Machine) -> dict[str, float]:
    """Constants with which the same run would have been predicted as it was measured, by the names of the machine's entry: each by the
    part of the step that it makes, where the run has measured its parts."""
    run, plan, device = found.run, found.plan, found.plan.device
    hardware = devices_of(run, machine, plan.ranks, plan.threads, device)
    parts = {} if found.timed is None else found.timed.told(found.seconds)
    steps = [(Measured(run=run, plan=plan, seconds=found.seconds, parts=parts), hardware)]
    how = (_APART, _SURE, _TOGETHER) if parts else (_WIDTHS, _SURE)
    scale = refitted(steps, plan.compute, *how)
    own = dict(measured_constants(machine, device))
    base = of_cores(machine) if device == "cpu" else {}
    told = {name: factor for name, factor in scale.items() if abs(math.log(factor)) > _NOTHING}
    constants = corrected(told, hardware, plan.compute, base, moe=run.model.moe is not None)
    if device == "cpu":
        latency = scale["latency"] * base["latency"]
        constants["cpu.overhead"] = unnamed(base, latency, scale["overhead"], plan.ranks)
        more = found.memory - found.now.total_memory
        constants["cpu.fixed_memory"] = max(own.get("fixed_memory", FIXED) + more, 2.0**26)
    return constants


def after(found: Comparison, machine: Machine, constants: dict[str, float]) -> Promise:
    """The same run's promise with corrected constants."""
    told = replace(machine, measured=tuple((dict(machine.measured) | constants).items()))
    again = promised(found.run, told, found.plan)
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
"""Parts of a step as they are measured, in words."""
_OWN = ("compute", "optimizer", "loading")
"""Parts in which a rank waits for no other."""
_NEGLIGIBLE = 1e-4
"""Part of a step below which it is not worth a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One step of a run on the rank that waited least for others, as the plan's equations see a step."""

    step: int
    rank: int
    ranks: int
    """That were timed."""
    seconds: float
    parts: dict[str, float]
    """Seconds that add up to it, by the names of NAMES."""
    mean: dict[str, float]
    """The same over all ranks."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def of(self, seconds: float) -> dict[str, float]:
        """The parts of a step that takes so long."""
        return {part: spent * seconds / self.seconds for part, spent in self.parts.items()}

    def told(self, seconds: float) -> dict[str, float]:
        """The same by the names of refit.TOLD_BY: no equation knows the batch that is waited for."""
        found = self.of(seconds)
        found["other"] = found.get("other", 0.0) + found.pop("loading", 0.0)
        return {part: found.get(part, 0.0) for part in TOLD_BY}


def timed(events: Sequence[StepTimed]) -> Timed | None:
    """Of the steps that were timed, the one of median length; None where there is none."""
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


def beside(split: Mapping[str, float], found: Timed | None, seconds: float) -> Iterator[tuple[str, float | None, float | None]]:
    """Of each part that is worth a line: its name, what was promised of it, and what it is of a step that was measured to take so long."""
    measured = None if found is None else found.of(seconds)
    for part, name in NAMES.items():
        promised = sum(split.get(one, 0.0) for one in TOLD_BY[part]) if part in TOLD_BY else None
        spent = None if measured is None else measured.get(part, 0.0)
        if (promised or 0.0) > _NEGLIGIBLE * sum(split.values()) or (spent or 0.0) > _NEGLIGIBLE * seconds:
            yield name, promised, spent
