"""The fit as a file: catalogue/constants.toml, which `planning/machines/rates` reads. `make planner-fit` writes it.

What ships is for the project's own software: PyTorch's native parallelism, in the kernels of today, experts that drop no token.
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
    """Constants of the project's own runs on a family of devices; of a family nobody has measured, where that is None."""
    stack = "tpu" if family and family.startswith("tpu") else "fsdp"
    keys = {"family": family, "precision": precision, "both": f"{family} {precision}", "stack": stack, "era": "new"}
    keys |= {"kernels": f"{stack} new", "routing": "dropless", "dispatch": "plain", "recipe": "plain", "kind": None}
    keys["tuned"] = "hopper" if family == "h100" else "plain"  # torch takes cuDNN's attention there
    logs = {knob.name: fit.values[place] for place, knob in enumerate(KNOBS)}
    for place, shift in enumerate(SHIFTS):
        if keys[shift.column] == shift.key:
            logs[shift.name] = logs.get(shift.name, 0.0) + fit.values[len(KNOBS) + place]
    parts = {knob.name for knob in KNOBS if knob.part}
    return {name: float(1 / (1 + np.exp(-value)) if name in parts else np.exp(value)) for name, value in logs.items()}


def written(fit: Fit, intervals: Mapping[str, tuple[float, float]], doubts: Mapping[str, float], told: str) -> str:
    """The file's text."""
    common = rates_here(fit, None, "bf16")
    lines = [HEAD + f"# {told}\n", "[common]", *_lines(common)]
    for precision in FORMATS[1:]:
        lines += ["", f"[format.{precision}]", *_lines(_other(rates_here(fit, None, precision), common))]
    for family in FAMILIES:
        for precision in FORMATS:
            different = _other(rates_here(fit, family, precision), common)
            lines += ["", f"[family.{family}.{precision}]", *_lines(different)]
    kinds: dict[str, dict[str, float]] = {}
    for place, shift in enumerate(SHIFTS):
        if shift.column == "kind":
            kinds.setdefault(shift.key, {})[shift.name] = float(np.exp(fit.values[len(KNOBS) + place]))
    for kind, factors in kinds.items():
        lines += ["", f"[times.{kind}]", *_lines(factors)]
    for kind, (low, high) in intervals.items():
        lines += ["", f"[{kind}]", *_lines({"low": low, "high": high})]
    lines += ["", "# How many times as far off, by the publications that each family rests on.", "[doubt]", *_lines(doubts)]
    lines += ["", "# The fit itself: logarithms, or log odds of parts; shifts are added to the constant they name.", "[fit]"]
    lines += [f'"{name}" = {value:.6f}' for name, value in zip(names(), fit.values, strict=True)]
    return "\n".join(lines) + "\n"


def names() -> list[str]:
    """What the fit's numbers are called."""
    return [*(knob.name for knob in KNOBS), *(_name(shift) for shift in SHIFTS)]


def shipped(table: Mapping[str, Mapping[str, float]]) -> Fit:
    """The fit that a constants file holds."""
    return Fit(np.array([table["fit"][name] for name in names()]))


def _name(shift: Shift) -> str:
    return f"{shift.name} {shift.column} {shift.key}"


def _other(values: Mapping[str, float], common: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if abs(value / common.get(name, np.inf) - 1) > 1e-9}


def _lines(values: Mapping[str, float]) -> list[str]:
    return [f"{name} = {value:.5g}" for name, value in values.items()]
