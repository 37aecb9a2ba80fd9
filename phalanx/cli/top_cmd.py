"""`phalanx top`: a live view of a run and its ranks in the terminal."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

from rich.live import Live
from typer import Argument, Option

from phalanx.cli.options import AsJson
from phalanx.cli.output import console, finish
from phalanx.spec.errors import RunError
from phalanx.watch.followed_run import FollowedRun
from phalanx.watch.live_ranks import LiveRank, LiveRanks
from phalanx.watch.top_view import ORDERS, Screen, top_json, top_view

_FIRST_BEATS = 3.0  # seconds in which the controller of a run publishes heartbeats after somebody asks
_POLL = 0.05  # seconds between two looks for them
_STALE = 5.0  # seconds without new heartbeats after which the old ones are not shown any more
_ASK = 1.0  # seconds between two requests for heartbeats
_PIPE = 140  # columns where there is no terminal
_QUIT = ("q", "Q", "\x03", "\x04")
_KEYS = {"w": "waited for", "r": "rank", "p": "phase"}
_KEY = re.compile(r"\x1b[O\[][A-Z]|.", re.DOTALL)
_UP, _DOWN = ("\x1b[A", "\x1bOA", "k"), ("\x1b[B", "\x1bOB", "j")


def top(
    run_dir: Annotated[Path, Argument(metavar="RUN_DIR", help="Directory of the run.")],
    interval: Annotated[float, Option(min=0.1, max=60.0, help="Seconds between two updates.")] = 1.0,
    once: Annotated[bool, Option("--once", help="Print one table and end, as in a pipe.")] = False,
    sort: Annotated[str, Option(help=f"Order of the ranks: {', '.join(ORDERS)}.")] = "waited for",
    json: AsJson = False,
) -> None:
    """Show a run and its ranks live in the terminal: figures, phases, who everybody waits for. Keys: q quits, w r p sort, arrows scroll."""
    run = FollowedRun(run_dir.resolve().name, run_dir)
    if not run.rundir.events_file.is_file():
        raise RunError(f"{run_dir} holds no run: name a run directory, such as runs/NAME.")
    if sort not in ORDERS:
        raise RunError(f'--sort "{sort}" is not known: choose one of {", ".join(ORDERS)}.')
    if run.rundir.job_file.is_file():
        from phalanx.launch.kubernetes import catch_up

        catch_up(run.rundir)
    _catch_up(run)
    live = LiveRanks(run.rundir)
    if once or json or not (console.is_terminal and sys.stdin.isatty()):
        ranks = _first_ranks(run, live)
        _catch_up(run)
        if not console.is_terminal:
            console.width = max(console.width, _PIPE)
        console.print(top_view(run, ranks, Screen(order=sort, width=console.width)))
        finish(json, top_json(run, ranks, sort) if json else {})
        return
    _follow(run, live, interval, sort)


def _catch_up(run: FollowedRun) -> None:
    while not run.catch_up(1.0):
        pass


def _first_ranks(run: FollowedRun, live: LiveRanks) -> list[LiveRank] | None:
    """The ranks of a running job, unless it publishes none."""
    deadline = time.monotonic() + _FIRST_BEATS
    if run.state == "running":
        live.ask()
    while run.state == "running" and time.monotonic() < deadline:
        if (ranks := live.read()) is not None:
            return ranks
        time.sleep(_POLL)
    return None


def _follow(run: FollowedRun, live: LiveRanks, interval: float, order: str) -> None:
    """Update the screen until somebody quits or the run ends."""
    ranks, read, asked, first = _first_ranks(run, live), time.monotonic(), 0.0, 0
    with _keys() as keys, Live(console=console, screen=True, auto_refresh=False) as screen:
        while True:
            now = time.monotonic()
            if now >= asked + _ASK and run.state == "running":
                live.ask()
                asked = now
            run.catch_up(0.2)
            if (newest := live.read()) is not None:
                ranks, read = newest, now
            elif now > read + _STALE:
                ranks = None
            shown = Screen(order=order, width=console.width, height=console.height, first=first)
            screen.update(top_view(run, ranks, shown), refresh=True)
            if run.state not in ("running", "reading"):
                break
            for key in _KEY.findall(keys(interval)):  # somebody may type several at once
                if key in _QUIT:
                    return
                order = _KEYS.get(key, order)
                page = max(1, console.height // 2)
                first += page if key in _DOWN else -page if key in _UP else 0
            first = max(0, min(first, len(ranks or ())))
    _catch_up(run)
    console.print(top_view(run, None, Screen(order=order, width=console.width)))


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """The terminal gives every key at once; the context is a function that waits for one."""
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def wait(seconds: float) -> str:
        ready, _, _ = select.select([fd], [], [], seconds)
        return os.read(fd, 256).decode(errors="replace") if ready else ""

    try:
        tty.setcbreak(fd)
        yield wait
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
