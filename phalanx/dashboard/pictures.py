"""Draws PNG pictures: the loss curve of a run and a pipeline schedule. Also holds the style that all pictures share.

The CLI calls it; `dashboard/simulation_view` and `dashboard/plan_picture` use the style. Matplotlib takes half a second to import, so every
function imports it by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from phalanx.dashboard.numbers import count, duration
from phalanx.dashboard.summary import History, history
from phalanx.events.records import Event
from phalanx.schedules.actions import KINDS, Schedule
from phalanx.schedules.timing import Timed, Timeline, bubble

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2933", "#7b8794", "#e4e7eb"
_LOSS, _EVAL, _SKIP, _SPEED, _RATE = "#2563eb", "#ea580c", "#dc2626", "#0f766e", "#9333ea"
ACTION_COLORS = {"F": "#3b82f6", "B": "#a78bfa", "I": "#f59e0b", "W": "#10b981", "idle": "#d5dae1"}
"""Color of each kind of action. Later stages of a rank are lighter; numbers are micro-batches."""

_MOST_NUMBERED = 1500
"""With more actions than this, their numbers would be too small to read."""


def new_figure(
    size: tuple[float, float], dpi: int = 144, pad: float = 0.1, space: tuple[float, float] = (0.02, 0.02)
) -> Figure:
    """Creates a white figure of `size` inches; `pad` inches around each plot, `space` between rows and columns as a fraction of their size.

    Figure alone, without pyplot, keeps no global state.
    """
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    engine = ConstrainedLayoutEngine(w_pad=pad, h_pad=pad, hspace=space[0], wspace=space[1])
    return Figure(figsize=size, dpi=dpi, layout=engine, facecolor="white")


def plain_axes(axes: Axes, labels: str = MUTED, size: float = 9) -> None:
    """Removes everything from the axes of a plot except the grid and the bottom line."""
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(GRID)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=labels, length=0, labelsize=size)


def printable(text: str) -> str:
    """Replaces characters that the font lacks."""
    return text.encode("latin-1", "replace").decode("latin-1")


def draw_loss(events: Iterable[Event], path: Path) -> bool:
    """Writes the loss curve to `path`. Returns False, and writes no file, if the run has taken no step."""
    known = history(events)
    if not known.steps:
        return False
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = new_figure((9.0, 5.6))
    loss, speed = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    rate = speed.twinx()
    for axes in (loss, speed, rate):
        plain_axes(axes)
    rate.grid(False)
    _draw_loss(loss, known)
    _draw_speed(speed, rate, known)
    speed.yaxis.set_major_formatter(EngFormatter(sep=""))
    speed.xaxis.set_major_locator(MaxNLocator(integer=True))
    speed.margins(x=0.015)
    speed.set_xlabel("step", color=INK)
    set_titles(loss, path.resolve().parent.name, _caption(known))
    figure.savefig(path, format="png")
    return True


def smooth(values: Sequence[float], points: int = 500) -> tuple[list[int], list[float]]:
    """Returns the indexes of up to `points` values and a running median at each of them.

    A mean would follow every spike, and a window over the past would lag behind the steep beginning. So the window is centered,
    and shrinks towards the beginning.
    """
    half = max(2, len(values) // 60)
    indexes = sorted({round(k * (len(values) - 1) / max(1, points - 1)) for k in range(points)})
    windows = [values[index - min(half, index) : index + min(half, index) + 1] for index in indexes]
    finite = [[value for value in window if math.isfinite(value)] for window in windows]
    return indexes, [median(window) if window else math.nan for window in finite]


def _draw_loss(axes: Axes, history: History) -> None:
    steps = sorted(history.steps)
    losses = [history.steps[step].loss for step in steps]
    # A line through one or two steps would be invisible: they are drawn as points.
    marker = "o" if len(steps) < 3 else ""
    if len(steps) >= 20:
        axes.plot(steps, losses, color=_LOSS, alpha=0.3, linewidth=0.8)
        indexes, medians = smooth(losses)
        axes.plot(
            [steps[index] for index in indexes], medians, color=_LOSS, linewidth=1.8, label="training loss, running median"
        )
    else:
        axes.plot(steps, losses, color=_LOSS, linewidth=1.8, marker=marker, label="training loss")
    evaluated = [(step, record.loss) for step, record in sorted(history.evaluations.items()) if math.isfinite(record.loss)]
    if evaluated:
        x, y = zip(*evaluated, strict=True)
        axes.plot(x, y, color=_EVAL, linewidth=1.2, marker="o", markersize=4, label="held-out loss", zorder=4)
    for index, record in enumerate(history.skipped):
        axes.axvline(record.step, color=_SKIP, linewidth=1, alpha=0.5, linestyle=":", label="" if index else "skipped step")
    axes.set_ylabel("loss (nats)", color=INK)
    _limit(axes, losses, [loss for _, loss in evaluated])
    axes.legend(loc="upper right", frameon=False, fontsize=9, labelcolor=INK)


def _limit(axes: Axes, losses: Sequence[float], evaluated: Sequence[float]) -> None:
    """Limits the y axis so that a few spikes do not flatten the curve: spikes may leave the picture, the first loss may not."""
    finite = sorted(loss for loss in losses if math.isfinite(loss))
    if len(finite) < 2:
        return
    first = next(loss for loss in losses if math.isfinite(loss))
    high = max(finite[int(0.995 * (len(finite) - 1))], first, *evaluated)
    low = min(finite[0], *evaluated) if evaluated else finite[0]
    if high > low:
        axes.set_ylim(low - 0.05 * (high - low), high + 0.05 * (high - low))


def _draw_speed(speed: Axes, rate: Axes, history: History) -> None:
    steps = sorted(history.steps)
    records = [history.steps[step] for step in steps]
    marker = "o" if len(steps) < 3 else ""
    speed.plot(steps, [r.tokens_per_second for r in records], color=_SPEED, linewidth=1, marker=marker)
    rate.plot(steps, [r.learning_rate for r in records], color=_RATE, linewidth=1.3, marker=marker)
    speed.set_ylabel("tokens/s", color=_SPEED)
    rate.set_ylabel("learning rate", color=_RATE)
    rate.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    rate.yaxis.get_offset_text().set_fontsize(9)
    # Both axes start at zero: half the speed looks like half the speed.
    for axes, values in ((speed, [r.tokens_per_second for r in records]), (rate, [r.learning_rate for r in records])):
        top = max((value for value in values if math.isfinite(value)), default=0.0)
        axes.set_ylim(0, 1.12 * top or 1.0)


def _caption(history: History) -> str:
    last = history.steps[max(history.steps)]
    parts = [f"step {last.step:,}", f"loss {last.loss:.4f}"]
    if history.evaluations:
        parts.append(f"held-out {history.evaluations[max(history.evaluations)].loss:.4f}")
    tokens = sum(record.tokens for record in history.steps.values())
    training = sum(record.seconds for record in history.steps.values())
    return "   ".join([*parts, f"{count(tokens)} tokens", duration(training)])


def schedule_text(timeline: Timeline, unit: float = 1.0, width: int | None = None) -> list[str]:
    """Returns one line per rank with one column per `unit` of time: each action's letter and micro-batch, dots where the rank waits.

    An action of several units has its name in the first column and dashes in the others. All times are multiples of `unit`. `width`:
    characters of a line; what is longer continues in further lines of all ranks.
    """
    columns = round((timeline.stop - timeline.start) / unit)
    most = max(timed.micro_batch for row in timeline.ranks for timed in row)
    cell = 1 + len(str(most))
    label = len(f"rank {len(timeline.ranks) - 1}")
    rows = []
    for row in timeline.ranks:
        cells = ["·".center(cell)] * columns
        stages = sorted({timed.stage for timed in row})
        for timed in row:
            # Upper case: the first stage of the rank. Lower case: its later stages.
            name = timed.kind if timed.stage == stages[0] else timed.kind.lower()
            first, stop = (round((moment - timeline.start) / unit) for moment in (timed.start, timed.stop))
            cells[first:stop] = [f"{name}{timed.micro_batch}".ljust(cell, " ")] + ["-" * cell] * (stop - first - 1)
        rows.append(cells)
    fitting = columns if width is None else max(1, (width - label - 1) // (cell + 1))
    lines: list[str] = []
    for first in range(0, columns, fitting):
        lines += [""] if lines else []
        for rank, cells in enumerate(rows):
            lines.append(f"{f'rank {rank}':<{label}}  " + " ".join(cells[first : first + fitting]).rstrip())
    return lines


def schedule_legend(schedule: Schedule) -> str:
    """Explains the letters of `schedule_text`."""
    kinds = {action.kind for row in schedule.actions for action in row}
    words = [f"{letter} {name}" for letter, name in KINDS.items() if letter in kinds]
    if schedule.stages > schedule.ranks:
        words.append("small letters: a rank's later stages")
    return ", ".join([*words, "· idle"])


def draw_schedule(schedule: Schedule, timeline: Timeline, path: Path) -> None:
    """Writes a pipeline schedule as a PNG: what each rank does when, and where it waits."""
    from matplotlib.ticker import MaxNLocator

    length, ranks = timeline.stop - timeline.start, len(timeline.ranks)
    figure = new_figure((min(40.0, max(8.0, 0.3 * length)), min(30.0, 1.6 + 0.45 * ranks)))
    axes = figure.subplots()
    draw_ranks(axes, timeline, numbered=sum(map(len, timeline.ranks)) <= _MOST_NUMBERED)
    axes.set_xlim(timeline.start, timeline.stop)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(colors=INK, length=0, labelsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    legend_below(figure, action_colors(timeline))
    caption = f"{schedule.stages} stages, {schedule.micro_batches} micro-batches, idle {bubble(timeline):.1%}"
    later = "   lighter: a rank's later stages" if schedule.stages > ranks else ""
    set_titles(axes, schedule.name, caption + later)
    figure.savefig(path, format="png")


def set_titles(axes: Axes, title: str, caption: str) -> None:
    """Writes a title on the left and a caption on the right. Dollar signs in a name are no mathematics."""
    axes.set_title(printable(title), loc="left", color=INK, fontsize=12, fontweight="bold", parse_math=False, pad=10)
    axes.set_title(caption, loc="right", color=MUTED, fontsize=9, pad=10)


def legend_below(figure: Figure, colors: Mapping[str, str], most: int = 6) -> None:
    """Adds a legend of labels and colors below all plots, with at most `most` columns."""
    from matplotlib.patches import Patch

    patches = [Patch(color=color, label=label) for label, color in colors.items()]
    columns = min(most, len(patches))
    figure.legend(handles=patches, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, labelcolor=INK)


def action_colors(timeline: Timeline) -> dict[str, str]:
    """Labels and colors for the legend of a timeline: its kinds of actions, then "idle"."""
    kinds = {timed.kind for row in timeline.ranks for timed in row}
    return {KINDS[kind]: ACTION_COLORS[kind] for kind in KINDS if kind in kinds} | {"idle": ACTION_COLORS["idle"]}


def draw_ranks(axes: Axes, timeline: Timeline, *, numbered: bool) -> None:
    """Draws a row for each rank with its actions as bars; `numbered` writes each action's micro-batch on its bar."""
    ranks = len(timeline.ranks)
    idle = timeline.stop - timeline.start
    axes.barh(range(ranks), [idle] * ranks, left=timeline.start, height=0.86, color=ACTION_COLORS["idle"])
    for rank, row in enumerate(timeline.ranks):
        _draw_rank(axes, rank, row, numbered)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])


def _draw_rank(axes: Axes, rank: int, row: Sequence[Timed], numbered: bool) -> None:
    stages = sorted({timed.stage for timed in row})
    # One call for all bars of a color: with thousands of bars, one call for each takes half a minute.
    for kind, stage in dict.fromkeys((timed.kind, timed.stage) for timed in row):
        bars = [(timed.start, timed.stop - timed.start) for timed in row if (timed.kind, timed.stage) == (kind, stage)]
        color = _lighter(ACTION_COLORS[kind], 0.55 * stages.index(stage) / len(stages))
        axes.broken_barh(bars, (rank - 0.43, 0.86), facecolor=color, edgecolor="white", linewidth=0.6)
    for timed in row if numbered else ():
        middle = (timed.start + timed.stop) / 2
        axes.text(middle, rank, str(timed.micro_batch), ha="center", va="center", fontsize=7, color=INK)


def _lighter(color: str, amount: float) -> tuple[float, float, float]:
    red, green, blue = (int(color[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return red + (1 - red) * amount, green + (1 - green) * amount, blue + (1 - blue) * amount
