"""Shows simulations of `phalanx simulate`: a whole run and one step as text and PNG, and one step as a Perfetto trace."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.dashboard.numbers import duration, percent
from phalanx.dashboard.pictures import ACTION_COLORS, GRID, INK, MUTED, action_colors, draw_rank, new_figure
from phalanx.schedules.actions import KINDS
from phalanx.schedules.timing import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WORDS = {
    "computing": "computing",
    "slower": "slower on fewer nodes",
    "lost": "steps done again",
    "detection": "noticing failures",
    "restart": "starting again",
    "saving": "saving",
    "waiting": "waiting for nodes or people",
    "maintenance": "maintenance",
}
"""Where time goes."""

ACTIONS = {
    "restart": "started again in place",
    "spare": "moved to free nodes",
    "shrink": "gone on with fewer ranks",
    "grow": "grown back",
    "wait": "waited for a node",
    "end": "given up, and started again by somebody",
    "maintenance": "planned pauses",
}
_KEPT = {"replicas": "with other ranks", "memory": "in host memory", "disk": "on disk"}
_BAR = 40
"""Columns of a bar that stands for all of the time."""


STATES = {
    "computing": "#2563eb",
    "slower": "#f59e0b",
    "lost": "#dc2626",
    "detection": "#7c3aed",
    "restart": "#db2777",
    "saving": "#10b981",
    "waiting": "#6b7280",
    "maintenance": "#0f766e",
}
_TRAVEL = {"pipeline": "#0f766e", "data": "#9333ea", "expert": "#dc2626", "tensor": "#ea580c", "context": "#0891b2"}
_DAY = 86400.0

Span = tuple[float, float, str, int]
"""Start, stop, state, devices that work."""
Mark = tuple[float, str, str]
"""When, what failed, what was done."""
Sent = tuple[int, str, str, str, float, float]
"""Rank, link, dimension, name, start, stop."""


_MICRO = 1e6
_RANKS, _LINKS = 1, 2
"""Processes, as the format calls groups of tracks."""


def text(found: Mapping[str, Any]) -> list[str]:
    """Lines for a person; `found` is planning/simulate/simulation_report's values."""
    lines = [
        f"{found['ranks']:,} ranks on {_nodes(found['nodes'] - found['spares'])}, {found['spares']:,} spare; "
        f"steps of {found['step_seconds']:.3g} s; {found['runs']} runs of {_days(found['simulated_days'])}",
        f"goodput   {percent(found['goodput'])} (P10–P90 {percent(found['goodput_p10'])}–{percent(found['goodput_p90'])}), closed form, with nodes enough, {percent(found['closed'])}",
        f"finish    after {_days(found['finish_days'])} (P10–P90 {_days(found['finish_days_p10'])}–{_days(found['finish_days_p90'])})",
    ]
    if found["mtbf_seconds"] is not None:
        count = sum(found["failures"].values())
        lines.append(
            f"failures  {count:,.1f} in a run, one every {duration(found['mtbf_seconds'])} on average: {_most(found['failures'])}"
        )
        lines.append(
            f"answers   {', '.join(f'{many:,.1f} × {ACTIONS.get(name, name)}' for name, many in found['actions'].items()) or 'none'}"
        )
    lines.append(f"the state is {_KEPT[found['keep']]}" + _how_often(found))
    lines += ["", "where the time goes"]
    for name, part in found["spent"].items():
        if part > 0:
            lines.append(f"  {WORDS[name]:<28} {percent(part):>6}  {'█' * round(_BAR * part)}")
    return lines + _intervals(found) + _spares(found) + ["", *(f"assumed: {one}" for one in found["assumed"])]


def _days(days: float) -> str:
    return f"{days:,.1f} days" if days >= 1 else duration(86400 * days)


def _nodes(many: int) -> str:
    return f"{many:,} node{'' if many == 1 else 's'}"


