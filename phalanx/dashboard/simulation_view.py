"""Shows what `phalanx simulate` computes: a whole run and one step as text and as PNG, and one step as a Perfetto trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.dashboard.numbers import duration, percent
from phalanx.dashboard.pictures import INK, action_colors, draw_ranks, legend_below, new_figure, plain_axes, set_titles
from phalanx.planning.simulate.simulated_run import FailureMark, Span
from phalanx.planning.simulate.simulated_step import Message, SimulatedStep
from phalanx.planning.simulate.simulation import SimulationReport
from phalanx.schedules.actions import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TIME_USES = {
    "computing": ("computing", "#2563eb"),
    "slower": ("slower on fewer nodes", "#f59e0b"),
    "lost": ("repeated steps", "#dc2626"),
    "detection": ("detecting failures", "#7c3aed"),
    "restart": ("restarting", "#db2777"),
    "saving": ("saving", "#10b981"),
    "waiting": ("waiting for nodes or people", "#6b7280"),
    "maintenance": ("maintenance", "#0f766e"),
}
"""Label and color of each way in which a run spends time."""
_ACTIONS = {
    "restart": "restarted in place",
    "spare": "moved to free nodes",
    "shrink": "continued on fewer ranks",
    "grow": "grown back",
    "wait": "waited for a node",
    "end": "given up and restarted by a person",
    "maintenance": "planned pauses",
}
_SOURCES = {"replicas": "on other ranks", "memory": "in host memory", "disk": "on disk", "none": "kept nowhere"}
_MESSAGE_COLORS = {"pipeline": "#0f766e", "data": "#9333ea", "expert": "#dc2626", "tensor": "#ea580c", "context": "#0891b2"}
_TAIL_COLOR = "#334155"
_BAR = 40
"""Columns of a bar for 100 % of the time."""
_DAY = 86400.0
_MICROSECONDS = 1e6
_RANKS, _LINKS = 1, 2
"""Process ids in the trace: the format calls a group of tracks a process."""


def run_text(report: SimulationReport) -> list[str]:
    """The lines about a whole run."""
    goodput, finish = report.goodput, report.finish_days
    lines = [
        f"{report.candidate.layout.ranks:,} ranks on {_nodes(report.nodes - report.spares)}, {report.spares:,} spare; "
        f"steps of {report.candidate.seconds:.3g} s; {report.runs} runs of {_days(report.trial.seconds / _DAY)}",
        f"goodput   {percent(goodput.mean)} (P10–P90 {percent(goodput.low)}–{percent(goodput.high)}), "
        f"closed form with enough nodes {percent(report.closed)}",
        f"finish    after {_days(finish.mean)} (P10–P90 {_days(finish.low)}–{_days(finish.high)})",
    ]
    if report.mtbf_seconds is not None:
        total = sum(report.failures.values())
        actions = ", ".join(f"{count:,.1f} × {_ACTIONS.get(name, name)}" for name, count in report.actions.items())
        lines += [
            f"failures  {total:,.1f} in a run, one every {duration(report.mtbf_seconds)} on average: {_most_frequent(report.failures)}",
            f"answers   {actions or 'none'}",
        ]
    lines.append(f"the state is {_SOURCES[report.keep]}{_save_interval(report)}")
    lines += ["", "where the time goes"]
    for use, fraction in report.spent.items():
        if fraction > 0:
            lines.append(f"  {TIME_USES[use][0]:<28} {percent(fraction):>6}  {'█' * round(_BAR * fraction)}")
    return lines + _intervals(report) + _spares(report) + ["", *(f"assumed: {line}" for line in report.assumed)]


def _days(days: float) -> str:
    return f"{days:,.1f} days" if days >= 1 else duration(_DAY * days)


def _nodes(count: int) -> str:
    return f"{count:,} node{'' if count == 1 else 's'}"


def _most_frequent(counts: Mapping[str, float]) -> str:
    first = ", ".join(f"{name} {count:,.1f}" for name, count in list(counts.items())[:6])
    return first + (", …" if len(counts) > 6 else "")


def _save_interval(report: SimulationReport) -> str:
    if report.keep == "none":
        return ": a failure sends the run back to its beginning"
    if report.interval_seconds is None:
        return ": failures need no saves"
    best = f" (best of the closed form: {duration(report.best_interval_seconds)})" if report.best_interval_seconds else ""
    return f", saved every {duration(report.interval_seconds)}{best}"


def _intervals(report: SimulationReport) -> list[str]:
    if not report.intervals:
        return []
    best = max(report.intervals, key=lambda variation: variation.goodput)
    lines = ["", "saved every      goodput   closed form"]
    for variation in report.intervals:
        mark = "  ← best" if variation is best else ""
        goodput, closed = percent(variation.goodput), percent(variation.closed)
        lines.append(f"  {duration(variation.value):<14} {goodput:>6}    {closed:>6}{mark}")
    return lines


def _spares(report: SimulationReport) -> list[str]:
    if not report.spare_nodes:
        return []
    unit = "$" if report.priced else "device-hours "
    lines = ["", "spare nodes      goodput   days      cost of the whole run"]
    for variation in report.spare_nodes:
        mark = "  ← lowest cost" if variation.value == report.pays else ""
        goodput = percent(variation.goodput)
        lines.append(f"  {variation.value:<14} {goodput:>6}    {variation.days:<8,.1f}  {unit}{variation.cost:,.0f}{mark}")
    return lines


def step_text(step: SimulatedStep, planned: float) -> list[str]:
    """The lines about one step; `planned`: its seconds in the plan."""
    schedule = step.schedule
    lines = [
        f"{schedule.name}: {schedule.stages} stages on {schedule.ranks} pipeline ranks, {schedule.micro_batches} micro-batches",
        f"step {step.seconds:.4g} s, planned {planned:.4g} s; idle {percent(step.bubble)} of the schedule's time",
        "",
    ]
    for name, seconds in step.split.items():
        if abs(seconds) > 1e-9:
            fraction = seconds / step.seconds
            lines.append(f"  {name:<12} {seconds:>10.4g} s  {percent(fraction):>6}  {'█' * round(_BAR * max(0.0, fraction))}")
    return lines


def draw_run(report: SimulationReport, path: Path) -> None:
    """Draws the first simulated run: devices at work and failures over time; and how all runs spend their time."""
    trial = report.trial
    figure = new_figure((11.0, 6.6))
    devices, failures, uses = figure.subplots(3, 1, height_ratios=(3.0, 1.3, 0.8))
    failures.sharex(devices)
    for axes in (devices, failures, uses):
        _style(axes)
    _draw_devices(devices, trial.spans)
    _draw_failures(failures, trial.marks)
    devices.set_xlim(0, max((span.stop for span in trial.spans), default=1.0) / _DAY)
    failures.set_xlabel("day", color=INK)
    _draw_uses(uses, report.spent)
    goodput = report.goodput
    reached = f"goodput {percent(goodput.mean)} (P10–P90 {percent(goodput.low)}–{percent(goodput.high)})"
    set_titles(devices, "Simulated run", f"{reached}, {len(trial.marks)} failures in this run of {report.runs}")
    figure.savefig(path, format="png")


def _draw_devices(axes: Axes, spans: Sequence[Span]) -> None:
    most = max((span.devices for span in spans), default=1)
    for state, (_, color) in TIME_USES.items():
        for height in sorted({span.devices for span in spans if span.state == state}):
            same = [span for span in spans if span.state == state and span.devices == height]
            bars = [(span.start / _DAY, (span.stop - span.start) / _DAY) for span in same]
            # Without devices at work, the color of the state fills the whole height.
            axes.broken_barh(bars, (0, height if state in ("computing", "slower") else most), facecolor=color, linewidth=0)
    axes.set_ylabel("devices at work", color=INK)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_failures(axes: Axes, marks: Sequence[FailureMark]) -> None:
    """Failures by component, the most frequent at the top."""
    times: dict[str, list[float]] = {}
    for mark in marks:
        times.setdefault(mark.component, []).append(mark.at / _DAY)
    names = sorted(times, key=lambda name: -len(times[name]))[:6]
    rest = [at for name, days in times.items() if name not in names for at in days]
    rows = [(f"{name} {len(times[name])}", times[name]) for name in names] + ([(f"others {len(rest)}", rest)] if rest else [])
    for row, (_, days) in enumerate(rows):
        axes.scatter(days, [row] * len(days), marker="|", s=40, color="#dc2626", linewidths=0.9)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    axes.set_ylabel("failures", color=INK)


def _draw_uses(axes: Axes, spent: Mapping[str, float]) -> None:
    left = 0.0
    for use, fraction in spent.items():
        if fraction > 0:
            label, color = TIME_USES[use]
            axes.barh([0], [fraction], left=left, color=color, label=f"{label} {percent(fraction)}")
            left += fraction
    axes.set_xlim(0, max(left, 1e-9))
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    axes.grid(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=4, frameon=False, fontsize=8, labelcolor=INK)


def draw_step(step: SimulatedStep, path: Path) -> None:
    """Draws the actions of each rank over time, and below them the messages on its links."""
    timeline, ranks = step.timeline, len(step.timeline.ranks)
    links = sorted({(message.rank, message.link) for message in step.messages})
    figure = new_figure((13.0, min(30.0, 2.4 + 0.42 * ranks + 0.2 * len(links))))
    if links:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(0.42 * ranks, max(0.5, 0.2 * len(links))))
        _draw_links(lower, links, step.messages)
    else:
        upper = lower = figure.subplots()
    lower.set_xlabel("seconds", color=INK)
    _style(upper)
    upper.grid(False)
    draw_ranks(upper, timeline, numbered=sum(map(len, timeline.ranks)) <= 600)
    if step.seconds > timeline.stop:
        tail = step.seconds - timeline.stop
        upper.barh(range(ranks), [tail] * ranks, left=timeline.stop, height=0.86, color=_TAIL_COLOR)
    upper.set_xlim(0, step.seconds)
    dimensions = {message.dimension for message in step.messages}
    messages = {f"{name} messages": color for name, color in _MESSAGE_COLORS.items() if name in dimensions}
    legend_below(figure, action_colors(timeline) | {"gradients, optimizer": _TAIL_COLOR} | messages)
    caption = f"step {step.seconds:.4g} s, idle {percent(step.bubble)}, contention {step.split['contention']:.3g} s"
    set_titles(upper, step.schedule.name, caption)
    figure.savefig(path, format="png")


def _draw_links(axes: Axes, links: Sequence[tuple[int, str]], messages: Sequence[Message]) -> None:
    _style(axes)
    axes.grid(False)
    rows = {link: row for row, link in enumerate(links)}
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for message in messages:
        row = rows[message.rank, message.link]
        bars.setdefault((row, message.dimension), []).append((message.start, message.stop - message.start))
    for (row, dimension), lengths in bars.items():
        axes.broken_barh(lengths, (row - 0.4, 0.8), facecolor=_MESSAGE_COLORS[dimension], linewidth=0, alpha=0.7)
    axes.set_ylim(len(links) - 0.5, -0.5)
    labeled = range(0, len(links), max(1, len(links) // 24))
    axes.set_yticks(list(labeled), [f"rank {links[row][0]} {links[row][1]}" for row in labeled])
    axes.tick_params(labelsize=7)


def _style(axes: Axes) -> None:
    plain_axes(axes, INK)
    axes.spines["bottom"].set_visible(False)


def step_trace(step: SimulatedStep) -> str:
    """The step as a file for Perfetto and Chrome's tracing page: a track for each pipeline rank and for each link."""
    timeline = step.timeline
    events: list[dict[str, Any]] = [_named("process", "pipeline ranks", _RANKS), _named("process", "links", _LINKS)]
    for rank, row in enumerate(timeline.ranks):
        events.append(_named("thread", f"rank {rank}", _RANKS, rank))
        for timed in row:
            name = f"{timed.stage}{timed.kind}{timed.micro_batch}"
            args = {"stage": timed.stage, "micro-batch": timed.micro_batch}
            events.append(_slice(_RANKS, rank, name, KINDS[timed.kind], timed.start, timed.stop) | {"args": args})
        if step.seconds > timeline.stop:
            events.append(_slice(_RANKS, rank, "gradients, optimizer", "tail", timeline.stop, step.seconds))
    # Slices of one track must not overlap unless one contains the other: messages that share a link get lanes of their own.
    lane_ends: dict[tuple[int, str], list[float]] = {}
    tracks: dict[tuple[int, str, int], int] = {}
    for message in sorted(step.messages, key=lambda message: message.start):
        rank, link = message.rank, message.link
        ends = lane_ends.setdefault((rank, link), [])
        lane = next((lane for lane, end in enumerate(ends) if end <= message.start + 1e-12), len(ends))
        ends[lane : lane + 1] = [message.stop]
        key = rank, link, lane
        if key not in tracks:
            tracks[key] = len(tracks)
            name = f"rank {rank} {link}" + (f" ({lane + 1})" if lane else "")
            events.append(_named("thread", name, _LINKS, tracks[key]))
        label = f"{message.dimension} {message.label}"
        events.append(_slice(_LINKS, tracks[key], label, message.dimension, message.start, message.stop))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _named(what: str, name: str, process: int, track: int = 0) -> dict[str, Any]:
    """Names a group of tracks ("process") or one track ("thread")."""
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": track, "args": {"name": name}}


def _slice(process: int, track: int, name: str, kind: str, start: float, stop: float) -> dict[str, Any]:
    times = {"ts": start * _MICROSECONDS, "dur": (stop - start) * _MICROSECONDS}
    return {"ph": "X", "name": name, "cat": kind, "pid": process, "tid": track} | times
