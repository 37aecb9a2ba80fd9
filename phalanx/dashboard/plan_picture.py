"""A plan as one picture: memory by component against the device, a step's time by part, and what can be traded for what. `phalanx plan
--png` calls it with the values that `planning/explain` makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.dashboard.numbers import count, dollars, instant, percent, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _MUTED, _GRID, _BEST, _LIMIT = "#1f2933", "#7b8794", "#e4e7eb", "#2563eb", "#dc2626"

MEMORY = {
    "parameters": "#2563eb", "gradients": "#06b6d4", "optimizer": "#9333ea", "activations": "#10b981", "logits": "#f59e0b",
    "gathered": "#93c5fd", "buffers": "#9ca3af", "fixed": "#4b5563",
}  # fmt: skip
STEP = {
    "compute": "#10b981", "launch": "#6ee7b7", "tensor": "#f59e0b", "context": "#fbbf24", "expert": "#f97316", "data": "#2563eb",
    "pipeline": "#60a5fa", "bubble": "#d1d5db", "optimizer": "#9333ea", "offload": "#c084fc", "other": "#4b5563",
}  # fmt: skip
"""A colour for each component of memory and each part of a step; the page has the same."""
_REST = "#d946ef"

_ROWS = 6
"""Layouts that bars are drawn of."""


def draw(told: Mapping[str, Any], path: Path) -> None:
    """Write the picture."""
    # Matplotlib takes half a second to import. Figure alone, without pyplot, keeps no state between calls.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    options = [told["best"], *told["others"]][:_ROWS]
    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, hspace=0.06, wspace=0.04)
    figure = Figure(figsize=(15.0, 6.4 + 0.5 * len(options)), dpi=120, layout=engine, facecolor="white")
    (memory, step), (curve, money) = figure.subplots(2, 2, height_ratios=(1.2 + 0.55 * len(options), 4.2))
    _memory(memory, options)
    _steps(step, options, told["words"])
    _trade(curve, told)
    _cost(money, told)
    figure.suptitle(_safe(title(told)), x=0.01, ha="left", color=_INK, fontsize=13, fontweight="bold", parse_math=False)
    figure.savefig(path, format="png", metadata={"Title": _safe(title(told)), "Description": _safe(description(told))})


def title(told: Mapping[str, Any]) -> str:
    model, cluster = told["model"], told["cluster"]
    mfu = f", MFU {percent(told['best']['mfu'])}" if told["best"]["mfu"] is not None else ""
    return f"{model['name']} on {cluster['gpus']:,} × {cluster['gpu']}: {told['best']['name']}{mfu}"


def description(told: Mapping[str, Any]) -> str:
    """The winner in words, kept in the file: a picture that travels alone still says what it is of."""
    best = told["best"]
    low, high = best["ranges"]["seconds"]
    parts = [
        f"step {instant(best['seconds'])} (P10 {instant(low)}, P90 {instant(high)})",
        f"memory {_gib(best['bytes']):.1f} of {_gib(best['capacity']):.1f} GiB",
        f"{best['expected_days']:.3g} days",
        f"{count(best['gpu_hours'])} device-hours",
    ]
    return ", ".join(parts + ([] if best["price"] is None else [f"USD {count(best['price'])}"]))


def _memory(axes: Axes, options: Sequence[Mapping[str, Any]]) -> None:
    rows = [{name: _gib(value) for name, value in option["memory"].items()} for option in options]
    used = _stacked(axes, rows, MEMORY, {})
    capacity = _gib(options[0]["capacity"])
    axes.axvline(capacity, color=_LIMIT, linewidth=1.4, linestyle="--")
    axes.annotate(
        f"{capacity:.1f} GiB", (capacity, -0.62), color=_LIMIT, fontsize=8, ha="right", va="center", annotation_clip=False
    )
    for place, option in enumerate(options):
        axes.text(_gib(option["bytes"]) + 0.01 * capacity, place, size(option["bytes"]), va="center", fontsize=8, color=_INK)
    axes.set_xlim(0, 1.1 * max(capacity, *used))
    _frame(axes, options, "memory of the fullest rank, GiB", ncols=4)


def _steps(axes: Axes, options: Sequence[Mapping[str, Any]], words: Mapping[str, str]) -> None:
    rows = [option["split"] for option in options]
    lengths = _stacked(axes, rows, STEP, words)
    for place, option in enumerate(options):
        low, high = option["ranges"]["seconds"]
        axes.plot([low, high], [place + 0.38, place + 0.38], color=_INK, linewidth=1.2, marker="|", markersize=5)
        axes.text(max(high, option["seconds"]), place, f"  {instant(option['seconds'])}", va="center", fontsize=8, color=_INK)
    axes.set_xlim(0, 1.15 * max(*lengths, *(option["high"] for option in options)))
    _frame(axes, options, "a step, seconds; thin line: P10–P90", ncols=4)


def _stacked(
    axes: Axes, rows: Sequence[Mapping[str, float]], colours: Mapping[str, str], words: Mapping[str, str]
) -> list[float]:
    """Bars of several parts, one after the other; returns how long each became. Parts that nobody has are left out."""
    names = [
        name
        for name in dict.fromkeys([*colours, *(name for row in rows for name in row)])
        if any(row.get(name, 0) > 0 for row in rows)
    ]
    ends = [0.0] * len(rows)
    whole = max(sum(row.values()) for row in rows)
    for name in names:
        values = [row.get(name, 0.0) for row in rows]
        if max(values) < 1e-3 * whole:
            continue
        axes.barh(range(len(rows)), values, left=ends, height=0.62, color=colours.get(name, _REST), label=words.get(name, name))
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    return ends


def _frame(axes: Axes, options: Sequence[Mapping[str, Any]], name: str, ncols: int) -> None:
    axes.set_ylim(len(options) - 0.4, -0.8)
    axes.set_yticks(range(len(options)), [_safe(option["name"]) for option in options], fontsize=8.5)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.1), ncols=ncols, frameon=False, fontsize=8, labelcolor=_INK)
    _plain(axes, name)
    axes.grid(False, axis="y")
    if labels := axes.get_yticklabels():
        labels[0].set_fontweight("bold")


def _trade(axes: Axes, told: Mapping[str, Any]) -> None:
    """The quickest at every memory."""
    best, curve = told["best"], told["curve"] or [told["best"]]
    axes.plot(
        [_gib(option["bytes"]) for option in curve], [option["seconds"] for option in curve],
        color=_INK, linewidth=1.2, marker="o", markersize=4, drawstyle="steps-post", label="quickest at this memory",
    )  # fmt: skip
    others = told["others"]
    axes.scatter(
        [_gib(one["bytes"]) for one in others],
        [one["seconds"] for one in others],
        s=26,
        color=_MUTED,
        label="runners-up" if others else None,
        zorder=3,
    )
    axes.errorbar(
        [_gib(best["bytes"])], [best["seconds"]], yerr=[[best["seconds"] - best["low"]], [best["high"] - best["seconds"]]],
        fmt="o", markersize=7, color=_BEST, capsize=3, label="winner, P10–P90", zorder=4,
    )  # fmt: skip
    axes.axvline(_gib(best["capacity"]), color=_LIMIT, linewidth=1.4, linestyle="--", label="the device's memory")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.set_xlabel("memory of the fullest rank, GiB", color=_INK, fontsize=9)
    axes.set_ylabel("step, seconds", color=_INK, fontsize=9)
    axes.legend(frameon=False, fontsize=8, labelcolor=_INK, loc="lower left")
    _plain(axes, "what memory buys")


def _cost(axes: Axes, told: Mapping[str, Any]) -> None:
    """What days cost; in device-hours where no price is known. Clusters of other sizes are in it where they were asked for."""
    from matplotlib.ticker import FuncFormatter

    best = told["best"]
    key, name, form = ("price", "price", dollars) if best["price"] is not None else ("gpu_hours", "device-hours", count)
    scale, unit = long_unit(best["expected_days"])
    rest = [option for option in (*told["others"], *told["curve"]) if option[key] is not None]
    axes.scatter(
        [scale * one["expected_days"] for one in rest],
        [one[key] for one in rest],
        s=26,
        color=_MUTED,
        label="runners-up" if rest else None,
        zorder=3,
    )
    sizes = [one for one in told.get("scaling", ()) if one[key] is not None]
    if sizes:
        places = [scale * one["expected_days"] for one in sizes]
        axes.plot(
            places,
            [one[key] for one in sizes],
            color=_INK,
            linewidth=1.2,
            marker="s",
            markersize=4,
            label="other numbers of devices",
        )
        for place, one in zip(places, sizes, strict=True):
            axes.annotate(
                f"{one['ranks']:,}", (place, one[key]), xytext=(4, 5), textcoords="offset points", fontsize=8, color=_INK
            )
    (early, late), (less, more) = best["ranges"]["expected_days"], best["ranges"][key]
    axes.plot([scale * early, scale * late], [less, more], color=_BEST, linewidth=1.2, marker="|", markersize=7, zorder=4)
    axes.scatter([scale * best["expected_days"]], [best[key]], s=55, color=_BEST, label="winner, P10–P90", zorder=5)
    axes.set_xlabel(f"{unit} of the run, failures considered", color=_INK, fontsize=9)
    axes.set_ylabel(name, color=_INK, fontsize=9)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    axes.margins(0.12)
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.legend(frameon=False, fontsize=8, labelcolor=_INK, loc="lower right")
    _plain(axes, f"what {unit} cost")


def long_unit(days: float) -> tuple[float, str]:
    """The unit that suits a run of so many days, and how many of them make a day."""
    return next(
        ((scale, unit) for scale, unit in ((1.0, "days"), (24.0, "hours"), (1440.0, "minutes")) if days * scale >= 2),
        (86400.0, "seconds"),
    )


def _plain(axes: Axes, name: str) -> None:
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    axes.grid(True, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=_INK, length=0, labelsize=8.5)
    axes.set_title(name, loc="left", color=_INK, fontsize=10, fontweight="bold")


def _gib(value: float) -> float:
    return value / 2**30


def _safe(text: str) -> str:
    """No glyphs that the font lacks."""
    return text.encode("latin-1", "replace").decode("latin-1")
