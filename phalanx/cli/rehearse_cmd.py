"""`phalanx rehearse`: runs the program of one rank of a job of any size on fake tensors, without the other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import AsJson, Overrides, RunFile, parse_size
from phalanx.cli.output import console, print_json
from phalanx.host.probe import this_machine
from phalanx.launch.model_check import measure
from phalanx.spec.load import load


def rehearse(
    run_file: RunFile,
    overrides: Overrides = None,
    rank: Annotated[int, typer.Option(help="The rank to rehearse.")] = 0,
    all_stages: Annotated[bool, typer.Option("--all-stages", help="Rehearse one rank of each distinct kind instead.")] = False,
    memory: Annotated[
        str | None, typer.Option(help="Memory of a device, for example 80GiB. Default: the memory of the cluster's device.")
    ] = None,
    messages: Annotated[bool, typer.Option("--messages", help="With --json: list every collective, in order.")] = False,
    trace: Annotated[
        Path | None, typer.Option(help="Write the memory timeline of the step to this file, for Perfetto.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Run the program of one rank on fake tensors: peak memory by component, communication, and errors. The exit code is 1 if the
    run would fail."""
    run = load(run_file, overrides or [])
    limit = None if memory is None else parse_size("--memory", memory)
    import torch

    from phalanx.rehearsal.job import distinct_ranks, rehearsal_job
    from phalanx.rehearsal.rehearse import rehearse as rehearsed
    from phalanx.rehearsal.result import show, write_trace

    torch.set_num_threads(1)
    job = rehearsal_job(run, this_machine(), measure(run), limit)
    ranks = distinct_ranks(job.run, job.plan) if all_stages else {rank: 1}
    results = []
    for each in ranks:
        results.append(rehearsed(job.run, job.plan, each, job.device))
        show(console, results[-1])
    worst = max(results, key=lambda result: (not result.fits, result.peak))
    if trace is not None:
        write_trace(worst, trace)
    if json:
        stages = {"stages": [result.to_json() for result in results]} if all_stages else {}
        print_json(worst.to_json(every_message=messages) | stages)
    raise typer.Exit(0 if worst.fits else 1)
