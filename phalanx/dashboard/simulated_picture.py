"""Draws a simulated run, and a simulated step, as PNG from plain values. The CLI calls it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.dashboard.numbers import percent
from phalanx.dashboard.schedule_picture import COLOURS, draw_rank
from phalanx.dashboard.simulation_view import WORDS
from phalanx.schedules.actions import KINDS
from phalanx.schedules.timing import Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
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


def draw_run(found: Mapping[str, Any], spans: Sequence[Span], marks: Sequence[Mark], path: Path) -> None:
    """One run from its first day to its last: devices that work, failures, what has been gained; and where the time went."""
    # Matplotlib takes half a second to import. Figure alone, without pyplot, keeps no state between calls.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    figure = Figure(figsize=(11.0, 6.6), dpi=144, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1), facecolor="white")
    devices, failed, gone = figure.subplots(3, 1, height_ratios=(3.0, 1.3, 0.8))
    failed.sharex(devices)
    for axes in (devices, failed, gone):
        _plain(axes)
    _draw_devices(devices, spans)
    _draw_marks(failed, marks)
    devices.set_xlim(0, max((span[1] for span in spans), default=1.0) / _DAY)
    failed.set_xlabel("day", color=_INK)
    _draw_parts(gone, found["spent"])
    devices.set_title("Simulated run", loc="left", color=_INK, fontsize=12, fontweight="bold")
    caption = f"goodput {percent(found['goodput'])} (P10–P90 {percent(found['goodput_p10'])}–{percent(found['goodput_p90'])}), {len(marks)} failures in this run of {found['runs']}"
    devices.set_title(caption, loc="right", color=_MUTED, fontsize=9)
    figure.savefig(path, format="png")


def _draw_devices(axes: Axes, spans: Sequence[Span]) -> None:
    for state, colour in STATES.items():
        some = [span for span in spans if span[2] == state]
        if not some:
            continue
        # What stands still has no devices at work: a thin line at the bottom shows it.
        edges = [(start / _DAY, (stop - start) / _DAY) for start, stop, _, _ in some]
        if state in ("computing", "slower"):
            for devices in sorted({span[3] for span in some}):
                bars = [edge for edge, span in zip(edges, some, strict=True) if span[3] == devices]
                axes.broken_barh(bars, (0, devices), facecolor=colour, linewidth=0)
        else:
            most = max((span[3] for span in spans), default=1)
            axes.broken_barh(edges, (0, most), facecolor=colour, linewidth=0)
    axes.set_ylabel("devices at work", color=_INK)
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
    axes.set_ylabel("failures", color=_INK)


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
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35), ncols=4, frameon=False, fontsize=8, labelcolor=_INK)


def draw_step(found: Mapping[str, Any], timeline: Timeline, sent: Sequence[Sent], path: Path) -> None:
    """What each rank does when, and below it what its links carry."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch

    ranks = len(timeline.ranks)
    links = sorted({(one[0], one[1]) for one in sent})
    size = (13.0, min(30.0, 2.4 + 0.42 * ranks + 0.2 * len(links)))
    figure = Figure(figsize=size, dpi=144, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1), facecolor="white")
    if links:
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(0.42 * ranks, max(0.5, 0.2 * len(links))))
        _draw_links(lower, links, sent)
        lower.set_xlabel("seconds", color=_INK)
    else:
        upper = figure.subplots()
        upper.set_xlabel("seconds", color=_INK)
    _plain(upper)
    upper.grid(False)
    upper.barh(range(ranks), [timeline.stop] * ranks, height=0.86, color=COLOURS["idle"])
    for rank, row in enumerate(timeline.ranks):
        draw_rank(upper, rank, row, sum(map(len, timeline.ranks)) <= 600)
    if found["seconds"] > timeline.stop:
        tail = found["seconds"] - timeline.stop
        upper.barh(range(ranks), [tail] * ranks, left=timeline.stop, height=0.86, color="#334155")
    upper.set_ylim(ranks - 0.5, -0.5)
    upper.set_xlim(0, found["seconds"])
    upper.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    kinds = [kind for kind in KINDS if any(timed.kind == kind for row in timeline.ranks for timed in row)]
    patches = [Patch(color=COLOURS[kind], label=KINDS[kind]) for kind in kinds] + [Patch(color=COLOURS["idle"], label="idle")]
    patches += [Patch(color="#334155", label="gradients, optimizer")]
    patches += [Patch(color=_TRAVEL[name], label=f"{name} messages") for name in _TRAVEL if any(one[2] == name for one in sent)]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=min(6, len(patches)), frameon=False, fontsize=9, labelcolor=_INK
    )
    upper.set_title(found["schedule"], loc="left", color=_INK, fontsize=12, fontweight="bold", parse_math=False)
    caption = f"step {found['seconds']:.4g} s, idle {percent(found['bubble'])}, contention {found['split']['contention']:.3g} s"
    upper.set_title(caption, loc="right", color=_MUTED, fontsize=9)
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
    axes.tick_params(colors=_INK, length=0, labelsize=9)
    axes.grid(color=_GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
