"""Writes a fit as catalogue/constants.toml, which `planning/machines/rates` reads. `make planner-fit` calls it.

The shipped constants are for Phalanx itself: PyTorch's native parallelism, current kernels, and experts that drop no token.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from planner.parameters import KNOBS, SHIFTS, Fit, Shift

FAMILIES = ("v100", "a100", "h100", "b200", "mi300", "tpu", "tpu6")
FORMATS = ("bf16", "fp8", "fp4")
HEAD = """# Written by `make planner-fit`: constants of step times, fitted to benchmarks/published/steps.csv. Do not edit.
# What was measured on a machine (`phalanx bench`) wins over them. docs/planner-accuracy.md says how far they reach.
"""


def rates_here(fit: Fit, family: str | None, precision: str) -> dict[str, float]:
    """Constants of Phalanx's own runs on a family of devices; None: a family without measurements."""
    stack = "tpu" if family and family.startswith("tpu") else "fsdp"
    keys = {"family": family, "precision": precision, "both": f"{family} {precision}", "stack": stack, "era": "new"}
    keys |= {"kernels": f"{stack} new", "routing": "dropless", "dispatch": "plain", "recipe": "plain", "kind": None}
    keys["tuned"] = "hopper" if family == "h100" else "plain"  # torch uses cuDNN's attention there
    logs = {knob.name: fit.values[index] for index, knob in enumerate(KNOBS)}
    for index, shift in enumerate(SHIFTS):
        if keys[shift.column] == shift.key:
            logs[shift.name] = logs.get(shift.name, 0.0) + fit.values[len(KNOBS) + index]
    parts = {knob.name for knob in KNOBS if knob.part}
    return {name: float(1 / (1 + np.exp(-value)) if name in parts else np.exp(value)) for name, value in logs.items()}


def constants_file(fit: Fit, intervals: Mapping[str, tuple[float, float]], doubts: Mapping[str, float], summary: str) -> str:
    """The text of constants.toml; `summary`: the line about the rows behind it."""
    common = rates_here(fit, None, "bf16")
    lines = [HEAD + f"# {summary}\n", "[common]", *_lines(common)]
    for precision in FORMATS[1:]:
        lines += ["", f"[format.{precision}]", *_lines(_different(rates_here(fit, None, precision), common))]
    for family in FAMILIES:
        for precision in FORMATS:
            different = _different(rates_here(fit, family, precision), common)
            lines += ["", f"[family.{family}.{precision}]", *_lines(different)]
    kinds: dict[str, dict[str, float]] = {}
    for index, shift in enumerate(SHIFTS):
        if shift.column == "kind":
            kinds.setdefault(shift.key, {})[shift.name] = float(np.exp(fit.values[len(KNOBS) + index]))
    for kind, factors in kinds.items():
        lines += ["", f"[times.{kind}]", *_lines(factors)]
    for kind, (low, high) in intervals.items():
        lines += ["", f"[{kind}]", *_lines({"low": low, "high": high})]
    lines += ["", "# How many times as far off, by the publications that each family rests on.", "[doubt]", *_lines(doubts)]
    lines += ["", "# The fit itself: logarithms, or log odds of parts; shifts are added to the constant they name.", "[fit]"]
    lines += [f'"{name}" = {value:.6f}' for name, value in zip(names(), fit.values, strict=True)]
    return "\n".join(lines) + "\n"


def names() -> list[str]:
    """The names of the fit's values, in order."""
    return [*(knob.name for knob in KNOBS), *(_name(shift) for shift in SHIFTS)]


def shipped(table: Mapping[str, Mapping[str, float]]) -> Fit:
    """The fit in a constants file."""
    return Fit(np.array([table["fit"][name] for name in names()]))


def _name(shift: Shift) -> str:
    return f"{shift.name} {shift.column} {shift.key}"


def _different(values: Mapping[str, float], common: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if abs(value / common.get(name, np.inf) - 1) > 1e-9}


def _lines(values: Mapping[str, float]) -> list[str]:
    return [f"{name} = {value:.5g}" for name, value in values.items()]
