"""Draws a plan as one PNG: memory by component against the device, the time of a step by part, and the trade-offs. The page of a plan uses
its charts, colors and units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.dashboard.numbers import count, percent, short_duration, size
from phalanx.dashboard.pictures import INK, MUTED, new_figure, plain_axes, printable
from phalanx.dashboard.plan_text import days, interval, recompute_label
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
_LEGEND = 0.45
"""Of the width of the picture: a wider legend would be cut at its edge."""
_FAR = 8.0
"""A device with more than this many times the used memory is not drawn to scale: the bars would be too short."""


def candidates_by_role(report: PlanReport) -> dict[str, tuple[str, Candidate]]:
    """Every candidate of a report once, the best first, with the first of its roles; by the tables of its run file."""
    roles = [("winner" if report.considered > 1 else "the run file's", report.best)]
    roles += [("runner-up", candidate) for candidate in report.runners_up]
    roles += [(f"why not {other.name}", other.candidate) for other in report.alternatives if other.candidate is not None]
    roles += [("trade-off", candidate) for candidate in report.curve]
    roles += [(f"{candidate.layout.ranks:,} devices", candidate) for candidate in report.scaling]
    distinct: dict[str, tuple[str, Candidate]] = {}
    for role, candidate in roles:
        distinct.setdefault(run_file_tables(candidate), (role, candidate))
    return distinct


def compared(report: PlanReport) -> list[Candidate]:
    """The candidates whose bars are drawn: the best, the runners-up, and then alternatives that fit."""
    others = [other.candidate for other in report.alternatives if other.candidate is not None and other.candidate.fits]
    distinct: dict[str, Candidate] = {}
    for candidate in (report.best, *report.runners_up, *others):
        distinct.setdefault(run_file_tables(candidate), candidate)
    return list(distinct.values())[:_ROWS]


def draw_plan(report: PlanReport, path: Path) -> None:
    """Writes the picture of a plan to `path`."""
    candidates = compared(report)
    figure = new_figure((15.0, 6.4 + 0.5 * len(candidates)), dpi=120, pad=0.12, space=(0.06, 0.04))
    (memory, step), (curve, money) = figure.subplots(2, 2, height_ratios=(1.2 + 0.55 * len(candidates), 4.2))
    _memory(memory, candidates)
    _steps(step, candidates)
    fitting = [candidate for _, candidate in candidates_by_role(report).values() if candidate.fits or candidate is report.best]
    _trade_off(curve, report, fitting)
    _cost(money, report, fitting)
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
    _legend(axes)
    _style(axes, title)
    axes.grid(False, axis="y")
    if labels := axes.get_yticklabels():
        labels[0].set_fontweight("bold")


def _legend(axes: Axes) -> None:
    """Below the bars, in as many columns as the half of the picture that belongs to them has room for."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    for columns in (4, 3, 2):
        drawn = axes.legend(
            loc="upper right", bbox_to_anchor=(1.04, -0.1), ncols=columns, frameon=False, fontsize=8.5, labelcolor=INK
        )
        if drawn.get_window_extent().width <= _LEGEND * figure.bbox.width:
            return


def _labels(candidates: Sequence[Candidate]) -> list[str]:
    """The names of candidates; candidates of the same layout with their other settings."""
    names = [printable(candidate.name) for candidate in candidates]
    return [
        name
        if names.count(name) == 1
        else f"{name}\nmicro-batch {candidate.micro_batch}, recompute {recompute_label(candidate)}"
        for name, candidate in zip(names, candidates, strict=True)
    ]


def _coarser(candidate: Candidate, best: Candidate) -> str:
    """What to say of a candidate that computes in other numbers than the winner: it may be faster, and is no layout of the same run."""
    return "" if candidate.compute == best.compute else f", in {candidate.compute}"


