"""Fits constants to steps that were measured on a machine: a few steps, with priors for what they do not determine.
`phalanx bench` calls it with steps of small models, `feedback/compare_run` with the steps and parts of a run."""

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
"""Relative scatter of a measured step."""

_PART_SURE = 0.1
"""Relative scatter of one part of a step."""
_SMALL = 0.01
"""Fraction of the step below which a part is measured badly and matters little."""

COVERED_PARTS = {
    "compute": ("compute", "launch"),
    "tensor": ("tensor",),
    "context": ("context",),
    "expert": ("expert",),
    "data": ("data",),
    "bubble": ("bubble", "pipeline"),
    "optimizer": ("optimizer", "offload"),
    "other": ("other",),
}
"""Parts of a step that a run measures, and the parts of `cost/step_time` that each covers: within a rank these cannot be
separated."""

WIDTHS = {
    "gemm": 0.2,
    "knee": 0.4,
    "attention": 0.5,
    "traffic": 0.7,
    "launch": 0.7,
    "optimizer_bytes": 0.4,
    "overhead": 1.0,
}
"""How far each constant may move: the standard deviation of its logarithm."""


EIGHT_BITS = {"gemm": 0.2, "rounding": 0.4}
"""The same for steps in fp8, after those in bf16 have determined the rest."""

_ALIKE = {"gemm": -1.0, "attention": -1.0, "traffic": 1.0}
"""Constants that are all worse on a slow device, and in which direction; on CPUs launching is too."""

OF_FORMAT = ("gemm", "attention")
"""Constants of one number format; the others hold for all formats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A measured step."""

    run: Run
    plan: Plan
    seconds: float
    parts: Mapping[str, float] = field(default_factory=dict)
    """What the step was made of, by the keys of COVERED_PARTS; empty: not measured."""


def jobs_of(run: Run, plan: Plan, hardware: Hardware) -> JobTable:
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
    return space(given, hardware, plan.ranks).jobs({name: np.array([value]) for name, value in columns.items()})


def refitted(
    steps: Sequence[tuple[Measured, Hardware]],
    compute: str,
    widths: Mapping[str, float] = WIDTHS,
    sure: float = _SURE,
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
        prefix = f"{hardware.device}.{compute}" if hardware.device == "cuda" and name in OF_FORMAT else hardware.device
        constants[f"{prefix}.{name}"] = float(base.get(name, getattr(rates, name))) * factor
    if "island" in scale and hardware.device == "cuda" and hardware.island_bandwidth < BUS:
        constants["cuda.island"] *= float(rates.bus)  # what is measured is taken for that of the bus
    if "launch" in scale and hardware.device == "cuda" and not moe:
        # The steps were of dense models, whose launches say nothing about experts: the cost of experts stays what it was.
        constants[f"{hardware.device}.expert_kernels"] = float(rates.expert_kernels) / scale["launch"]
    return constants


def _scaled(rates: Rates, scale: Mapping[str, float]) -> Rates:
    names = {field.name for field in fields(Rates)}
    return replace(rates, **{name: getattr(rates, name) * value for name, value in scale.items() if name in names})


def _errors(times: Times, step: Measured, sure: float) -> npt.NDArray[np.float64]:
    """How far a step and its measured parts are from the prediction, in units of their scatter."""
    errors = [np.log(float(np.ravel(times.step)[0]) / step.seconds) / sure]
    small = _SMALL * step.seconds
    for part, seconds in step.parts.items():
        predicted = sum(float(np.ravel(getattr(times, name))[0]) for name in COVERED_PARTS[part])
        errors.append(np.log((predicted + small) / (seconds + small)) / _PART_SURE)
    return np.array(errors)
