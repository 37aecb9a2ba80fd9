"""A plan as one picture: memory by component against the device, a step's time by part, and what can be traded for what. `phalanx plan
--png` calls it with the values that `planning/explain` makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.dashboard.numbers import count, dollars, percent, short_duration, size
from phalanx.dashboard.plan_text import recomputed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _MUTED, _GRID, _BEST, _LIMIT = "#1f2933", "#7b8794", "#e4e7eb", "#2563eb", "#dc2626"

# Okabe and Ito's colours, which people who confuse red and green tell apart; white gaps part neighbours that are alike in print.
MEMORY = {
    "parameters": "#0072b2", "gradients": "#56b4e9", "optimizer": "#cc79a7", "activations": "#009e73", "logits": "#e69f00",
    "gathered": "#f0e442", "buffers": "#b8bfc8", "fixed": "#76808c",
}  # fmt: skip
STEP = {
    "compute": "#009e73", "launch": "#8fd3bd", "tensor": "#e69f00", "context": "#f0e442", "expert": "#d55e00", "data": "#0072b2",
    "pipeline": "#56b4e9", "bubble": "#d1d5db", "optimizer": "#cc79a7", "offload": "#8a4f79", "other": "#76808c",
}  # fmt: skip
"""A colour for each component of memory and each part of a step; the page has the same."""
OTHERS = "#332288"
"""Of what has no colour of its own."""
_ROWS = 6
"""Layouts that bars are drawn of."""
_FAR = 8.0
"""A device with more than so many times the memory that is used is told of, not drawn to scale: bars would be specks."""


def compared(told: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Layouts whose bars stand beside the winner's: runners-up, or what was told why not where there are few."""
    fitting = [one["option"] for one in told["why_not"] if one["option"] is not None and one["option"]["fits"]]
    every: dict[str, Mapping[str, Any]] = {}
    for option in (told["best"], *told["others"], *fitting):
        every.setdefault(option["toml"], option)
    return list(every.values())[:_ROWS]


def draw(told: Mapping[str, Any], path: Path) -> None:
    """Write the picture."""
    # Matplotlib takes half a second to import. Figure alone, without pyplot, keeps no state between calls.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    options = compared(told)
    engine = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, hspace=0.06, wspace=0.04)
    figure = Figure(figsize=(15.0, 6.4 + 0.5 * len(options)), dpi=120, layout=engine, facecolor="white")
    (memory, step), (curve, money) = figure.subplots(2, 2, height_ratios=(1.2 + 0.55 * len(options), 4.2))
    _memory(memory, options, told["words"])
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
        f"step {short_duration(best['seconds'])} (P10 {short_duration(low)}, P90 {short_duration(high)})",
        f"memory {_gib(best['bytes']):.1f} of {_gib(best['capacity']):.1f} GiB",
        f"{best['expected_days']:.3g} days",
        f"{count(best['gpu_hours'])} device-hours",
    ]
    return ", ".join(parts + ([] if best["price"] is None else [f"USD {count(best['price'])}"]))


def memory_unit(value: float) -> tuple[str, float]:
    """The unit that suits so many bytes, and its size."""
    return ("GiB", 2.0**30) if value >= 2**30 else ("MiB", 2.0**20)


def step_unit(seconds: float) -> tuple[str, float]:
    """The unit that suits such a step, and its size."""
    return ("s", 1.0) if seconds >= 1 else ("ms", 1e-3)


def _memory(axes: Axes, options: Sequence[Mapping[str, Any]], words: Mapping[str, str]) -> None:
    unit, scale = memory_unit(options[0]["bytes"])
    rows = [{name: value / scale for name, value in option["memory"].items()} for option in options]
    used, capacity = max(_stacked(axes, rows, MEMORY, words)), options[0]["capacity"] / scale
    near = capacity < _FAR * used
    if near:
        axes.axvline(capacity, color=_LIMIT, linewidth=1.4, linestyle="--")
    # Above the uppermost bar.
    said = f"the device has {size(options[0]['capacity'])} "
    axes.text(capacity if near else 1.04 * used, -0.6, said, color=_LIMIT, fontsize=8.5, ha="right", va="center")
    axes.set_xlim(0, 1.04 * max(capacity if near else 0.0, used))
    _frame(axes, options, f"memory of the fullest rank, {unit}", [size(option["bytes"]) for option in options])


def _steps(axes: Axes, options: Sequence[Mapping[str, Any]], words: Mapping[str, str]) -> None:
    unit, scale = step_unit(options[0]["seconds"])
    rows = [{name: value / scale for name, value in option["split"].items()} for option in options]
    lengths = _stacked(axes, rows, STEP, words)
    for place, option in enumerate(options):
        ends = [value / scale for value in option["ranges"]["seconds"]]
        axes.plot(ends, [place + 0.4, place + 0.4], color=_INK, linewidth=1.2, marker="|", markersize=5)
    axes.set_xlim(0, 1.04 * max(*lengths, *(option["high"] / scale for option in options)))
    _frame(axes, options, f"a step, {unit}; thin line: P10–P90", [short_duration(option["seconds"]) for option in options])


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
        look: dict[str, Any] = {"height": 0.62, "edgecolor": "white", "linewidth": 0.7}
        axes.barh(range(len(rows)), values, left=ends, color=colours.get(name, OTHERS), label=words.get(name, name), **look)
        ends = [end + value for end, value in zip(ends, values, strict=True)]
    return ends


