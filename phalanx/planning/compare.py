"""What a run's plan promised beside what the run measured, and constants corrected by it. `phalanx plan --compare RUNDIR` calls it.

The prediction is made anew with the constants of now, so that a second comparison shows what a correction has brought.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from phalanx.events.log import read_events
from phalanx.events.records import Event, RunStarted, Step, StepAccounted
from phalanx.events.rundir import RunDir
from phalanx.planning.chosen import devices_of, promised
from phalanx.planning.cpu import CONSTANTS, FIXED
from phalanx.planning.measured import measured_constants
from phalanx.planning.refit import Measured, corrected, refitted
from phalanx.spec.errors import RunError
from phalanx.spec.load import load
from phalanx.spec.machine import Machine
from phalanx.spec.plan import Plan, Promise
from phalanx.spec.run import Run

_KINDS = {"parameters": ("parameters",), "gradients": ("gradients",), "optimizer": ("optimizer",)}
_MOVING = ("activations", "logits", "gathered", "buffers")
_WIDTHS = {"gemm": 0.3, "traffic": 0.5, "launch": 0.5, "latency": 0.5, "attention": 0.3, "overhead": 0.5}
"""How far a run may move each constant: it tells of their sum only."""
_SURE = 0.005


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
    steps: int
    """Steps that were measured, the first of the launch left out."""
    rows: tuple[Beside, ...]
    seconds: float
    """Measured, of a step."""
    memory: float
    """Measured, of the fullest rank."""
    now: Promise
    """Predicted with the constants of now."""
    sent: dict[str, dict[str, int]]
    """Bytes that rank 0 sent in a step, by technique and collective."""

    def to_json(self) -> dict[str, Any]:
        rows = [asdict(row) | {"error": row.error} for row in self.rows]
        return {"steps": self.steps, "rows": rows, "sent": self.sent}


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
    accounted = [event for event in launch if isinstance(event, StepAccounted)]
    # The first warms up, the second is counted operation by operation.
    seconds = median(step.seconds for step in (steps[2:] if len(steps) > 3 else steps[-1:]))
    memory = float(max(step.memory for step in steps))
    return Comparison(
        run=run,
        plan=plan,
        steps=len(steps) - 2,
        rows=tuple(_rows(plan, now, steps, accounted, seconds)),
        seconds=seconds,
        memory=memory,
        now=now,
        sent=next((event.sent for event in accounted if event.rank == 0), {}),
    )


def correction(found: Comparison, machine: Machine) -> dict[str, float]:
    """Constants with which the same run would have been predicted as it was measured, by the names of the machine's entry."""
    run, plan, device = found.run, found.plan, found.plan.device
    hardware = devices_of(run, machine, plan.ranks, plan.threads, device)
    steps = [(Measured(run=run, plan=plan, seconds=found.seconds), hardware)]
    scale = refitted(steps, plan.compute, _WIDTHS, _SURE)
    own = dict(measured_constants(machine, device))
    base = CONSTANTS | own if device == "cpu" else {}
    constants = corrected(scale, hardware, plan.compute, base)
    if device == "cpu":
        more = found.memory - found.now.total_memory
        constants["cpu.fixed_memory"] = max(own.get("fixed_memory", FIXED) + more, 2.0**26)
    return constants


def after(found: Comparison, machine: Machine, constants: dict[str, float]) -> Promise:
    """The same run's promise with corrected constants."""
    told = replace(machine, measured=tuple((dict(machine.measured) | constants).items()))
    again = promised(found.run, told, found.plan)
    assert again is not None, "it was promised something before"
    return again


def _rows(plan: Plan, now: Promise, steps: Sequence[Step], accounted: Sequence[StepAccounted], seconds: float) -> list[Beside]:
    speed = median(step.tokens_per_second for step in steps[2:] or steps)
    rows = [Beside("step", now.seconds, seconds, "s"), Beside("speed", now.tokens_per_second, speed, "tokens/s")]
    rows += [Beside(f"  {part}", spent, None, "s") for part, spent in now.split.items() if spent > 0]
    if accounted:
        work = sum(event.flops.get("all", 0) for event in accounted)
        tokens = steps[-1].tokens
        rows.append(Beside("operations", plan.flops_per_token * tokens, float(work) or None, "FLOP"))
    fullest = max(accounted, key=lambda event: sum(event.memory.values()), default=None)
    for name, parts in (*_KINDS.items(), ("activations", _MOVING)):
        predicted = math.fsum(now.memory.get(part, 0.0) for part in parts)
        rows.append(Beside(name, predicted, float(fullest.memory[name]) if fullest else None, "B"))
    rows.append(Beside("fixed", now.memory.get("fixed", 0.0), None, "B"))
    rows.append(Beside("memory", now.total_memory, float(max(step.memory for step in steps)), "B"))
    return rows


def _last_launch(events: Sequence[Event]) -> Sequence[Event]:
    begin = max((place for place, event in enumerate(events) if isinstance(event, RunStarted)), default=0)
    return events[begin:]
