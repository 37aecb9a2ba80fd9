"""`phalanx train`: checks everything, starts the workers, shows what happens, sums up. Under torchrun it is one of the workers."""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from phalanx.cli.output import AsJson, console, print_json
from phalanx.control.protocol import RESUMABLE
from phalanx.dashboard.data_tables import tokenizing
from phalanx.dashboard.pictures import draw_loss
from phalanx.dashboard.progress import display
from phalanx.dashboard.summary import Summary, summarize
from phalanx.events.log import read_events
from phalanx.events.rundir import RunDir
from phalanx.faults.draw import expand_random
from phalanx.faults.grammar import Fault, check, format_faults, parse
from phalanx.host.env import torchrun_place
from phalanx.launch.local import Job
from phalanx.launch.prepare import Prepared, Request, prepare
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.load import load


def train(
    run_file: Annotated[Path, typer.Argument(help="The run file.", metavar="RUN.toml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, e.g. train.steps=20 layout.data=2.")
    ] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Directory of the run; left out: runs/NAME, numbered if taken.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start anew even where an unfinished run could go on.")] = False,
    accept_changed_data: Annotated[
        bool, typer.Option("--accept-changed-data", help="Go on with a run although its text has changed since it was saved.")
    ] = False,
    unrehearsed: Annotated[
        bool, typer.Option("--unrehearsed", help="Start a run although its rehearsal says that it does not fit.")
    ] = False,
    chaos: Annotated[
        str,
        typer.Option(
            help='Faults to plant, e.g. "kill rank=1 step=10; hang rank=0 step=20 for=10s"; docs/chaos.md lists them.'
        ),
    ] = "",
    json: AsJson = False,
) -> None:
    """Train the model that RUN.toml describes. Stopped or killed, the same command goes on where it was."""
    place = torchrun_place()
    request = Request(directory=run_dir, fresh=fresh, accept_changed_data=accept_changed_data, unrehearsed=unrehearsed)
    if place is not None and chaos:
        raise RunError(
            ["--chaos needs Phalanx's own supervisors, and torchrun has started this process: use `phalanx train` alone."]
        )
    if place is not None:
        from phalanx.cli.torchrun import train_here

        raise typer.Exit(train_here(place, run_file, overrides or [], request, json))
    run = load(run_file, overrides or [])
    faults = parse(chaos)  # before anything is begun
    with tokenizing(console) as progress:
        prepared = prepare(run, run_file.stem, request, progress=progress)
    try:
        planted = _planted(faults, prepared)
    except RunError:
        prepared.rundir.release()
        raise
    job = Job(prepared, planted)
    try:
        _follow(job, prepared)
    except RunFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
    summary = conclude(prepared.rundir)
    if job.exit_code == RESUMABLE:
        again = f"with --run-dir {prepared.rundir.path} in place of --fresh" if fresh else "again"
        console.print(f"Stopped and saved. To go on, give the same command {again}.", style="yellow", soft_wrap=True)
    if json:
        print_json(summary.to_json(prepared.rundir.path) | ({"error": [job.failure.reason]} if job.failure else {}))
    raise typer.Exit(job.exit_code or 0)


def _planted(faults: tuple[Fault, ...], prepared: Prepared) -> str:
    """All faults of the run in the words that its processes read, those that are left to chance drawn."""
    ranks, nodes, steps = prepared.plan.ranks, prepared.run.cluster.nodes, prepared.run.steps
    if problems := check(faults, ranks, nodes, steps):
        raise RunError(problems)
    return format_faults(expand_random(faults, steps=steps, ranks=ranks, nodes=nodes))


def conclude(rundir: RunDir) -> Summary:
    """The picture of the loss and the closing panel."""
    events = read_events(rundir.events_file)
    summary = summarize(events)
    try:
        draw_loss(events, rundir.curve)
    except OSError as error:  # a full disk; the run is what it is without the picture
        rundir.curve.unlink(missing_ok=True)
        console.print(f"warning: {rundir.curve} could not be drawn ({error.strerror}).", style="yellow", soft_wrap=True)
    summary.render(console, rundir.path)
    return summary


def _follow(job: Job, prepared: Prepared) -> None:
    """Show events until the job ends. The first SIGINT or SIGTERM asks it to save and stop, the second ends it at once."""
    asked = threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGUSR1 and asked.is_set():
            return  # a batch system may give its notice more than once
        if asked.is_set():
            job.kill()
        else:
            asked.set()
            job.stop(signal.Signals(number).name)

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    view = display(console, prepared.run.steps, prepared.run.watch.log_every, live=console.is_terminal)
    console.print(f"run directory {prepared.rundir.path}{' (going on with it)' if prepared.resumes else ''}", style="dim")
    try:
        for event in job.events():
            view.show(event)
    finally:
        view.close()
        for number, handler in previous.items():
            signal.signal(number, handler)
