"""Draws the loss over a growing learning rate, for `phalanx lr-find`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from phalanx.dashboard.pictures import INK, MUTED, new_figure, plain_axes, set_titles

_LOSS, _MARK = "#2563eb", "#ea580c"


def draw_rates(
    path: Path, rates: Sequence[float], losses: Sequence[float], smooth: Sequence[float], suggestion: float | None
) -> None:
    """Writes the picture. `smooth`: the smoothed losses; `suggestion`: a rate to mark."""
    figure = new_figure((8.0, 4.6))
    axes = figure.subplots()
    plain_axes(axes)
    axes.set_xscale("log")
    axes.plot(rates, losses, color=_LOSS, alpha=0.3, linewidth=0.8, label="loss")
    axes.plot(rates, smooth, color=_LOSS, linewidth=1.8, label="smoothed")
    if suggestion is not None:
        axes.axvline(suggestion, color=_MARK, linewidth=1.4, label=f"suggestion {suggestion:.1e}")
    axes.set_xlabel("learning rate", color=INK)
    axes.legend(frameon=False, labelcolor=MUTED, fontsize=9)
    set_titles(axes, "loss by learning rate", f"{len(rates)} steps")
    figure.savefig(path, format="png")
