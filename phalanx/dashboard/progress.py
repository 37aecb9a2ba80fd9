"""What a person sees while a run trains: a live panel on a terminal, plain lines elsewhere.

The CLI makes one and feeds it events as they are written; it reads nothing else and changes nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from phalanx.dashboard.event_lines import line, step_line
from phalanx.dashboard.numbers import count, duration, flops, number, percent, size
from phalanx.events.records import Evaluated, Event, RunStarted, Step, StepSkipped

_BARS = "▁▂▃▄▅▆▇█"
_SPARK = 16  # losses in the sparkline: a third of 80 columns, less its label
_RECENT = 64  # steps that the time left looks back on


class Display:
    """Plain lines: the base of the live display too, which prints the same about everything but steps."""

    def __init__(self, console: Console, steps: int, log_every: int):
        self._console = console
        self._steps = steps
        self._log_every = max(1, log_every)
        self._pace = Pace()
        self._first = True

    def show(self, event: Event) -> None:
        self._pace.note(event)
        if isinstance(event, Step):
            if self._first or event.step % self._log_every == 0 or event.step >= self._steps:
                self._print(step_line(event, self._steps, self._pace.left(self._steps)))
            self._first = False
        elif (text := line(event)) is not None:
            self._print(text)

    def close(self) -> None:
        """Nothing to put back."""

    def _print(self, text: Text) -> None:
        # A file has no width to wrap at: one event stays one line.
        self._console.print(text, soft_wrap=True)


class LiveDisplay(Display):
    """A panel that stays at the bottom of the terminal while lines scroll above it."""

    def __init__(self, console: Console, steps: int, log_every: int):
        super().__init__(console, steps, log_every)
        self._last: Step | None = None
        self._evaluated: Evaluated | None = None
        self._losses: deque[float] = deque(maxlen=_SPARK)
        self._live = Live(self._panel(), console=console, refresh_per_second=8)
        self._live.start()

    def show(self, event: Event) -> None:
        if isinstance(event, Step):
            self._pace.note(event)
            self._last = event
            self._losses.append(event.loss)
        else:
            if isinstance(event, Evaluated):
                self._evaluated = event
            super().show(event)
        self._live.update(self._panel())

    def close(self) -> None:
        self._live.stop()

    def _print(self, text: Text) -> None:
        self._console.print(text)

    def _panel(self) -> RenderableType:
        done, left = self._pace.step, self._pace.left(self._steps)
        bar = Table.grid(expand=True, padding=(0, 1))
        bar.add_column(no_wrap=True)
        bar.add_column(ratio=1)
        bar.add_column(no_wrap=True)
        bar.add_row(
            Text(f"step {done}/{self._steps}", style="bold"),
            ProgressBar(total=max(1, self._steps), completed=done),
            Text(f"{percent(done / max(1, self._steps))}  {duration(self._pace.elapsed)}, {duration(left)} left"),
        )
        if self._last is None:
            return Group(bar, Text("waiting for the first step", style="dim"))
        return Group(bar, self._numbers(self._last))

    def _numbers(self, last: Step) -> Table:
        held_out = self._evaluated.loss if self._evaluated else None
        cells = [
            ("loss", number(last.loss), "bold cyan"),
            ("held-out", number(held_out), "cyan"),
            ("recent", sparkline(self._losses), "cyan"),
            ("speed", f"{count(last.tokens_per_second)} tok/s", ""),
            ("model", flops(last.flops_per_second), ""),
            ("MFU", percent(last.mfu), ""),
            ("norm", number(last.grad_norm, 2), ""),
            ("rate", f"{last.learning_rate:.2e}", ""),
            ("memory", size(last.memory), ""),
            *([("experts", f"{number(last.expert_load, 2)} × mean", "")] if last.expert_load is not None else []),
        ]
        table = Table.grid(expand=True, padding=(0, 1))
        for _ in range(3):
            table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
        for row in range(0, len(cells), 3):
            table.add_row(
                *(Text.assemble((f"{name:<9}", "dim"), (value, style)) for name, value, style in cells[row : row + 3])
            )
        return table


class Pace:
    """How far, how long, and how long still: from the times of the events, so that saving and evaluating count."""

    def __init__(self) -> None:
        self.step = 0
        self.elapsed = 0.0
        self._began: float | None = None
        self._marks: deque[tuple[float, int]] = deque(maxlen=_RECENT)
        self._seconds = math.nan

    def note(self, event: Event) -> None:
        if isinstance(event, RunStarted):
            self._began = event.time
            self._marks.clear()
        if self._began is None:
            self._began = event.time
        self.elapsed = max(0.0, event.time - self._began)
        if isinstance(event, Step | StepSkipped):
            self.step = event.step
            self._marks.append((event.time, event.step))
        if isinstance(event, Step):
            self._seconds = event.seconds

    def left(self, steps: int) -> float | None:
        """Seconds to the last step at the pace of the recent ones; None before the first."""
        if not self._marks:
            return None
        (first, low), (last, high) = self._marks[0], self._marks[-1]
        each = (last - first) / (high - low) if high > low and last > first else self._seconds
        return max(0, steps - self.step) * each


def display(console: Console, steps: int, log_every: int, live: bool) -> Display:
    """The display for a run of `steps` steps; `live` where the console is a terminal that a person watches."""
    return LiveDisplay(console, steps, log_every) if live else Display(console, steps, log_every)


def sparkline(values: Iterable[float]) -> str:
    """Values as a row of bars between their smallest and largest; a space where one is not finite."""
    row = list(values)
    finite = [value for value in row if math.isfinite(value)]
    if not finite:
        return ""
    low, span = min(finite), max(finite) - min(finite)
    heights = [round((value - low) / span * (len(_BARS) - 1)) if span else 0 for value in finite]
    bars = iter(heights)
    return "".join(_BARS[next(bars)] if math.isfinite(value) else " " for value in row)
