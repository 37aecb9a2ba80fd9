"""`phalanx rehearse`: the real program of one rank of a job of any size, without memory and without the others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.output import AsJson, console, print_json
from phalanx.host.env import visible_gpus
from phalanx.host.probe import probe
from phalanx.launch.model_check import measure
from phalanx.spec.errors import RunError
from phalanx.spec.load import load

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def rehearse(
    run_file: Annotated[Path, typer.Argument(help="The run file.", metavar="RUN.toml")],
    overrides: Annotated[list[str] | None, typer.Argument(help="Settings to change, e.g. layout.tensor=8.")] = None,
    rank: Annotated[int, typer.Option(help="Which rank.")] = 0,
    all_stages: Annotated[bool, typer.Option("--all-stages", help="One rank of each kind instead.")] = False,
    memory: Annotated[str | None, typer.Option(help="What a device has, e.g. 80GiB; left out: what it really has.")] = None,
    messages: Annotated[bool, typer.Option("--messages", help="With --json: every collective, in order.")] = False,
    trace: Annotated[Path | None, typer.Option(help="Write the memory of the step for Perfetto here.")] = None,
    json: AsJson = False,
) -> None:
    """Run one rank's real program on tensors without memory: its peak by component, what it sends, what would fail. Exit code 1 if it
    would."""
    run = load(run_file, overrides or [])
    limit = None if memory is None else parse_size(memory)
    import torch

    from phalanx.rehearsal.job import kinds, laid_out
    from phalanx.rehearsal.rehearsal_text import show, write_trace
    from phalanx.rehearsal.rehearse import rehearse as rehearsed

    torch.set_num_threads(1)
    job = laid_out(run, probe(visible_gpus()), measure(run), limit)
    ranks = kinds(job.run, job.plan) if all_stages else {rank: 1}
    found = []
    for one in ranks:
        found.append(rehearsed(job.run, job.plan, one, job.stage))
        show(console, found[-1])
    worst = max(found, key=lambda told: (not told.fits, told.peak))
    if trace is not None:
        write_trace(worst, trace)
    if json:
        stages = {"stages": [told.to_json() for told in found]} if all_stages else {}
        print_json(worst.to_json(every_message=messages) | stages)
    raise typer.Exit(0 if worst.fits else 1)


def parse_size(text: str) -> int:
    """ "80GiB" in bytes."""
    found = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", text)
    if found is None or found[2].upper() not in _UNITS:
        raise RunError([f'--memory {text} is no size: write a number and a unit, such as "80GiB" or "141GB".'])
    try:
        return int(float(found[1]) * _UNITS[found[2].upper()])
    except ValueError:
        raise RunError([f'--memory {text} is no size: write a number and a unit, such as "80GiB" or "141GB".']) from None