def _most(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {many:,.1f}" for name, many in list(counts.items())[:6]) + (", …" if len(counts) > 6 else "")


def _how_often(found: Mapping[str, Any]) -> str:
    if found["interval_seconds"] is None:
        return ": nothing is saved for the sake of failures"
    best = found["best_interval_seconds"]
    return f", saved every {duration(found['interval_seconds'])}" + (f" (closed form's best: {duration(best)})" if best else "")


def _intervals(found: Mapping[str, Any]) -> list[str]:
    if not found["intervals"]:
        return []
    best = max(found["intervals"], key=lambda one: one["goodput"])
    lines = ["", "saved every      goodput   closed form"]
    for one in found["intervals"]:
        mark = "  ← best" if one is best else ""
        lines.append(f"  {duration(one['value']):<14} {percent(one['goodput']):>6}    {percent(one['closed']):>6}{mark}")
    return lines


def _spares(found: Mapping[str, Any]) -> list[str]:
    if not found["spare_nodes"]:
        return []
    unit = "$" if found["priced"] else "device-hours "
    lines = ["", "spare nodes      goodput   days      the whole run costs"]
    for one in found["spare_nodes"]:
        mark = "  ← costs least" if one["value"] == found["pays"] else ""
        lines.append(
            f"  {one['value']:<14} {percent(one['goodput']):>6}    {one['days']:<8,.1f}  {unit}{one['cost']:,.0f}{mark}"
        )
    return lines


def step_text(found: Mapping[str, Any]) -> list[str]:
    """Of one step; `found`: seconds, promised, bubble, split, schedule, ranks, micro_batches."""
    lines = [
        f"{found['schedule']}: {found['stages']} stages on {found['ranks']} pipeline ranks, {found['micro_batches']} micro-batches",
        f"step {found['seconds']:.4g} s, the plan says {found['promised']:.4g} s; idle {percent(found['bubble'])} of the schedule's time",
        "",
    ]
    for name, seconds in found["split"].items():
        if abs(seconds) > 1e-9:
            part = seconds / found["seconds"]
            lines.append(f"  {name:<12} {seconds:>10.4g} s  {percent(part):>6}  {'█' * round(_BAR * max(0.0, part))}")
    return lines


def draw_run(found: Mapping[str, Any], spans: Sequence[Span], marks: Sequence[Mark], path: Path) -> None:
    """One run from its first day to its last: devices that work, failures, what has been gained; and where the time went."""
    figure = new_figure((11.0, 6.6))
    devices, failed, gone = figure.subplots(3, 1, height_ratios=(3.0, 1.3, 0.8))
    failed.sharex(devices)
    for axes in (devices, failed, gone):
        _plain(axes)
    _draw_devices(devices, spans)
    _draw_marks(failed, marks)
    devices.set_xlim(0, max((span[1] for span in spans), default=1.0) / _DAY)
    failed.set_xlabel("day", color=INK)
    _draw_parts(gone, found["spent"])
    devices.set_title("Simulated run", loc="left", color=INK, fontsize=12, fontweight="bold")
    caption = f"goodput {percent(found['goodput'])} (P10–P90 {percent(found['goodput_p10'])}–{percent(found['goodput_p90'])}), {len(marks)} failures in this run of {found['runs']}"
    devices.set_title(caption, loc="right", color=MUTED, fontsize=9)
    figure.savefig(path, format="png")


def _draw_devices(axes: Axes, spans: Sequence[Span]) -> None:
    for state, color in STATES.items():
        some = [span for span in spans if span[2] == state]
        if not some:
            continue
        # What stands still has no devices at work: a thin line at the bottom shows it.
        edges = [(start / _DAY, (stop - start) / _DAY) for start, stop, _, _ in some]
        if state in ("computing", "slower"):
            for devices in sorted({span[3] for span in some}):
                bars = [edge for edge, span in zip(edges, some, strict=True) if span[3] == devices]
                axes.broken_barh(bars, (0, devices), facecolor=color, linewidth=0)
        else:
            most = max((span[3] for span in spans), default=1)
            axes.broken_barh(edges, (0, most), facecolor=color, linewidth=0)
    axes.set_ylabel("devices at work", color=INK)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _draw_marks(axes: Axes, marks: Sequence[Mark]) -> None:
    """Failures by component, the commonest on top."""
    counts: dict[str, list[float]] = {}
    for at, component, _ in marks:
        counts.setdefault(component, []).append(at / _DAY)
    names = sorted(counts, key=lambda name: -len(counts[name]))[:6]
    rest = [at for name, times in counts.items() if name not in names for at in times]
    rows = [(f"{name} {len(counts[name])}", counts[name]) for name in names] + ([(f"others {len(rest)}", rest)] if rest else [])
    for place, (_, times) in enumerate(rows):
        axes.scatter(times, [place] * len(times), marker="|", s=40, color="#dc2626", linewidths=0.9)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    axes.set_ylabel("failures", color=INK)


def _draw_parts(axes: Axes, spent: Mapping[str, float]) -> None:
    left = 0.0
    for name, part in spent.items():
        if part > 0:
            axes.barh([0], [part], left=left, color=STATES[name], label=f"{WORDS[name]} {percent(part)}")
            left += part
    axes.set_xlim(0, max(left, 1e-9))
    axes.set_yticks([])
    axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f}%")
    axes.grid(False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=4, frameon=False, fontsize=8, labelcolor=INK)


