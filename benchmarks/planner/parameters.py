"""The parameters of the fit: constants with priors, and offsets for device families, number formats and software stacks.

The prior of a constant comes from physics or the literature. An offset for a family, format or stack has a prior of zero, so that a
family with one source or none still gets sensible constants. Some offsets have other priors, chosen after the errors of first fits: so
cross-validation does not hide a source from them entirely. `fit` changes the values, `constants` writes them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from phalanx.planning.machines.rates import Rates
from planner.steps import Table

PAIRED = 0.9
"""`paired` of programs that overlap the two, as DeepSeek's does. No published row measures it; it is set by DeepSeek-V3's
published hours."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A fitted constant."""

    name: str
    prior: float
    width: float
    """Standard deviation of the prior: of the logarithm, or of the log odds if the constant is a fraction."""
    part: bool = False


@dataclass(frozen=True, slots=True)
class Shift:
    """An offset to a constant's logarithm or log odds, for rows with `key` in `column`."""

    name: str
    column: str
    key: str
    width: float
    prior: float = 0.0


KNOBS = (
    Knob("gemm", 0.70, 0.10),
    Knob("knee", 160.0, 0.5),
    Knob("attention", 0.45, 0.3),
    Knob("attention_backward", 0.80, 0.15),
    Knob("narrow", 0.3, 0.5),
    Knob("memory", 0.80, 0.10),
    Knob("traffic", 1.0, 0.3),
    Knob("fused", 0.6, 0.3),
    Knob("scores", 12.0, 0.4),
    Knob("repeated", 0.95, 0.07),
    Knob("launch", 6e-6, 0.4),
    Knob("drain", 8e-6, 0.4),
    Knob("expert_kernels", 200.0, 0.35),
    Knob("expert_wait", 3e-4, 0.5),
    Knob("copies", 7.0, 0.4),
    Knob("gather_host", 1.5e-4, 0.5),
    Knob("island", 0.75, 0.15),
    Knob("bus", 0.5, 0.3),
    Knob("network", 0.75, 0.2),
    Knob("latency", 3e-5, 0.5),
    Knob("far_latency", 4e-6, 0.5),
    Knob("tensor_hidden", 0.25, 0.7, True),
    Knob("context_hidden", 0.6, 0.7, True),
    Knob("expert_hidden", 0.2, 0.7, True),
    Knob("data_hidden", 0.65, 0.7, True),
    Knob("contention", 0.2, 0.6),
    Knob("gathering", 0.2, 0.6),
    Knob("adding", 10.0, 0.4),
    Knob("optimizer_bytes", 40.0, 0.4),
    Knob("overhead", 5e-3, 0.6),
    Knob("spread", 0.0017, 0.7),
)

