"""`phalanx runs`: the runs in a folder; `phalanx lr-find`: a learning rate for a run; and the sweep of `phalanx train --sweep`."""

from __future__ import annotations

import json as encoding
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from rich.table import Table
from typer import Argument, Option

from phalanx.cli.lost_terminal import stopped_by_signals
from phalanx.cli.options import AsJson, Overrides, RunFile, check_folders
from phalanx.cli.output import console, finish, plain_table, progress_bar, write_file
from phalanx.control.protocol import RESUMABLE
from phalanx.dashboard.numbers import count, duration, number
from phalanx.dashboard.run_list import ORDERS, RunInfo, list_runs
from phalanx.launch.prepare import Request
from phalanx.launch.sweep import MemberResult, Sweep, members, parse_sweep
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.load import load

_LINE = 200
"""Characters of a reason that the table of a sweep shows."""


def runs(
    folder: Annotated[Path, Argument(help="A folder with run directories, or one of them.")] = Path("runs"),
    sort: Annotated[str, Option(help=f"{', '.join(ORDERS)}.")] = "when",
    json: AsJson = False,
) -> None:
    """List runs with their state, step, loss, held-out loss, speed, and when they last wrote a record."""
    found = list_runs(folder, sort)
    if found:
        now = time.time()
        rows = [
            (_name(run.path, folder), run.state, *_numbers(run), f"{duration(max(0.0, now - run.time))} ago") for run in found
        ]
        console.print(_table(("run", "state", *_TITLES, "when"), rows))
    else:
        console.print(f"{folder} holds no runs.", soft_wrap=True)
    finish(json, {"folder": str(folder), "runs": [run.to_json() for run in found]})


_TITLES = ("step", "loss", "held-out", "tokens/s")


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table in which long names are folded, and numbers never."""
    table = plain_table(titles, rows)
    for place, column in enumerate(table.columns):
        column.no_wrap, column.overflow = place > 0, "fold"
    return table


def _numbers(run: RunInfo) -> tuple[str, ...]:
    speed = count(run.tokens_per_second) if run.tokens_per_second is not None else "–"
    return f"{run.step}/{run.steps}", number(run.loss), number(run.eval_loss), speed


def _name(path: str, folder: Path) -> str:
    return str(Path(path).relative_to(folder)) if Path(path) != folder else path


def sweep(run_file: Path, overrides: Sequence[str], grid: Sequence[str], parallel: int, request: Request, *, json: bool) -> int:
    """Trains the runs of `phalanx train --sweep`; returns the exit code."""
    refuse(
        [
            f"{option} cannot be used with --sweep."
            for option, value in (("--fresh", request.fresh), ("--change", request.change))
            if value
        ]
    )
    folder = request.directory or Path("runs") / f"{run_file.stem}-sweep"
    given = {"--accept-changed-data": request.accept_changed_data, "--unrehearsed": request.unrehearsed}
    found = members(parse_sweep(grid), folder, lambda settings: load(run_file, [*overrides, *settings]))
    started = Sweep(found, parallel, [option for option, value in given.items() if value])
    with stopped_by_signals(started):
        results = started.results(lambda line: console.print(line, markup=False, soft_wrap=True))
    _show_results(results)
    best = results[0] if results and results[0].error is None and results[0].info is not None else None
    if started.stopped:
        console.print("Stopped. To resume the sweep, run the same command again.", style="yellow", soft_wrap=True)
    finish(json, {"folder": str(folder), "best": best and best.name, "runs": [result.to_json() for result in results]})
    return RESUMABLE if started.stopped else 1 if any(result.error for result in results) else 0


def _show_results(results: Sequence[MemberResult]) -> None:
    rows = [
        (result.name, result.state, *(("–",) * len(_TITLES) if result.info is None else _numbers(result.info)))
        for result in results
    ]
    console.print(_table(("run", "state", *_TITLES), rows))
    for result in results:
        if result.error is not None:
            console.print(f"{result.name}: {result.error[:_LINE]}", style="red", markup=False, soft_wrap=True)


def lr_find(
    run_file: RunFile,
    overrides: Overrides = None,
    low: Annotated[float, Option(help="First learning rate.")] = 1e-6,
    high: Annotated[float, Option(help="Last learning rate.")] = 1.0,
    steps: Annotated[int, Option(min=10, help="Steps to take, with a rate that grows by the same factor each.")] = 100,
    out: Annotated[
        Path | None, Option(help="Where to write OUT.png and OUT.json. Default: NAME-lr-find, in the working directory.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Find a learning rate: train a few steps with a growing one, and suggest one from the loss. No run is saved."""
    from phalanx.api import lr_find as search
    from phalanx.dashboard.rate_picture import draw_rates

    stem = out or Path(f"{run_file.stem}-lr-find")
    picture, table = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.json")
    refuse(check_folders(picture))
    run = load(run_file, overrides or [])
    if run.command.program is not None:
        raise RunError(f"{run_file}: [command] names a program of its own, whose learning rate Phalanx does not set.")
    with progress_bar("steps", steps) as advance:
        found = search(run, low=low, high=high, steps=steps, on_step=lambda: advance(1))
    write_file(table, lambda: table.write_text(encoding.dumps(found.to_json()) + "\n"))
    write_file(picture, lambda: draw_rates(picture, found.rates, found.losses, found.smooth, found.suggestion))
    console.print(found.sentence, style="bold", soft_wrap=True)
    finish(json, found.to_json() | {"picture": str(picture), "table": str(table)})