def draw_step(found: Mapping[str, Any], timeline: Timeline, sent: Sequence[Sent], path: Path) -> None:
    """What each rank does when, and below it what its links carry."""
    from matplotlib.patches import Patch

    ranks = len(timeline.ranks)
    links = sorted({(one[0], one[1]) for one in sent})
    size = (13.0, min(30.0, 2.4 + 0.42 * ranks + 0.2 * len(links)))
    figure = new_figure(size)
    if links:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(0.42 * ranks, max(0.5, 0.2 * len(links))))
        _draw_links(lower, links, sent)
        lower.set_xlabel("seconds", color=INK)
    else:
        upper = figure.subplots()
        upper.set_xlabel("seconds", color=INK)
    _plain(upper)
    upper.grid(False)
    upper.barh(range(ranks), [timeline.stop] * ranks, height=0.86, color=ACTION_COLORS["idle"])
    for rank, row in enumerate(timeline.ranks):
        draw_rank(upper, rank, row, sum(map(len, timeline.ranks)) <= 600)
    if found["seconds"] > timeline.stop:
        tail = found["seconds"] - timeline.stop
        upper.barh(range(ranks), [tail] * ranks, left=timeline.stop, height=0.86, color="#334155")
    upper.set_ylim(ranks - 0.5, -0.5)
    upper.set_xlim(0, found["seconds"])
    upper.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    patches = [Patch(color=color, label=label) for label, color in action_colors(timeline).items()]
    patches += [Patch(color="#334155", label="gradients, optimizer")]
    patches += [Patch(color=_TRAVEL[name], label=f"{name} messages") for name in _TRAVEL if any(one[2] == name for one in sent)]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=min(6, len(patches)), frameon=False, fontsize=9, labelcolor=INK
    )
    upper.set_title(found["schedule"], loc="left", color=INK, fontsize=12, fontweight="bold", parse_math=False)
    caption = f"step {found['seconds']:.4g} s, idle {percent(found['bubble'])}, contention {found['split']['contention']:.3g} s"
    upper.set_title(caption, loc="right", color=MUTED, fontsize=9)
    figure.savefig(path, format="png")


def _draw_links(axes: Axes, links: Sequence[tuple[int, str]], sent: Sequence[Sent]) -> None:
    _plain(axes)
    axes.grid(False)
    places = {link: place for place, link in enumerate(links)}
    bars: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for rank, link, dimension, _, start, stop in sent:
        bars.setdefault((places[rank, link], dimension), []).append((start, stop - start))
    for (place, dimension), some in bars.items():
        axes.broken_barh(some, (place - 0.4, 0.8), facecolor=_TRAVEL[dimension], linewidth=0, alpha=0.7)
    axes.set_ylim(len(links) - 0.5, -0.5)
    named = range(0, len(links), max(1, len(links) // 24))
    axes.set_yticks(list(named), [f"rank {links[place][0]} {links[place][1]}" for place in named])
    axes.tick_params(labelsize=7)


def _plain(axes: Axes) -> None:
    axes.tick_params(colors=INK, length=0, labelsize=9)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)


def trace(timeline: Timeline, sent: Sequence[Sent], seconds: float) -> str:
    """The file's text. `seconds`: of the whole step; what follows the schedule's last action is drawn as one."""
    events: list[dict[str, Any]] = [_named(_RANKS, "pipeline ranks"), _named(_LINKS, "links")]
    for rank, row in enumerate(timeline.ranks):
        events.append(_track(_RANKS, rank, f"rank {rank}"))
        for timed in row:
            name = f"{timed.stage}{timed.kind}{timed.micro_batch}"
            told = {"stage": timed.stage, "micro-batch": timed.micro_batch}
            events.append(_slice(_RANKS, rank, name, KINDS[timed.kind], timed.start, timed.stop) | {"args": told})
        if seconds > timeline.stop:
            events.append(_slice(_RANKS, rank, "gradients, optimizer", "tail", timeline.stop, seconds))
    # Slices of one track must not overlap unless one lies within the other: messages that share a link get lanes of their own.
    free: dict[tuple[int, str], list[float]] = {}
    tracks: dict[tuple[int, str, int], int] = {}
    for rank, link, dimension, name, start, stop in sorted(sent, key=lambda one: one[4]):
        lanes = free.setdefault((rank, link), [])
        lane = next((place for place, until in enumerate(lanes) if until <= start + 1e-12), len(lanes))
        lanes[lane : lane + 1] = [stop]
        key = rank, link, lane
        if key not in tracks:
            tracks[key] = len(tracks)
            events.append(_track(_LINKS, tracks[key], f"rank {rank} {link}" + (f" ({lane + 1})" if lane else "")))
        events.append(_slice(_LINKS, tracks[key], f"{dimension} {name}", dimension, start, stop))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _named(group: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": group, "args": {"name": name}}


def _track(group: int, number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": group, "tid": number, "args": {"name": name}}


def _slice(group: int, number: int, name: str, kind: str, start: float, stop: float) -> dict[str, Any]:
    when = {"ts": start * _MICRO, "dur": (stop - start) * _MICRO}
    return {"ph": "X", "name": name, "cat": kind, "pid": group, "tid": number} | when
