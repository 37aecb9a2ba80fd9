"""Draws the picture of `phalanx bench step`: speed and memory of every trainer as bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.dashboard.numbers import count, size
from phalanx.dashboard.pictures import GRID, INK, MUTED, new_figure, plain_axes, set_titles

FORMATS = ("svg", "png")
"""File suffixes that can be written."""
_OURS, _PEER = "#2563eb", "#9aa5b1"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerBar:
    """One trainer."""

    name: str
    tokens_per_second: float
    quartiles: tuple[float, float]
    """Tokens per second in the slower and in the faster quarter of the steps."""
    memory: int
    """Bytes."""
    is_ours: bool


def draw_trainers(bars: Sequence[TrainerBar], title: str, caption: str, path: Path) -> None:
    """Writes the picture, in the format of the file's suffix. Both axes begin at zero."""
    from matplotlib import rc_context
    from matplotlib.ticker import EngFormatter

    figure = new_figure((9.0, 1.6 + 0.5 * len(bars)), space=(0.02, 0.06))
    speed, memory = figure.subplots(1, 2, sharey=True)
    places, colors = range(len(bars)), [_OURS if bar.is_ours else _PEER for bar in bars]
    for axes in (speed, memory):
        plain_axes(axes)
        axes.grid(False, axis="y")
    speeds = [bar.tokens_per_second for bar in bars]
    spread = [
        [bar.tokens_per_second - bar.quartiles[0] for bar in bars],
        [bar.quartiles[1] - bar.tokens_per_second for bar in bars],
    ]
    speed.barh(places, speeds, xerr=spread, color=colors, height=0.62, ecolor=INK, capsize=2)
    unit, name = (2**30, "GiB") if max(bar.memory for bar in bars) >= 2**30 else (2**20, "MiB")
    memory.barh(places, [bar.memory / unit for bar in bars], color=colors, height=0.62)
    for place, bar in enumerate(bars):
        for axes, value, text in (
            (speed, bar.quartiles[1], count(bar.tokens_per_second)),
            (memory, bar.memory / unit, size(bar.memory)),
        ):
            axes.annotate(text, (value, place), (4, 0), textcoords="offset points", va="center", fontsize=9, color=INK)
    speed.set_yticks(places, [bar.name for bar in bars], color=INK)
    speed.set_ylim(len(bars) - 0.5, -0.5)
    speed.set_xlim(0, 1.2 * max(bar.quartiles[1] for bar in bars))
    memory.set_xlim(0, 1.25 * max(bar.memory for bar in bars) / unit)
    speed.xaxis.set_major_formatter(EngFormatter(sep=""))
    speed.set_xlabel("tokens/s (median, quartiles)", color=MUTED)
    memory.set_xlabel(f"peak memory ({name})", color=MUTED)
    for axes in (speed, memory):
        axes.axvline(0, color=GRID, linewidth=1)
    set_titles(speed, title, "")
    memory.set_title(caption, loc="right", color=MUTED, fontsize=9, pad=10)
    kind = path.suffix[1:]
    with rc_context({"svg.hashsalt": title}):  # the same numbers make the same file
        figure.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else None)
