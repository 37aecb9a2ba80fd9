"""Draws a plan as one PNG: memory by component against the device, the time of a step by part, and the trade-offs.

`phalanx plan --png` calls it; the page of a plan uses its colors and units.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.dashboard.numbers import count, dollars, percent, short_duration, size
from phalanx.dashboard.pictures import INK, MUTED, new_figure, plain_axes, printable
from phalanx.dashboard.plan_text import recompute_label
from phalanx.planning.report import MEMORY_LABELS, PART_LABELS, PlanReport, run_file_tables
from phalanx.planning.search.candidate import Candidate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BEST, _LIMIT = "#2563eb", "#dc2626"

# Okabe and Ito's colors, which are safe for color-blind readers; white gaps separate neighbors that look alike in print.
MEMORY = {
    "parameters": "#0072b2", "gradients": "#56b4e9", "optimizer": "#cc79a7", "activations": "#009e73", "logits": "#e69f00",
    "gathered": "#f0e442", "buffers": "#b8bfc8", "fixed": "#76808c",
}  # fmt: skip
STEP = {
    "compute": "#009e73", "launch": "#8fd3bd", "tensor": "#e69f00", "context": "#f0e442", "expert": "#d55e00", "data": "#0072b2",
    "pipeline": "#56b4e9", "bubble": "#d1d5db", "optimizer": "#cc79a7", "offload": "#8a4f79", "other": "#76808c",
}  # fmt: skip
"""The color of each component of memory and of each part of a step."""
OTHER_COLOR = "#332288"
"""The color of any other component."""
_ROWS = 6
"""Most candidates with bars."""
_FAR = 8.0
"""A device with more than this many times the used memory is not drawn to scale: the bars would be too short."""


def compared(report: PlanReport) -> list[Candidate]:
    """The candidates whose bars are drawn: the best, the runners-up, and then alternatives that fit."""
    fitting = [
        alternative.candidate
        for alternative in report.alternatives
        if alternative.candidate is not None and alternative.candidate.fits
    ]
    distinct: dict[str, Candidate] = {}
    for candidate in (report.best, *report.runners_up, *fitting):
        distinct.setdefault(run_file_tables(candidate), candidate)
    return list(distinct.values())[:_ROWS]


def draw_plan(report: PlanReport, path: Path) -> None:
    """Writes the picture of a plan to `path`."""
    candidates = compared(report)
    figure = new_figure((15.0, 6.4 + 0.5 * len(candidates)), dpi=120, pad=0.12, space=(0.06, 0.04))
    (memory, step), (curve, money) = figure.subplots(2, 2, height_ratios=(1.2 + 0.55 * len(candidates), 4.2))
    _memory(memory, candidates)
    _steps(step, candidates)
    _trade_off(curve, report)
    _cost(money, report)
    title = printable(_title(report))
    figure.suptitle(title, x=0.01, ha="left", color=INK, fontsize=13, fontweight="bold", parse_math=False)
    figure.savefig(path, format="png", metadata={"Title": title, "Description": printable(_description(report.best))})


def _title(report: PlanReport) -> str:
    best, hardware = report.best, report.hardware
    mfu = f", MFU {percent(best.mfu)}" if best.mfu is not None else ""
    return f"{report.model_name} on {hardware.gpus:,} × {hardware.gpu.name}: {best.name}{mfu}"


def _description(best: Candidate) -> str:
    """The winner in words, stored in the file: it explains a picture that is passed on alone."""
    parts = [
        f"step {short_duration(best.seconds)} (P10 {short_duration(best.low)}, P90 {short_duration(best.high)})",
        f"memory {best.bytes / 2**30:.1f} of {best.capacity / 2**30:.1f} GiB",
        f"{best.expected_days:.3g} days",
        f"{count(best.gpu_hours)} device-hours",
    ]
    return ", ".join(parts + ([] if best.price is None else [f"USD {count(best.price)}"]))


def memory_unit(value: float) -> tuple[str, float]:
    """A unit that suits a number of bytes, and its size."""
    return ("GiB", 2.0**30) if value >= 2**30 else ("MiB", 2.0**20)


def step_unit(seconds: float) -> tuple[str, float]:
    """A unit that suits the time of a step, and its size."""
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e-3)


def _memory(axes: Axes, candidates: Sequence[Candidate]) -> None:
    unit, scale = memory_unit(candidates[0].bytes)
    rows = [{name: value / scale for name, value in candidate.memory.items()} for candidate in candidates]
    used, capacity = max(_stacked(axes, rows, MEMORY, MEMORY_LABELS)), candidates[0].capacity / scale
    near = capacity < _FAR * used
    if near:
        axes.axvline(capacity, color=_LIMIT, linewidth=1.4, linestyle="--")
    label = f"the device has {size(candidates[0].capacity)} "
    axes.text(capacity if near else 1.04 * used, -0.6, label, color=_LIMIT, fontsize=8.5, ha="right", va="center")
    axes.set_xlim(0, 1.04 * max(capacity if near else 0.0, used))
    _frame(axes, candidates, f"memory of the fullest rank, {unit}", [size(candidate.bytes) for candidate in candidates])


def _steps(axes: Axes, candidates: Sequence[Candidate]) -> None:
    unit, scale = step_unit(candidates[0].seconds)
    rows = [{name: value / scale for name, value in candidate.split.items()} for candidate in candidates]
    lengths = _stacked(axes, rows, STEP, PART_LABELS)
    for row, candidate in enumerate(candidates):
        ends = [candidate.low / scale, candidate.high / scale]
        axes.plot(ends, [row + 0.4, row + 0.4], color=INK, linewidth=1.2, marker="|", markersize=5)
    axes.set_xlim(0, 1.04 * max(*lengths, *(candidate.high / scale for candidate in candidates)))
    _frame(
        axes, candidates, f"a step, {unit}; thin line: P10–P90", [short_duration(candidate.seconds) for candidate in candidates]
    )


def _stacked(
    axes: Axes, rows: Sequence[Mapping[str, float]], colors: Mapping[str, str], labels: Mapping[str, str]
) -> list[float]:
    """Draws one bar of several parts for each row, and returns the lengths. Parts that no row has are omitted."""
    names = [
        name
        for name in dict.fromkeys([*colors, *(name for row in rows for name in row)])
        if any(row.get(name, 0) > 0 for row in rows)
    ]
    ends = [0.0] * len(rows)
    whole = max(sum(row.values()) for row in rows)
    for name in names:
        values = [row.get(name, 0.0) for row in rows]
        if max(values) < 1e-3 * whole:
            continue
        style: dict[str, Any] = {"height": 0.62, "edgecolor": "white", "linewidth": 0.7}
        color, label = colors.get(name, OTHER_COLOR), labels.get(name, name)
        axes.barh(range(len(rows)), values, left=ends, color=color, label=label, **style)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    return ends


def _frame(axes: Axes, candidates: Sequence[Candidate], title: str, values: Sequence[str]) -> None:
    axes.set_ylim(len(candidates) - 0.4, -0.85)
    axes.set_yticks(range(len(candidates)), _labels(candidates), fontsize=9)
    for row, value in enumerate(values):  # in a column of their own, right of all bars
        axes.text(1.015, row, value, transform=axes.get_yaxis_transform(), va="center", fontsize=9, color=INK)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.1), ncols=4, frameon=False, fontsize=8.5, labelcolor=INK)
    _style(axes, title)
    axes.grid(False, axis="y")
    if labels := axes.get_yticklabels():
        labels[0].set_fontweight("bold")


def _labels(candidates: Sequence[Candidate]) -> list[str]:
    """The names of candidates; candidates of the same layout with their other settings."""
    names = [printable(candidate.name) for candidate in candidates]
    return [
        name
        if names.count(name) == 1
        else f"{name}\nmicro-batch {candidate.micro_batch}, recompute {recompute_label(candidate)}"
        for name, candidate in zip(names, candidates, strict=True)
    ]


def _trade_off(axes: Axes, report: PlanReport) -> None:
    """Draws memory against time: the fastest candidate at each memory, and the others."""
    best, curve = report.best, report.curve
    (memory, byte_unit), (step, time_unit) = memory_unit(best.bytes), step_unit(best.seconds)

    def points(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
        return [c.bytes / byte_unit for c in candidates], [c.seconds / time_unit for c in candidates]

    rest = [c for c in (*report.runners_up, *compared(report)) if run_file_tables(c) != run_file_tables(best)]
    if len(curve) > 1:
        line: dict[str, Any] = {"linewidth": 1.2, "marker": "o", "markersize": 4, "drawstyle": "steps-post"}
        axes.plot(*points(curve), color=INK, label="fastest at this memory", **line)
    if rest:
        axes.scatter(*points(rest), s=26, color=MUTED, label="others that fit", zorder=3)
    error = [[(best.seconds - best.low) / time_unit], [(best.high - best.seconds) / time_unit]]
    marks: dict[str, Any] = {"fmt": "o", "markersize": 8, "capsize": 3, "zorder": 4}
    axes.errorbar(*points([best]), yerr=error, color=_BEST, label=f"{_winner(report)}, P10–P90", **marks)
    widest = max(c.bytes for c in (best, *rest, *curve))
    if best.capacity < _FAR * widest:
        axes.axvline(best.capacity / byte_unit, color=_LIMIT, linewidth=1.4, linestyle="--", label="the device's memory")
        widest = max(widest, best.capacity)
    # A margin: the frame would cut points on it in half.
    axes.set_xlim(0, 1.06 * widest / byte_unit)
    axes.set_ylim(0, 1.06 * max(best.high, *(c.seconds for c in (best, *rest, *curve))) / time_unit)
    axes.set_xlabel(f"memory of the fullest rank, {memory}", color=INK, fontsize=9)
    axes.set_ylabel(f"step, {step}", color=INK, fontsize=9)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="lower left")
    _style(axes, "memory against time")


def _winner(report: PlanReport) -> str:
    return "winner" if report.considered > 1 else "the run file's layout"


def _cost(axes: Axes, report: PlanReport) -> None:
    """Draws the duration of the run against its cost: in device-hours if no price is known; with other cluster sizes if the report has them."""
    from matplotlib.ticker import FuncFormatter

    best = report.best
    name, format_cost, cost_of = cost_axis(best)
    scale, unit = long_unit(best.expected_days)

    def points(candidates: Sequence[Candidate]) -> tuple[list[float], list[float]]:
        return [scale * c.expected_days for c in candidates], [cost_of(c) or 0.0 for c in candidates]

    rest = [c for c in compared(report) if cost_of(c) is not None and run_file_tables(c) != run_file_tables(best)]
    if rest:
        axes.scatter(*points(rest), s=26, color=MUTED, label="others that fit", zorder=3)
    sizes = [c for c in report.scaling if cost_of(c) is not None]
    if sizes:
        axes.plot(*points(sizes), color=INK, linewidth=1.2, marker="s", markersize=4, label="fastest on this many devices")
        for candidate, day, cost in zip(sizes, *points(sizes), strict=True):
            # The line falls and bends up, so labels fit above it on the right, except where the winner's interval rises.
            offset = (7, -15) if candidate.layout.ranks == best.layout.ranks else (5, 5)
            style: dict[str, Any] = {"xytext": offset, "textcoords": "offset points", "fontsize": 8.5, "color": INK}
            axes.annotate(f"{candidate.layout.ranks:,}", (day, cost), **style)
    (early, late), (less, more) = best.ranges["expected_days"], best.ranges["gpu_hours" if best.price is None else "price"]
    axes.plot([scale * early, scale * late], [less, more], color=_BEST, linewidth=1.2, marker="|", markersize=7, zorder=4)
    axes.scatter(*points([best]), s=60, color=_BEST, label=f"{_winner(report)}, P10–P90", zorder=5)
    axes.set_xlabel(f"{unit} of the run, with failures", color=INK, fontsize=9)
    axes.set_ylabel(name, color=INK, fontsize=9)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: format_cost(value)))
    axes.set_xlim(0, 1.1 * max(scale * late, *points([best, *rest, *sizes])[0]))
    axes.set_ylim(0, 1.1 * max(more, *points([best, *rest, *sizes])[1]))
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="lower right")
    _style(axes, f"{unit} against cost")


def cost_axis(best: Candidate) -> tuple[str, Callable[[float | None], str], Callable[[Candidate], float | None]]:
    """The label, the format and the value of costs: prices, or device-hours if no price is known."""
    if best.price is not None:
        return "price, US dollars", dollars, lambda candidate: candidate.price
    return "device-hours", count, lambda candidate: candidate.gpu_hours


def long_unit(days: float) -> tuple[float, str]:
    """How many units make a day, and the unit that suits a run of `days`."""
    return next(
        ((scale, unit) for scale, unit in ((1.0, "days"), (24.0, "hours"), (1440.0, "minutes")) if days * scale >= 2),
        (86400.0, "seconds"),
    )


def _style(axes: Axes, title: str) -> None:
    plain_axes(axes, INK, 8.5)
    axes.set_title(title, loc="left", color=INK, fontsize=10, fontweight="bold")
