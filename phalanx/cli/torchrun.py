"""`torchrun -m phalanx train RUN.toml`: the processes are there already, so each becomes the rank that torchrun made it."""

from __future__ import annotations

import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from phalanx.cli.output import console, print_error, print_json
from phalanx.cli.train_cmd import conclude
from phalanx.control.processes import NO_COPIES
from phalanx.dashboard.data_tables import tokenizing
from phalanx.dashboard.progress import display
from phalanx.events.log import EventLog
from phalanx.events.records import Warned
from phalanx.events.rundir import RunDir
from phalanx.host.env import visible_gpus
from phalanx.host.probe import probe
from phalanx.launch.local import run_started
from phalanx.launch.prepare import Prepared, Request, prepare
from phalanx.parallel.mesh import connect, disconnect
from phalanx.spec.errors import PhalanxError, RunError
from phalanx.spec.load import load
from phalanx.spec.plan import Place
from phalanx.worker.rank import StopSignals, train_rank

_UNTIL_PREPARED = 7 * 86400.0  # seconds that the others wait for rank 0, which may have a large corpus to tokenise
_UNTIL_ENDED = 60.0  # seconds that torchrun has to end a rank once another has ended


def train_here(place: Place, run_file: Path, overrides: list[str], request: Request, json: bool) -> int:
    """Rank 0 checks and prepares for all; what it finds, good or bad, the others learn from it."""
    try:
        run = load(run_file, overrides)
    except RunError:
        if place.rank == 0:
            raise
        time.sleep(_UNTIL_ENDED)  # every rank has found the same: rank 0 says it, and its end is the others'
        return 2
    device = run.cluster.device or ("cuda" if probe(visible_gpus()).gpus else "cpu")
    mesh = connect(place, device, run.resilience.timeout)
    share = mesh.slow_broadcast(_UNTIL_PREPARED)
    prepared: Prepared | None = None
    problems: tuple[str, ...] = ()
    if mesh.rank == 0:
        try:
            with tokenizing(console) as progress:
                prepared = prepare(run, run_file.stem, request, ranks=place.ranks, progress=progress)
        except RunError as error:
            problems = error.problems
    problems, found = share((problems, prepared and (prepared.run, prepared.plan, prepared.rundir.path)))
    if problems:
        if mesh.rank == 0:
            print_error(RunError(problems))  # before the others can leave: torchrun ends all when one has ended
        disconnect(mesh)
        return 2
    run, plan, path = found
    mesh = replace(mesh, layout=plan.layout)
    torch.set_num_threads(plan.threads)
    rundir = RunDir(path)
    show = None
    if prepared is not None:
        view = display(console, run.steps, run.watch.log_every, live=False)
        log = EventLog(rundir.events_file)
        notices = (*prepared.notices, *([NO_COPIES] if run.checkpoint.memory_every is not None else []))
        for event in (run_started(run, plan), *(Warned(message=notice) for notice in notices)):
            view.show(log.emit(event))
        log.close()
        show = view.show
    try:
        code = train_rank(run, plan, mesh, rundir, StopSignals(), also=show)
    except PhalanxError as error:
        print_error(error)  # a sentence says it all
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    if prepared is not None:
        summary = conclude(rundir)
        if json:
            print_json(summary.to_json(rundir.path))
    return code
