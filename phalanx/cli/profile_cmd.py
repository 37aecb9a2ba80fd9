"""`phalanx profile`: a torch profile or a memory snapshot of a running job."""

from __future__ import annotations

import secrets
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from phalanx.cli.options import AsJson
from phalanx.cli.output import console, finish, plain_table
from phalanx.control.run_requests import MEMORY, PROFILE, RunRequest
from phalanx.dashboard.numbers import size
from phalanx.dashboard.profile_text import on_host, profile_rows, profile_sentence, steps_text
from phalanx.events.records import Event, Profiled, RequestFailed, RequestStarted, Step
from phalanx.events.rundir import RunDir
from phalanx.launch.ask_run import ask_run, check_request
from phalanx.spec.errors import RunError
from phalanx.spec.json_value import JsonObject

_SENTENCES = 8
"""Ranks whose profile is put into words."""


def profile(
    run_dir: Annotated[Path, Argument(metavar="RUN_DIR", help="Directory of a running job.")],
    steps: Annotated[int, Option(help="Steps to record: the next ones that all ranks can begin together.")] = 3,
    memory: Annotated[
        bool, Option("--memory", help="Record allocations instead of time: a snapshot for pytorch.org/memory_viz on GPUs.")
    ] = False,
    ranks: Annotated[str, Option(help="Ranks to record, such as 0,3 or 0-7, or all.")] = "0",
    output: Annotated[
        Path | None, Option("--output", "-o", help="Folder to copy the files to, besides those in the run directory.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Ask a running job for a torch profile of its next steps. It goes on; only these steps take longer."""
    rundir = RunDir(run_dir)
    request = RunRequest(id=secrets.token_hex(6), kind=MEMORY if memory else PROFILE, steps=steps, ranks=_parse_ranks(ranks))
    check_request(rundir, request)
    if output is not None:
        _make_folder(output)
    profiled: list[Profiled] = []
    with console.status(f"asking {run_dir}") as status:
        for event in ask_run(rundir, request):
            if isinstance(event, Profiled):
                profiled.append(event)
            if (line := _progress(event, request)) is not None:
                status.update(line)
                if not isinstance(event, Step):
                    console.print(line, markup=False, soft_wrap=True)
    profiled.sort(key=lambda event: event.rank)
    files = [_file(rundir, event, output) for event in profiled]
    for event, file in zip(profiled, files, strict=True):
        console.print(f"{file}  ({size(event.bytes)}, rank {event.rank}, {steps_text(event)})", markup=False, soft_wrap=True)
    _explain(profiled)
    finish(json, {"profiles": [_table(event, file) for event, file in zip(profiled, files, strict=True)]})


def _parse_ranks(text: str) -> list[int] | None:
    """0,3 or 0-7 or all (None)."""
    if text.strip() == "all":
        return None
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = (word.strip() for word in part.partition("-"))
        last = last if dash else first
        if not (
            first.isascii() and first.isdecimal() and last.isascii() and last.isdecimal() and int(first) <= int(last) < 1 << 20
        ):
            raise RunError(f'--ranks "{text}": write the numbers of ranks, such as 0,3 or 0-7, or all.')
        ranks |= set(range(int(first), int(last) + 1))
    return sorted(ranks)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"--output {path}: the folder cannot be made: {error.strerror}.") from None


def _progress(event: Event, request: RunRequest) -> str | None:
    match event:
        case RequestStarted():
            last = event.step + event.steps - 1
            who = "all ranks" if request.ranks is None else f"rank {', '.join(map(str, event.ranks))}"
            return f"recording steps {event.step} to {last} of {who}"
        case RequestFailed() if event.rank is not None:
            return f"rank {event.rank}: {event.reason}"
        case Step():
            return f"step {event.step}"
    return None


def _file(rundir: RunDir, event: Profiled, output: Path | None) -> str:
    """Where the file of a rank is, in words. It is on the rank's host, if that has no folder in common with this one."""
    path = rundir.path / event.path
    if not path.is_file():
        return f"{event.host}: {event.path} in the run directory there"
    if output is None:
        return str(path)
    copy = output / path.name
    try:
        shutil.copyfile(path, copy)
    except OSError as error:
        raise RunError(f"{copy}: cannot be written: {error.strerror}. The profile is in {path}.") from None
    return str(copy)


def _explain(profiled: list[Profiled]) -> None:
    for event in profiled[:_SENTENCES]:
        if event.top:
            console.print(profile_sentence(event), style="bold", markup=False, soft_wrap=True)
    if profiled and profiled[0].top:
        first = profiled[0]
        title = "kernel or operator" if first.what == PROFILE else "operator" if on_host(first) else "place"
        if on_host(first):
            console.print(
                "On CPUs torch keeps no history of its allocator: the files are traces with the allocations of operators.",
                style="dim",
                soft_wrap=True,
            )
        console.print(plain_table((f"{title}, rank {first.rank}", "in a step", "part"), profile_rows(first)))


def _table(event: Profiled, file: str) -> JsonObject:
    return {name: value for name, value in asdict(event).items() if name != "time"} | {"file": file}
