"""Output of every verb: the console, the JSON object of --json, files, errors, and the end of a run."""

from __future__ import annotations

import json as encoding
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from phalanx.spec.errors import RUN_FILE, PhalanxError, RunError

if TYPE_CHECKING:
    from phalanx.checkpointing.directory import DamagedCheckpoint
    from phalanx.dashboard.summary import Summary
    from phalanx.events.log import EventReader
    from phalanx.events.records import Event
    from phalanx.events.rundir import RunDir
    from phalanx.launch.launcher import SubmittedJob

T = TypeVar("T")
_NUMBER = re.compile(r"([\d.,]+(e[+-]\d+)?( ?[A-Za-z]{1,3})?|nan|inf|–)?")
"""A cell with a number, perhaps with a unit, or with none."""

console = Console(highlight=False)
"""Output for people."""
_JOB_POLL = 1.0  # seconds between two questions to a batch system


def tracked(items: Iterable[T], what: str, total: int) -> Iterable[T]:
    """Shows a progress bar while items are read, on a terminal."""
    from rich.progress import track

    return track(items, what, total, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def progress_bar(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar, on a terminal. The context is a function to call with every further amount that is done."""
    from rich.progress import Progress

    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda amount: progress.advance(task, amount)


def plain_table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without lines. Columns of numbers are aligned to the right."""
    table = Table(box=None, header_style="bold")
    for place, title in enumerate(titles):
        number = place > 0 and all(_NUMBER.fullmatch(row[place]) for row in rows)
        table.add_column(title, justify="right" if number else "left", no_wrap=place == 0)
    for row in rows:
        table.add_row(*row)
    return table


def print_json(value: Mapping[str, object]) -> None:
    """Prints one line for programs: never wrapped, never colored."""
    print(encoding.dumps(value), flush=True)


def wants_json() -> bool:
    """Whether the command line asks for JSON on standard output. Words after -- belong to another program."""
    words = sys.argv[1:]
    return "--json" in (words[: words.index("--")] if "--" in words else words)


def print_submission(text: str, json: bool) -> None:
    """Prints the batch script or the manifests that a command without --dry-run would submit."""
    if json:
        print_json({"submission": text})
    else:
        print(text, end="")


def finish(json: bool, result: Mapping[str, object], passed: bool = True) -> None:
    """Ends a verb: prints its result for programs if --json asks for it, and exits with 1 if what it checks has failed."""
    if json:
        print_json(result)
    if not passed:
        raise typer.Exit(1)


def write_file(path: Path, write: Callable[[], Any]) -> None:
    """Writes a file that the user requested, and reports it; an OSError becomes a RunError."""
    try:
        write()
    except OSError as error:
        raise RunError(f"{path}: cannot be written: {error.strerror}") from None
    console.print(f"wrote {path}", markup=False, soft_wrap=True)


def report_checkpoint(checkpoint: object, step: int | None, damaged: Sequence[DamagedCheckpoint]) -> dict[str, object]:
    """Says on standard error which checkpoint a verb uses, and warns of newer ones that are damaged; returns the same for --json."""
    skipped = warn_damaged(damaged)
    if step is not None:
        print(f"using step {step} ({checkpoint})", file=sys.stderr, flush=True)
    return {"checkpoint": str(checkpoint), "step": step, "damaged": skipped}


def warn_damaged(damaged: Sequence[DamagedCheckpoint]) -> list[dict[str, str]]:
    """Warns of newer checkpoints that were skipped because they are damaged; returns them for --json."""
    for bad in damaged:
        print(f"warning: {bad}; it is newer, and skipped.", file=sys.stderr)
    return [{"path": bad.path, "reason": bad.reason} for bad in damaged]


def print_error(error: PhalanxError) -> None:
    """Prints each problem on a line of its own, on standard error."""
    run_file = next((word for word in sys.argv[1:] if word.endswith(".toml")), RUN_FILE)
    sentences = error.problems if isinstance(error, RunError) else (str(error),)
    problems = [sentence.replace(f" {RUN_FILE}", f" {shlex.quote(run_file)}") for sentence in sentences]
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if wants_json():
        print_json({"error": list(problems)})


def print_summary(rundir: RunDir) -> Summary:
    """Draws the loss curve of a finished run and prints its summary."""
    from phalanx.dashboard.pictures import draw_loss
    from phalanx.dashboard.summary import Summary
    from phalanx.events.log import read_events

    events = read_events(rundir.events_file)
    summary = Summary(events)
    try:
        draw_loss(events, rundir.curve)
    except OSError as error:  # for example a full disk, which must not fail the run
        rundir.curve.unlink(missing_ok=True)
        console.print(f"warning: {rundir.curve} could not be drawn ({error.strerror}).", style="yellow", soft_wrap=True)
    summary.render(console, rundir.path)
    return summary


def follow_job(job: SubmittedJob, reader: EventReader, show: Callable[[Event], None]) -> str | None:
    """Shows what happens in a job that goes on without this process, until it has ended; returns its last state. None: the user has
    stopped following it."""
    from phalanx.events.records import Warned

    def show_new() -> None:
        for event in reader.new():
            show(event)
        for text in job.news():
            show(Warned(message=text))

    try:
        while (state := job.ended()) is None:
            show_new()
            time.sleep(_JOB_POLL)
        job.close()
        show_new()
    except KeyboardInterrupt:
        job.close()
        console.print(f"The job goes on. {job.remarks}", soft_wrap=True)
        return None
    return state