def memory_chart(report: PlanReport, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """The candidates by memory and time, and those on the trade-off's line. plan.js reads it; so do `cost_chart` and its points."""
    best, curve = report.best, {run_file_tables(candidate) for candidate in report.curve}
    (memory, byte_unit), (step, time_unit) = memory_unit(best.bytes), step_unit(best.seconds)
    points = [
        {
            "x": candidate.bytes / byte_unit,
            "y": candidate.seconds / time_unit,
            "text": f"{candidate.name}{_coarser(candidate, best)}\n{size(candidate.bytes)}, {short_duration(candidate.seconds)} "
            f"({interval((candidate.low, candidate.high), short_duration)})",
            "candidate": index,
            "precision": _coarser(candidate, best),
            "line": run_file_tables(candidate) in curve,
            "label": "",
        }
        for index, candidate in enumerate(candidates)
        if candidate.layout.ranks == best.layout.ranks
    ]
    axes = {"x": f"memory of the fullest rank, {memory}", "y": f"step, {step}", "line": "fastest at this memory"}
    return {"points": points, **axes, "prefix": "", "limit": best.capacity / byte_unit}


def cost_chart(report: PlanReport, candidates: Sequence[Candidate]) -> dict[str, Any]:
    """The candidates by the duration of the run and its cost: in device-hours if no price is known."""
    best, sizes = report.best, {run_file_tables(candidate) for candidate in report.scaling}
    scale, unit = long_unit(best.expected_days)
    prefix, quantity = ("", "gpu_hours") if best.price is None else ("$", "price")
    points = []
    for index, candidate in enumerate(candidates):
        cost, ranks, is_size = getattr(candidate, quantity), candidate.layout.ranks, run_file_tables(candidate) in sizes
        precision = _coarser(candidate, best)
        text = f"{candidate.name}{precision} on {ranks:,} devices\n{days(candidate.expected_days)}, {prefix}{count(cost)}"
        point = {"x": scale * candidate.expected_days, "y": cost, "text": text, "precision": precision}
        points.append(point | {"candidate": index, "line": is_size, "label": f"{ranks:,}" if is_size else ""})
    axes = {"x": f"{unit} of the run, with failures", "y": "device-hours" if best.price is None else "price, $"}
    line = {"line": "fastest on this many devices", "own": f"{best.layout.ranks:,}"}
    return {"points": points, **axes, **line, "prefix": prefix, "limit": None}


def _trade_off(axes: Axes, report: PlanReport, candidates: Sequence[Candidate]) -> None:
    best, chart = report.best, memory_chart(report, candidates)
    unit = step_unit(best.seconds)[1]
    _scatter(axes, report, chart, ([chart["points"][0]["x"]] * 2, [best.low / unit, best.high / unit]))
    _style(axes, "memory against time")


def _cost(axes: Axes, report: PlanReport, candidates: Sequence[Candidate]) -> None:
    from matplotlib.ticker import FuncFormatter

    best, chart = report.best, cost_chart(report, candidates)
    scale, unit = long_unit(best.expected_days)
    late = [scale * value for value in best.ranges["expected_days"]]
    _scatter(axes, report, chart, (late, list(best.ranges["gpu_hours" if best.price is None else "price"])))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{chart['prefix']}{count(value)}"))
    _style(axes, f"{unit} against cost")


def _scatter(axes: Axes, report: PlanReport, chart: dict[str, Any], span: tuple[list[float], list[float]]) -> None:
    """Draws the points of a chart, the best with its `span` from P10 to P90. As on the page, points far slower are omitted."""

    def columns(points: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
        return [point["x"] for point in points], [point["y"] for point in points]

    best, *others = chart["points"]
    others = [point for point in others if point["line"] or point["y"] < 2 * best["y"]]
    line = sorted((point for point in (best, *others) if point["line"]), key=lambda point: point["x"])
    for precision in dict.fromkeys(point["precision"] for point in others):
        rest = [point for point in others if not point["line"] and point["precision"] == precision]
        if rest:
            face = "none" if precision else MUTED
            label = f"others that fit{precision}"
            axes.scatter(*columns(rest), s=26, edgecolors=MUTED, facecolors=face, label=label, zorder=3)
    if len(line) > 1:
        steps: dict[str, Any] = {} if chart["limit"] is None else {"drawstyle": "steps-post"}
        axes.plot(*columns(line), color=INK, linewidth=1.2, marker="o", markersize=4, label=chart["line"], **steps)
    for point in line:
        # The line falls and bends up, so labels fit above it on the right, except where the winner's interval rises.
        offset = (7, -15) if point is best else (5, 5)
        style: dict[str, Any] = {"xytext": offset, "textcoords": "offset points", "fontsize": 8.5, "color": INK}
        axes.annotate(point["label"], (point["x"], point["y"]), **style)
    winner = "winner" if report.considered > 1 else "the run file's layout"
    axes.plot(*span, color=_BEST, linewidth=1.2, marker="o", markersize=3, zorder=4)
    axes.scatter(*columns([best]), s=60, color=_BEST, label=f"{winner}, P10–P90", zorder=5)
    (xs, ys), limit = columns([best, *others]), chart["limit"]
    widest = max(*xs, *span[0])
    if limit is not None and limit < _FAR * widest:
        axes.axvline(limit, color=_LIMIT, linewidth=1.4, linestyle="--", label="the device's memory")
        widest = max(widest, limit)
    # A margin: the frame would cut points on it in half.
    axes.set_xlim(0, 1.08 * widest)
    axes.set_ylim(0, 1.08 * max(*ys, *span[1]))
    axes.set_xlabel(chart["x"], color=INK, fontsize=9)
    axes.set_ylabel(chart["y"], color=INK, fontsize=9)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=INK)


def long_unit(days: float) -> tuple[float, str]:
    """How many units make a day, and the unit that suits a run of `days`."""
    return next(
        ((scale, unit) for scale, unit in ((1.0, "days"), (24.0, "hours"), (1440.0, "minutes")) if days * scale >= 2),
        (86400.0, "seconds"),
    )


def _style(axes: Axes, title: str) -> None:
    plain_axes(axes, INK, 8.5)
    axes.set_title(title, loc="left", color=INK, fontsize=10, fontweight="bold")
