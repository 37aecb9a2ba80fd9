"""Draws the loss curve of a run as a PNG, from its events alone.

The CLI calls it when a run ends, and to redraw the curve of a run directory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from phalanx.dashboard.numbers import count, duration
from phalanx.dashboard.run_history import History, history
from phalanx.events.records import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FILE_NAME = "loss.png"
"""The curve's place in a run directory."""

_INK, _MUTED, _GRID = "#1f2933", "#7b8794", "#e4e7eb"
_LOSS, _EVAL, _SKIP, _SPEED, _RATE = "#2563eb", "#ea580c", "#dc2626", "#0f766e", "#9333ea"


def draw(events: Iterable[Event], path: Path) -> bool:
    """Write the curve to `path`; False, and no file, where no step has been taken."""
    known = history(events)
    if not known.steps:
        return False
    # Matplotlib takes half a second to import. Figure alone, without pyplot, keeps no state between calls.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=(9.0, 5.6), dpi=144, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1), facecolor="white")
    loss, speed = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    rate = speed.twinx()
    for axes in (loss, speed, rate):
        _plain(axes)
    rate.grid(False)
    _draw_loss(loss, known)
    _draw_speed(speed, rate, known)
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    speed.xaxis.set_major_locator(MaxNLocator(integer=True))
    speed.margins(x=0.015)
    speed.set_xlabel("step", color=_INK)
    # A directory may be called anything: no mathematics between dollars, no glyphs that the font lacks.
    name = path.resolve().parent.name.encode("latin-1", "replace").decode("latin-1")
    loss.set_title(name, loc="left", color=_INK, fontsize=12, fontweight="bold", parse_math=False, pad=10)
    loss.set_title(_caption(known), loc="right", color=_MUTED, fontsize=9, pad=10)
    figure.savefig(path, format="png")
    return True


def smooth(values: Sequence[float], points: int = 500) -> tuple[list[int], list[float]]:
    """A running median at up to `points` places: their indexes, and the medians.

    A mean would drag every spike along, and one of the past only would lag behind the steep beginning; so the window
    looks both ways, and shrinks towards the beginning to stay centred.
    """
    half = max(2, len(values) // 60)
    places = sorted({round(k * (len(values) - 1) / max(1, points - 1)) for k in range(points)})
    windows = [values[place - min(half, place) : place + min(half, place) + 1] for place in places]
    finite = [[value for value in window if math.isfinite(value)] for window in windows]
    return places, [median(window) if window else math.nan for window in finite]


def _draw_loss(axes: Axes, known: History) -> None:
    steps = sorted(known.steps)
    losses = [known.steps[step].loss for step in steps]
    # A run of one or two steps is drawn as points: a line through them would be invisible.
    marker = "o" if len(steps) < 3 else ""
    if len(steps) >= 20:
        axes.plot(steps, losses, color=_LOSS, alpha=0.3, linewidth=0.8)
        places, medians = smooth(losses)
        axes.plot([steps[k] for k in places], medians, color=_LOSS, linewidth=1.8, label="training loss, running median")
    else:
        axes.plot(steps, losses, color=_LOSS, linewidth=1.8, marker=marker, label="training loss")
    evaluated = [(step, record.loss) for step, record in sorted(known.evaluations.items()) if math.isfinite(record.loss)]
    if evaluated:
        x, y = zip(*evaluated, strict=True)
        axes.plot(x, y, color=_EVAL, linewidth=1.2, marker="o", markersize=4, label="held-out loss", zorder=4)
    for place, record in enumerate(known.skipped):
        axes.axvline(record.step, color=_SKIP, linewidth=1, alpha=0.5, linestyle=":", label="" if place else "skipped step")
    axes.set_ylabel("loss (nats)", color=_INK)
    _limit(axes, losses, [loss for _, loss in evaluated])
    axes.legend(loc="upper right", frameon=False, fontsize=9, labelcolor=_INK)


def _limit(axes: Axes, losses: Sequence[float], evaluated: Sequence[float]) -> None:
    """Keep a few spikes from flattening the rest: they may leave the picture, the beginning and the bulk may not."""
    finite = sorted(loss for loss in losses if math.isfinite(loss))
    if len(finite) < 2:
        return
    first = next(loss for loss in losses if math.isfinite(loss))
    high = max(finite[int(0.995 * (len(finite) - 1))], first, *evaluated)
    low = min(finite[0], *evaluated) if evaluated else finite[0]
    if high > low:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def _draw_speed(speed: Axes, rate: Axes, known: History) -> None:
    steps = sorted(known.steps)
    records = [known.steps[step] for step in steps]
    marker = "o" if len(steps) < 3 else ""
    speed.plot(steps, [r.tokens_per_second for r in records], color=_SPEED, linewidth=1, marker=marker)
    rate.plot(steps, [r.learning_rate for r in records], color=_RATE, linewidth=1.3, marker=marker)
    speed.set_ylabel("tokens/s", color=_SPEED)
    rate.set_ylabel("learning rate", color=_RATE)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rate.yaxis.get_offset_text().set_fontsize(9)
    # Both from zero: half the speed should look like half the speed. The very first steps warm up and may be slow.
    for axes, values in ((speed, [r.tokens_per_second for r in records]), (rate, [r.learning_rate for r in records])):
        top = max((value for value in values if math.isfinite(value)), default=0.0)
        axes.set_ylim(0, 1.12 * top or 1.0)


def _plain(axes: Axes) -> None:
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(_GRID)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_MUTED, length=0, labelsize=9)


def _caption(known: History) -> str:
    last = known.steps[max(known.steps)]
    parts = [f"step {last.step:,}", f"loss {last.loss:.4f}"]
    if known.evaluations:
        parts.append(f"held-out {known.evaluations[max(known.evaluations)].loss:.4f}")
    tokens = sum(record.tokens for record in known.steps.values())
    training = sum(record.seconds for record in known.steps.values())
    return "   ".join([*parts, f"{count(tokens)} tokens", duration(training)])
