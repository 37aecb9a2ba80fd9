"""`phalanx status`, `phalanx logs` and `phalanx stop`: look at a run, or stop it, from any host that sees its directory."""

from __future__ import annotations

import re
import shlex
import time
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from phalanx.cli.options import AsJson
from phalanx.cli.output import console, finish
from phalanx.dashboard.numbers import duration
from phalanx.dashboard.progress import changes_text, event_line
from phalanx.dashboard.run_list import run_state
from phalanx.dashboard.summary import Summary
from phalanx.events.log import launch_events, read_events
from phalanx.events.records import (
    Event,
    FailureNoticed,
    HostRejected,
    HostsChecked,
    Recovered,
    RunStarted,
    SettingsChanged,
    WorkerFailed,
    WorkerStarted,
)
from phalanx.events.run_logs import LogLine, LogReader
from phalanx.events.rundir import RunDir, replace_file
from phalanx.spec.errors import RunError
from phalanx.spec.json_value import JsonObject

RunDirectory = Annotated[Path, Argument(help="Directory of the run.")]
_POLL = 0.5  # seconds between two looks at the logs
_STOP_SECONDS = 600.0  # that `stop` waits for a run to save


def status(run_dir: RunDirectory, json: AsJson = False) -> None:
    """Show whether a run is running, how far it is, and what has happened to it."""
    rundir = _run(run_dir)
    _catch_up(rundir)
    events = launch_events(rundir.events_file)
    everything = read_events(rundir.events_file)
    summary, state = Summary(everything), _state(rundir, events)
    hosts: dict[str, set[int]] = {}
    for event in events:
        if isinstance(event, WorkerStarted):
            for ranks in hosts.values():
                ranks.discard(event.rank)
            hosts.setdefault(event.host, set()).add(event.rank)
    ago = time.time() - events[-1].time if events else 0.0
    program = next((shlex.join(event.program) for event in events if isinstance(event, RunStarted) and event.program), None)
    result: JsonObject = {
        "state": state,
        "program": program,
        "step": summary.steps,
        "steps": summary.planned,
        "loss": summary.loss,
        "tokens_per_second": summary.tokens_per_second,
        "ranks": summary.ranks,
        "hosts": {host: sorted(ranks) for host, ranks in hosts.items() if ranks},
        "rejected": {event.host: event.message for event in events if isinstance(event, HostRejected)},
        "failures": len([event for event in events if isinstance(event, FailureNoticed)]),
        "recovered": len([event for event in events if isinstance(event, Recovered)]),
        "checkpoint": summary.checkpoint,
        "settings_changed": summary.settings_changed,
        "seconds_since_last_record": ago,
    }
    progress = program or f"step {summary.steps} of {summary.planned}"
    console.print(f"{run_dir}: {state}, {progress}, last record {duration(ago)} ago", markup=False, soft_wrap=True)
    for host, ranks in hosts.items():
        if ranks:
            console.print(f"  {host}: ranks {', '.join(map(str, sorted(ranks)))}", soft_wrap=True)
    for event in [event for event in everything if isinstance(event, SettingsChanged)]:
        console.print(f"  step {event.step}: settings changed: {changes_text(event)}", markup=False, soft_wrap=True)
    for event in events:
        if isinstance(event, HostsChecked | HostRejected) and (line := event_line(event)) is not None:
            line.pad_left(2)
            console.print(line, soft_wrap=True)
        elif isinstance(event, FailureNoticed):
            at = _clock(event.time) if event.step is None else f"step {event.step}"
            console.print(f"  {at}: {event.message}", style="yellow", markup=False, soft_wrap=True)
        elif isinstance(event, Recovered):
            at, lost = (_clock(event.time), "") if program else (f"step {event.step}", f", {event.steps_lost} steps lost")
            console.print(f"  {at}: {event.action} in {event.seconds:.1f} s{lost}", soft_wrap=True)
    if summary.checkpoint is not None:
        console.print(f"  checkpoint {summary.checkpoint}", markup=False, soft_wrap=True)
    elif not _saves(events):
        console.print("  no checkpoint: checkpoint.save = false", soft_wrap=True)
    finish(json, result)


