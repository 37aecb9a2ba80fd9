"""Draws a pipeline schedule, as text and as a PNG: what each rank does when, and where it waits. The CLI calls it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.schedules.actions import KINDS, Schedule
from phalanx.schedules.timing import Timed, Timeline, bubble

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _MUTED = "#1f2933", "#7b8794"
COLOURS = {"F": "#3b82f6", "B": "#a78bfa", "I": "#f59e0b", "W": "#10b981", "idle": "#d5dae1"}
"""Of each kind of action. Later stages of a rank are drawn lighter, and micro-batches are numbers."""

_NUMBERED = 1500
"""Actions beyond which numbers would be smaller than one can read."""


def text(timeline: Timeline, unit: float = 1.0) -> list[str]:
    """A line per rank, a column per `unit` of time: each action's letter and micro-batch, dots where the rank waits.

    An action that takes several units is named in the first and drawn on in the others. Simulated times fit the columns.
    """
    columns = round((timeline.stop - timeline.start) / unit)
    most = max(timed.micro_batch for row in timeline.ranks for timed in row)
    width = 1 + len(str(most))
    label = len(f"rank {len(timeline.ranks) - 1}")
    lines = []
    for rank, row in enumerate(timeline.ranks):
        cells = ["·".center(width)] * columns
        stages = sorted({timed.stage for timed in row})
        for timed in row:
            # The way a micro-batch goes through one rank's stages shows in upper and lower case.
            name = timed.kind if timed.stage == stages[0] else timed.kind.lower()
            first, stop = (round((moment - timeline.start) / unit) for moment in (timed.start, timed.stop))
            cells[first:stop] = [f"{name}{timed.micro_batch}".ljust(width, " ")] + ["-" * width] * (stop - first - 1)
        lines.append(f"{f'rank {rank}':<{label}}  " + " ".join(cells).rstrip())
    return lines


def legend(schedule: Schedule) -> str:
    """What the letters of the text are."""
    kinds = {action.kind for row in schedule.actions for action in row}
    words = [f"{letter} {name}" for letter, name in KINDS.items() if letter in kinds]
    if schedule.stages > schedule.ranks:
        words.append("small letters: a rank's later stages")
    return ", ".join([*words, "· idle"])


def draw(schedule: Schedule, timeline: Timeline, path: Path) -> None:
    """Write the picture."""
    # Matplotlib takes half a second to import. Figure alone, without pyplot, keeps no state between calls.
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    length, ranks = timeline.stop - timeline.start, len(timeline.ranks)
    size = (min(40.0, max(8.0, 0.3 * length)), min(30.0, 1.6 + 0.45 * ranks))
    figure = Figure(figsize=size, dpi=144, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1), facecolor="white")
    axes = figure.subplots()
    axes.barh(range(ranks), [length] * ranks, left=timeline.start, height=0.86, color=COLOURS["idle"])
    numbered = sum(map(len, timeline.ranks)) <= _NUMBERED
    for rank, row in enumerate(timeline.ranks):
        draw_rank(axes, rank, row, numbered)
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(timeline.start, timeline.stop)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(colors=_INK, length=0, labelsize=9)
    for spine in axes.spines.values():
        spine.set_visible(False)
    kinds = [kind for kind in KINDS if any(timed.kind == kind for row in timeline.ranks for timed in row)]
    patches = [Patch(color=COLOURS[kind], label=KINDS[kind]) for kind in kinds] + [Patch(color=COLOURS["idle"], label="idle")]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False, fontsize=9, labelcolor=_INK)
    name = schedule.name.encode("latin-1", "replace").decode("latin-1")
    axes.set_title(name, loc="left", color=_INK, fontsize=12, fontweight="bold", parse_math=False)
    caption = f"{schedule.stages} stages, {schedule.micro_batches} micro-batches, idle {bubble(timeline):.1%}"
    if schedule.stages > ranks:
        caption += "   lighter: a rank's later stages"
    axes.set_title(caption, loc="right", color=_MUTED, fontsize=9)
    figure.savefig(path, format="png")


def draw_rank(axes: Axes, rank: int, row: Sequence[Timed], numbered: bool) -> None:
    stages = sorted({timed.stage for timed in row})
    # One call for all bars of a colour: a call for each takes half a minute where there are thousands.
    for kind, stage in dict.fromkeys((timed.kind, timed.stage) for timed in row):
        bars = [(timed.start, timed.stop - timed.start) for timed in row if (timed.kind, timed.stage) == (kind, stage)]
        colour = _lighter(COLOURS[kind], 0.55 * stages.index(stage) / len(stages))
        axes.broken_barh(bars, (rank - 0.43, 0.86), facecolor=colour, edgecolor="white", linewidth=0.6)
    for timed in row if numbered else ():
        middle = (timed.start + timed.stop) / 2
        axes.text(middle, rank, str(timed.micro_batch), ha="center", va="center", fontsize=7, color=_INK)


def _lighter(colour: str, part: float) -> tuple[float, float, float]:
    red, green, blue = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return red + (1 - red) * part, green + (1 - green) * part, blue + (1 - blue) * part
