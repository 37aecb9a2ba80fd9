"""Prepares a program of the user's own for `phalanx launch`: its directory, and how many ranks run it where."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from phalanx.events.rundir import replace_file
from phalanx.launch import run_checks
from phalanx.launch.launcher import Launcher, launcher
from phalanx.launch.prepare import Prepared, Request, begin_launch, choose_directory
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run


def prepare_program(run: Run, name: str, request: Request, *, started_by: Launcher | None = None) -> Prepared:
    """Check the hosts, and make the directory ready. `started_by`: a launcher other than the one that the run names."""
    assert run.command.program
    started_by = started_by or launcher(run, (request.directory or Path(name)).name)
    if run.cluster.launcher == "local" and shutil.which(run.command.program[0]) is None:
        raise RunError(f"{run.command.program[0]} is not a program on PATH: name one, or give its path.")
    refuse(run_checks.watch_problems(run))
    machine = started_by.machine()
    # A program that may not run on fewer nodes waits for them.
    resilience = replace(run.resilience, shrink=run.command.min_nodes is not None)
    run = replace(run, cluster=replace(run.cluster, nodes=started_by.nodes), resilience=resilience)
    training = max(1, run.cluster.nodes - run.resilience.spares)
    gpus = 0 if run.cluster.device == "cpu" else len(machine.gpus) // machine.nodes
    plan = Plan(
        layout=Layout(data=training * (run.command.ranks_per_node or gpus or 1)),
        device="cuda" if gpus else "cpu",
        threads=1,
        micro_batch=0,
        accumulation=0,
        compute="fp32",
        parameters=0,
        flops_per_token=0.0,
        peak_flops=None,
    )
    rundir = choose_directory(run, name, request)
    try:
        begin_launch(rundir, started_by)
        replace_file(rundir.run_file, dump(run))
        replace_file(rundir.plan_file, plan.to_json())
    except BaseException:
        rundir.release()
        raise
    return Prepared(run, plan, rundir, started_by, resumes=False)