SHIFTS = (
    *(Shift("gemm", "family", key, 0.12) for key in ("h100", "tpu6", "mi300")),
    *(Shift("gemm", "family", key, 0.12, 0.15) for key in ("v100", "a100")),  # small products reach 0.83 to 0.87 of these peaks
    Shift("gemm", "family", "b200", 0.12, -0.3),  # power binds before the tensor cores do
    Shift("gemm", "family", "tpu", 0.12, 0.2),  # a small systolic array at a fixed clock
    *(Shift("gemm", "kind", key, 0.1) for key in ("gb200", "b300", "h200-sxm")),
    Shift("gemm", "kind", "b200", 0.1, -0.06),  # 1,000 W, and as many as 1,400: the cube root
    Shift("gemm", "kind", "gb300", 0.1, 0.05),
    Shift("gemm", "precision", "fp8", 0.15, -0.12),
    Shift("gemm", "precision", "fp4", 0.25, -0.25),
    *(Shift(name, "routing", key, 0.5, -0.7) for name in ("expert_kernels", "expert_wait") for key in ("dropping", "graphs")),
    Shift("expert_hidden", "dispatch", "fast", 0.7, 1.5),
    Shift("copies", "dispatch", "fast", 0.4, -0.4),  # sorted while they are sent
    *(Shift("gemm", "both", f"{key} fp8", 0.15) for key in ("h100", "b200", "tpu6", "mi300")),
    *(Shift("attention", "family", key, 0.25) for key in ("v100", "a100", "b200", "tpu", "tpu6", "mi300")),
    Shift("attention", "family", "h100", 0.25, -0.4),  # the usual kernels were written for the generation before
    *(Shift("attention", "kind", key, 0.3, 0.4) for key in ("b300", "gb300")),  # exponentials are twice as fast
    Shift("attention", "tuned", "hopper", 0.3, 0.6),  # except cuDNN's
    Shift("island", "stack", "tpu", 0.3, 0.3),  # collectives on a torus use more than one axis
    Shift("attention", "kernels", "fsdp old", 0.3, -0.3),  # the first fused kernels, before their second edition
    Shift("tensor_hidden", "kernels", "megatron new", 0.7, 1.0),
    Shift("tensor_hidden", "stack", "tpu", 0.7, 1.0),
    Shift("adding", "stack", "megatron", 0.4, -0.7),  # fused into the matrix products
    Shift("traffic", "era", "old", 0.3),
    Shift("traffic", "kernels", "megatron new", 0.3),
    Shift("traffic", "stack", "fsdp", 0.3),
    *(Shift("software", "stack", key, 0.06) for key in ("megatron", "deepspeed", "fsdp", "nanotron", "jax")),
    Shift("software", "kernels", "megatron new", 0.06),
    Shift("software", "recipe", "nemo", 0.08),
    Shift("launch", "stack", "megatron", 0.3),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """The fitted values: first the knobs, then the shifts."""

    values: np.ndarray


@cache
def start() -> Fit:
    """The fit at the priors."""
    knobs = [np.log(k.prior / (1 - k.prior)) if k.part else np.log(k.prior) for k in KNOBS]
    return Fit(np.array([*knobs, *(shift.prior for shift in SHIFTS)]))


@cache
def widths() -> np.ndarray:
    return np.array([*(knob.width for knob in KNOBS), *(shift.width for shift in SHIFTS)])


def keys_of(table: Table) -> dict[str, np.ndarray]:
    """The columns that shifts refer to."""
    both = np.array([f"{family} {precision}" for family, precision in zip(table.family, table.precision, strict=True)])
    old = np.where(table.year < 2023, "old", "new")
    kernels = np.array(
        [f"{stack} {'new' if year > 2023 else 'old'}" for stack, year in zip(table.stack, table.year, strict=True)]
    )
    tuned = (table.family == "h100") & (table.year > 2023) & np.isin(table.stack, ("megatron", "jax"))
    return {
        "tuned": np.where(tuned, "hopper", "plain"),
        "recipe": table.recipe,
        "kind": table.kind,
        "routing": table.routing,
        "dispatch": table.dispatch,
        "era": old,
        "kernels": kernels,
        "family": table.family,
        "precision": table.precision,
        "stack": table.stack,
        "both": both,
    }


def masks_of(table: Table) -> list[np.ndarray]:
    columns = keys_of(table)
    return [(columns[shift.column] == shift.key).astype(float) for shift in SHIFTS]


def rates_of(fit: Fit, table: Table, masks: list[np.ndarray] | None = None) -> Rates:
    """The constants of each row."""
    masks = masks_of(table) if masks is None else masks
    logs: dict[str, Any] = {knob.name: fit.values[index] for index, knob in enumerate(KNOBS)}
    for index, (shift, mask) in enumerate(zip(SHIFTS, masks, strict=True)):
        logs[shift.name] = logs.get(shift.name, 0.0) + fit.values[len(KNOBS) + index] * mask
    parts = {knob.name for knob in KNOBS if knob.part}
    values = {name: 1 / (1 + np.exp(-value)) if name in parts else np.exp(value) for name, value in logs.items()}
    return special(Rates(**values), table)


def special(rates: Rates, table: Table) -> Rates:
    """Adjusts the constants to each row's software: overlap, selective recomputation, balanced stages."""
    overlapped = table.overlapped
    return replace(
        rates,
        tensor_hidden=rates.tensor_hidden * overlapped,
        data_hidden=rates.data_hidden * overlapped,
        selective=((table.stack == "megatron") & (table.year < 2024)).astype(float),
        reread=np.where((table.stack == "megatron") & (table.year > 2023), 0.5, 1.0),  # norms and activations alone
        slack=0.5,
        balanced=(table.stack == "nanotron").astype(float),
        repeated=rates.repeated * table.repeated,
        split=1.0,
        paired=PAIRED,
        splits=1.0,
        resent=0.0,
    )
