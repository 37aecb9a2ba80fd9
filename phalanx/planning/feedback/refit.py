"""Draws constants towards what was measured on a machine: a few steps, and priors for what these do not tell. `phalanx bench` calls it
with steps of small models, a comparison with the steps of a run and what they were made of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

import numpy as np
import numpy.typing as npt

from phalanx.planning.cost.communication import BUS
from phalanx.planning.cost.job_table import METHODS, OFFLOAD, RECOMPUTE, SCHEDULES, JobTable
from phalanx.planning.cost.step_time import Times, step_times
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.rates import Rates, rates_for
from phalanx.planning.search.space import space
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

_SURE = 0.05
"""Scatter of a measured step, as a part of it."""

_PART_SURE = 0.1
"""The same of one part of a step …"""
_SMALL = 0.01
"""… unless it is less than about this part of the step, where nobody measures well and little depends on it."""

TOLD_BY = {
    "compute": ("compute", "launch"),
    "tensor": ("tensor",),
    "context": ("context",),
    "expert": ("expert",),
    "data": ("data",),
    "bubble": ("bubble", "pipeline"),
    "optimizer": ("optimizer", "offload"),
    "other": ("other",),
}
"""Parts of a step that a run measures, and those of `planning/cost/step_time` that are one with it: within a rank they cannot be told apart."""

WIDTHS = {
    "gemm": 0.2,
    "knee": 0.4,
    "attention": 0.5,
    "traffic": 0.7,
    "launch": 0.7,
    "optimizer_bytes": 0.4,
    "overhead": 1.0,
}
"""How far each may move: the deviation of its logarithm."""


EIGHT_BITS = {"gemm": 0.2, "rounding": 0.4}
"""The same for steps in fp8, when those in bf16 have told the rest."""

_ALIKE = {"gemm": -1.0, "attention": -1.0, "traffic": 1.0}
"""Constants that are all worse on a slow device, and in which direction; on cores launching is too."""

OF_FORMAT = ("gemm", "attention")
"""Constants that hold for one number format; the others hold for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A step that was timed."""

    run: Run
    plan: Plan
    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """What it was made of, by the names of TOLD_BY; none: it was not looked at."""


def work_of(run: Run, plan: Plan, hardware: Hardware) -> JobTable:
    """The one job that a plan describes."""
    given = replace(run, layout=plan.layout, train=replace(run.train, micro_batch=plan.micro_batch))
    layout = plan.layout
    memory = run.memory
    columns = {
        "pipeline": layout.pipeline,
        "data": layout.data or 1,
        "shard": layout.shard,
        "context": layout.context,
        "tensor": layout.tensor,
        "zero": layout.zero,
        "sequence_parallel": int(layout.sequence),
        "method": METHODS.index(layout.context_method),
        "schedule": SCHEDULES.index(layout.schedule),
        "stages": layout.stages_per_rank if layout.pipeline > 1 else 1,
        "expert": layout.expert,
        "expert_tensor": layout.expert_tensor,
        "recompute": RECOMPUTE.index(memory.recompute) if memory.recompute != "auto" else 0,
        "offload": OFFLOAD.index(memory.offload) if memory.offload != "auto" else 0,
        "micro_batch": plan.micro_batch,
    }
    return space(given, hardware, plan.ranks).work({name: np.array([value]) for name, value in columns.items()})


def refitted(
    steps: Sequence[tuple[Measured, Hardware]],
    compute: str,
    widths: Mapping[str, float] = WIDTHS,
    sure: float = _SURE,
    common: float = 0.0,
) -> dict[str, float]:
    """Factors to the constants that explain the steps best, not far from one: Gauss-Newton on logarithms. `sure`: scatter of a step.
    `common`: how far those of computing may move together, where steps tell of their sum; it takes less than moving one of them."""
    works = [work_of(step.run, step.plan, hardware) for step, hardware in steps]
    firsts = [rates_for(hardware, compute, moe=step.run.model.moe is not None) for step, hardware in steps]
    names, spread = list(widths), np.array(list(widths.values()))
    alike = _ALIKE | ({"launch": 1.0} if all(hardware.device == "cpu" for _, hardware in steps) else {})
    together = common * np.array([alike.get(name, 0.0) for name in names])
    likely = np.linalg.inv(np.diag(spread**2) + np.outer(together, together))

    def misses(logs: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        scale = dict(zip(names, np.exp(logs), strict=True))
        found = [
            _missed(step_times(work, _scaled(rates, scale)), step, sure)
            for (step, _), work, rates in zip(steps, works, firsts, strict=True)
        ]
        return np.concatenate(found)

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
    """Constants with their factors applied, by the names under which a machine's entry keeps them. `base`: those of them that are not
    what `rates_for` says, such as a core's before ranks take turns on it. `moe`: the steps were of a model with experts."""
    rates = rates_for(hardware, compute, moe=moe)
    found = {}
    for name, factor in scale.items():
        of = f"{hardware.device}.{compute}" if hardware.device == "cuda" and name in OF_FORMAT else hardware.device
        found[f"{of}.{name}"] = float(base.get(name, getattr(rates, name))) * factor
    if "island" in scale and hardware.device == "cuda" and hardware.island_bandwidth < BUS:
        found["cuda.island"] *= float(rates.bus)  # what is measured is taken for that of the bus
    if "launch" in scale and hardware.device == "cuda" and not moe:
        # The steps were of dense models: what launching costs there says nothing of experts, whose cost stays what it was.
        found[f"{hardware.device}.expert_kernels"] = float(rates.expert_kernels) / scale["launch"]
    return found


def _scaled(rates: Rates, scale: Mapping[str, float]) -> Rates:
    names = {field.name for field in fields(Rates)}
    return replace(rates, **{name: getattr(rates, name) * value for name, value in scale.items() if name in names})


def _missed(times: Times, step: Measured, sure: float) -> npt.NDArray[np.float64]:
    """How far a step, and each of its parts that was measured, is from what was measured, in units of their scatter."""
    found = [np.log(float(np.ravel(times.step)[0]) / step.seconds) / sure]
    small = _SMALL * step.seconds
    for part, seconds in step.parts.items():
        predicted = sum(float(np.ravel(getattr(times, name))[0]) for name in TOLD_BY[part])
        found.append(np.log((predicted + small) / (seconds + small)) / _PART_SURE)
    return np.array(found)