def _frame(axes: Axes, options: Sequence[Mapping[str, Any]], name: str, values: Sequence[str]) -> None:
    axes.set_ylim(len(options) - 0.4, -0.85)
    axes.set_yticks(range(len(options)), _labels(options), fontsize=9)
    for place, value in enumerate(values):  # in a column of their own, where no bar or line runs through them
        axes.text(1.015, place, value, transform=axes.get_yaxis_transform(), va="center", fontsize=9, color=_INK)
    axes.legend(loc="upper center", bbox_to_anchor=(0.45, -0.1), ncols=4, frameon=False, fontsize=8.5, labelcolor=_INK)
    _plain(axes, name)
    axes.grid(False, axis="y")
    if labels := axes.get_yticklabels():
        labels[0].set_fontweight("bold")


def _labels(options: Sequence[Mapping[str, Any]]) -> list[str]:
    """Their names; those of the same layout with what sets them apart."""
    names = [_safe(option["name"]) for option in options]
    return [
        name if names.count(name) == 1 else f"{name}\nmicro-batch {option['micro_batch']}, recompute {recomputed(option)}"
        for name, option in zip(names, options, strict=True)
    ]


def _trade(axes: Axes, told: Mapping[str, Any]) -> None:
    """The quickest at every memory, and what else was looked at."""
    best, curve = told["best"], told["curve"]
    (memory, large), (step, long) = memory_unit(best["bytes"]), step_unit(best["seconds"])

    def places(options: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
        return [one["bytes"] / large for one in options], [one["seconds"] / long for one in options]

    rest = [one for one in (*told["others"], *compared(told)) if one["toml"] != best["toml"]]
    if len(curve) > 1:
        line: dict[str, Any] = {"linewidth": 1.2, "marker": "o", "markersize": 4, "drawstyle": "steps-post"}
        axes.plot(*places(curve), color=_INK, label="quickest at this memory", **line)
    if rest:
        axes.scatter(*places(rest), s=26, color=_MUTED, label="others that fit", zorder=3)
    error = [[(best["seconds"] - best["low"]) / long], [(best["high"] - best["seconds"]) / long]]
    axes.errorbar(
        *places([best]), yerr=error, fmt="o", markersize=8, color=_BEST, capsize=3, label=f"{_first(told)}, P10–P90", zorder=4
    )
    widest = max(one["bytes"] for one in (best, *rest, *curve))
    if best["capacity"] < _FAR * widest:
        axes.axvline(best["capacity"] / large, color=_LIMIT, linewidth=1.4, linestyle="--", label="the device's memory")
        widest = max(widest, best["capacity"])
    # No point may lie on the frame, which would cut it in half.
    axes.set_xlim(0, 1.06 * widest / large)
    axes.set_ylim(0, 1.06 * max(best["high"], *(one["seconds"] for one in (best, *rest, *curve))) / long)
    axes.set_xlabel(f"memory of the fullest rank, {memory}", color=_INK, fontsize=9)
    axes.set_ylabel(f"step, {step}", color=_INK, fontsize=9)
    axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK, loc="lower left")
    _plain(axes, "what memory buys")


def _first(told: Mapping[str, Any]) -> str:
    return "winner" if told["considered"] > 1 else "the run file's layout"


def _cost(axes: Axes, told: Mapping[str, Any]) -> None:
    """What days cost; in device-hours where no price is known. Clusters of other sizes are in it where they were asked for."""
    from matplotlib.ticker import FuncFormatter

    best = told["best"]
    key, name, form = (
        ("price", "price, US dollars", dollars) if best["price"] is not None else ("gpu_hours", "device-hours", count)
    )
    scale, unit = long_unit(best["expected_days"])

    def places(options: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
        return [scale * one["expected_days"] for one in options], [one[key] for one in options]

    rest = [one for one in compared(told) if one[key] is not None and one["toml"] != best["toml"]]
    if rest:
        axes.scatter(*places(rest), s=26, color=_MUTED, label="others that fit", zorder=3)
    sizes = [one for one in told.get("scaling", ()) if one[key] is not None]
    if sizes:
        axes.plot(*places(sizes), color=_INK, linewidth=1.2, marker="s", markersize=4, label="quickest on this many devices")
        for one, day, cost in zip(sizes, *places(sizes), strict=True):
            # The line falls and bends up: there is room above it on the right, but where the winner's interval rises.
            place = (7, -15) if one["ranks"] == best["ranks"] else (5, 5)
            near: dict[str, Any] = {"xytext": place, "textcoords": "offset points", "fontsize": 8.5, "color": _INK}
            axes.annotate(f"{one['ranks']:,}", (day, cost), **near)
    (early, late), (less, more) = best["ranges"]["expected_days"], best["ranges"][key]
    axes.plot([scale * early, scale * late], [less, more], color=_BEST, linewidth=1.2, marker="|", markersize=7, zorder=4)
    axes.scatter(*places([best]), s=60, color=_BEST, label=f"{_first(told)}, P10–P90", zorder=5)
    axes.set_xlabel(f"{unit} of the run, failures considered", color=_INK, fontsize=9)
    axes.set_ylabel(name, color=_INK, fontsize=9)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form(value)))
    axes.set_xlim(0, 1.1 * max(scale * late, *places([best, *rest, *sizes])[0]))
    axes.set_ylim(0, 1.1 * max(more, *places([best, *rest, *sizes])[1]))
    axes.legend(frameon=False, fontsize=8.5, labelcolor=_INK, loc="lower right")
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
