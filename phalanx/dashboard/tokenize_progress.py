"""What a person sees while text is tokenised before it can be used: a bar per source on a terminal, plain lines elsewhere.

Every verb that opens a dataset gives `open_dataset` what this makes. Nothing is shown where there is nothing to tokenise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from phalanx.dashboard.numbers import count, percent, size

if TYPE_CHECKING:
    from phalanx.data.ingest import Progress as Reached  # readers of formats that most commands never see

_LINE = 5.0  # seconds between lines where there is no bar


@contextmanager
def tokenizing(console: Console) -> Iterator[Callable[[Reached], None]]:
    """To be called with how far a source is, as often as there is news."""
    if not console.is_terminal:
        yield _Lines(console).show
        return
    bar = _Bar(console)
    try:
        yield bar.show
    finally:
        bar.close()


class _Lines:
    """A line per source when it begins, and one every few seconds."""

    def __init__(self, console: Console):
        self._console = console
        self._source: str | None = None
        self._last = 0.0

    def show(self, reached: Reached) -> None:
        now = time.monotonic()
        if reached.name == self._source and now - self._last < _LINE:
            return
        self._source, self._last = reached.name, now
        self._console.print(f"tokenising {reached.name}: {_words(reached)}", soft_wrap=True, markup=False)


class _Bar:
    """A bar for each source, from its first news on."""

    def __init__(self, console: Console):
        columns = (TextColumn("tokenising {task.description}", markup=False), BarColumn())
        self._bar = Progress(*columns, TextColumn("{task.fields[words]}"), TimeRemainingColumn(), console=console)
        self._tasks: dict[str, TaskID] = {}

    def show(self, reached: Reached) -> None:
        if not self._tasks:
            self._bar.start()
        if reached.name not in self._tasks:
            self._tasks[reached.name] = self._bar.add_task(reached.name, total=None, words="")
        task = self._tasks[reached.name]
        self._bar.update(task, completed=reached.bytes, total=reached.size, words=_words(reached))

    def close(self) -> None:
        if self._tasks:
            self._bar.stop()


def _words(reached: Reached) -> str:
    part = f" of {size(reached.size)} ({percent(reached.bytes / reached.size)})" if reached.size else ""
    speed = f", {count(reached.tokens_per_second)} tok/s" if reached.tokens_per_second else ""
    return f"{size(reached.bytes)}{part}, {count(reached.tokens)} tokens{speed}"