def logs(
    run_dir: RunDirectory,
    rank: Annotated[int | None, Option(help="Show only what this rank has written.")] = None,
    node: Annotated[
        int | None, Option(help="Show only what the processes of this node have written, its ranks excluded.")
    ] = None,
    grep: Annotated[str | None, Option(help="Show only lines that match this regular expression.")] = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Show new lines as they are written, until the run ends.")] = False,
) -> None:
    """Show what the ranks and nodes of a run have written, in the order of time; first, what has failed."""
    rundir = _run(run_dir)
    _catch_up(rundir)
    try:
        pattern = re.compile(grep or "")
    except re.error as error:
        raise RunError(f"--grep {grep} is not a regular expression: {error}.") from None
    wanted = {f"rank {rank}"} if rank is not None else {f"node {node}", f"replicas {node}"} if node is not None else None
    for event in launch_events(rundir.events_file):
        if isinstance(event, WorkerFailed | FailureNoticed) and (rank is None or event.rank == rank):
            text = event.reason if isinstance(event, WorkerFailed) else event.message
            console.print(f"{_clock(event.time)} {text}", style="red", markup=False, soft_wrap=True)
            if event.traceback:
                console.print(event.traceback.rstrip(), style="red", markup=False, highlight=False, soft_wrap=True)
    reader = LogReader(rundir)
    while True:
        over = not follow or not rundir.is_running
        for line in reader.new():
            if (wanted is None or line.source in wanted) and pattern.search(line.text):
                _print(line)
        if over:
            return
        time.sleep(_POLL)


def stop(
    run_dir: RunDirectory,
    wait: Annotated[bool, Option("--wait/--no-wait", help="Wait until the run has saved and ended.")] = True,
) -> None:
    """Ask a run to save and end, as SIGTERM to its launcher would. The same `phalanx train` resumes it, unless checkpoint.save = false."""
    from phalanx.launch.kubernetes import find_job, note_end

    rundir = _run(run_dir)
    job = find_job(rundir)
    if job is not None:
        note_end(rundir, job)
    if not rundir.is_running:
        raise RunError(f"{run_dir} is not running: there is nothing to stop.")
    if rundir.launch_id is None:
        raise RunError(
            f"{run_dir} is in use by a process that takes no requests: one that torchrun has started, that still prepares the run, or that "
            "works on its checkpoints. Send it SIGTERM, or wait for it."
        )
    if job is None:
        replace_file(rundir.stop_file, "")
    else:
        job.stop()
    deadline = time.monotonic() + _STOP_SECONDS
    while wait and rundir.is_running:
        if time.monotonic() > deadline:
            raise RunError(f"{run_dir} has not ended within {_STOP_SECONDS:.0f} s: look at `phalanx logs {run_dir}`.")
        time.sleep(_POLL)
        if job is not None:
            note_end(rundir, job)
    if wait:
        _catch_up(rundir)
        events = launch_events(rundir.events_file)
        saved = "" if _saves(events) else "; nothing was saved (checkpoint.save = false), and it cannot be resumed"
        console.print(f"{run_dir}: {_state(rundir, events)}{saved}", markup=False, soft_wrap=True)


def _run(run_dir: Path) -> RunDir:
    rundir = RunDir(run_dir)
    if not rundir.events_file.is_file():
        raise RunError(f"{run_dir} holds no run: name a run directory, such as runs/NAME.")
    return rundir


def _catch_up(rundir: RunDir) -> None:
    """Read what a job has printed that writes its records elsewhere."""
    from phalanx.launch.kubernetes import catch_up

    catch_up(rundir)


def _state(rundir: RunDir, events: list[Event]) -> str:
    state, reason = run_state(rundir, events)
    return f"{state}: {reason}" if state == "failed" else state


def _saves(events: list[Event]) -> bool:
    return all(event.saves for event in events if isinstance(event, RunStarted))


def _print(line: LogLine) -> None:
    console.print(f"{_clock(line.time)} [{line.source}] {line.text}", markup=False, highlight=False, soft_wrap=True)


def _clock(seconds: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(seconds))
