"""`phalanx train`: checks the run, starts its workers, shows events and a summary. Under torchrun, each process is one rank."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import replace
from json import loads as decode_json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from phalanx.cli.lost_terminal import stopped_by_signals
from phalanx.cli.options import AsJson, Change, Hosts, Overrides, Parallel, RunFile, SweptKeys, launcher_settings
from phalanx.cli.output import console, finish, follow_job, print_error, print_json, print_submission, print_summary
from phalanx.control.protocol import NOT_SAVED, RESUMABLE, stop_code
from phalanx.dashboard.data_tables import tokenizing
from phalanx.dashboard.progress import display
from phalanx.events.log import EventLog, EventReader
from phalanx.events.records import Event
from phalanx.events.rundir import RunDir
from phalanx.faults.grammar import Fault, check, expand_random, format_faults, parse, program_problems
from phalanx.host.env import torchrun_place, torchrun_store
from phalanx.host.probe import this_machine
from phalanx.launch.job import Job, first_events
from phalanx.launch.launcher import SubmittedJob
from phalanx.launch.prepare import (
    Prepared,
    Request,
    choose_directory,
    examine,
    expected_directory,
    prepare,
    recorded_commits,
)
from phalanx.spec.dump import dump, written_secrets
from phalanx.spec.errors import PhalanxError, RunError, RunFailed, refuse
from phalanx.spec.load import load, load_unresolved
from phalanx.spec.plan import Place
from phalanx.spec.run import Run
from phalanx.watch.sink_process import SinkProcess, metrics_address

if TYPE_CHECKING:
    from phalanx.parallel.mesh import Mesh

_PREPARATION_TIMEOUT = 7 * 86400.0  # seconds that the other ranks wait for rank 0, which may tokenize a large corpus
_NOT_SAVED = (
    "Stopped. Nothing was saved (checkpoint.save = false): the run cannot be resumed, and would start again from step 0."
)
_TORCHRUN_STOPS = 60.0  # seconds within which torchrun ends a rank after another one has ended


def train(
    run_file: RunFile,
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None, Option(help="Directory of the run. Default: runs/NAME, with a number if it exists.")
    ] = None,
    fresh: Annotated[bool, Option("--fresh", help="Start a new run even if an unfinished one could be resumed.")] = False,
    accept_changed_data: Annotated[
        bool, Option("--accept-changed-data", help="Resume a run although its text has changed since it was saved.")
    ] = False,
    change: Change = False,
    unrehearsed: Annotated[
        bool, Option("--unrehearsed", help="Start a run although its rehearsal reports that it does not fit.")
    ] = False,
    chaos: Annotated[
        str,
        Option(help='Faults to inject, for example "kill rank=1 step=10; hang rank=0 step=20 for=10s". See docs/chaos.md.'),
    ] = "",
    on: Annotated[
        str | None,
        Option(
            help="What starts the run on other machines: ssh, slurm, ray or kubernetes. Sets cluster.launcher. Default: this machine."
        ),
    ] = None,
    hosts: Hosts = None,
    sweep: SweptKeys = None,
    parallel: Parallel = 1,
    dry_run: Annotated[
        bool,
        Option(
            "--dry-run",
            help="Check everything, print the resolved run, its plan and what it would read, and end. --on slurm or kubernetes: print the batch "
            "script or the manifests.",
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Train the model that RUN.toml describes. After a stop or a crash, the same command resumes the run."""
    place = torchrun_place()
    request = Request(
        directory=run_dir, fresh=fresh, accept_changed_data=accept_changed_data, change=change, unrehearsed=unrehearsed
    )
    if place is not None and chaos:
        raise RunError("--chaos needs Phalanx's own supervisors, but torchrun started this process: use `phalanx train` alone.")
    if sweep or parallel > 1:
        excluded = {"torchrun": place, "--chaos": chaos, "--on": on, "--hosts": hosts, "--dry-run": dry_run}
        raise typer.Exit(_sweep(run_file, overrides or [], (sweep or [], parallel), request, json, excluded))
    if place is not None:
        raise typer.Exit(_train_under_torchrun(place, run_file, overrides or [], request, json))
    run = load(run_file, [*(overrides or []), *launcher_settings(on, hosts)])
    if run.command.program is not None:
        raise RunError(
            f"{run_file}: [command] names a program of its own: start it with `phalanx launch --run-file {run_file}`."
        )
    if run.cluster.launcher in ("slurm", "kubernetes"):
        raise typer.Exit(_train_as_job(run, run_file.stem, request, chaos, dry_run=dry_run, json=json))
    if dry_run:
        raise typer.Exit(_show_only(run, run_file.stem, request, json=json))
    raise typer.Exit(_train(run, run_file.stem, request, chaos, json=json))


def _sweep(
    run_file: Path,
    overrides: list[str],
    grid: tuple[list[str], int],
    request: Request,
    json: bool,
    excluded: Mapping[str, object],
) -> int:
    """Trains a run for each of several settings, on this machine."""
    from phalanx.cli.runs_cmd import sweep

    if not grid[0]:
        raise RunError("--parallel is for the runs of --sweep: name a key and its values with it.")
    refuse(
        [
            f"{option} cannot be used with --sweep, which starts its runs on this machine."
            for option, given in excluded.items()
            if given
        ]
    )
    return sweep(run_file, overrides, *grid, request, json=json)


def _train(run: Run, name: str, request: Request, chaos: str, *, json: bool) -> int:
    """Trains with this process as the launcher; returns the exit code."""
    faults = parse(chaos)  # reports errors before anything starts
    with tokenizing(console) as progress:
        prepared = prepare(run, name, request, progress=progress)
    try:
        fault_text = _drawn_faults(faults, prepared)
    except RunError:
        prepared.rundir.release()
        raise
    job = Job(prepared, fault_text)
    try:
        _follow(job, prepared)
    except RunFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
    summary = print_summary(prepared.rundir)
    if job.exit_code == RESUMABLE:
        again = f"with --run-dir {prepared.rundir.path} instead of --fresh" if request.fresh else "again"
        console.print(f"Stopped and saved. To resume, run the same command {again}.", style="yellow", soft_wrap=True)
    elif job.exit_code == NOT_SAVED and not run.resumable:
        console.print(_NOT_SAVED, style="yellow", soft_wrap=True)
    finish(json, summary.to_json(prepared.rundir.path) | ({"error": [job.failure.reason]} if job.failure else {}))
    return job.exit_code or 0


def _show_only(run: Run, name: str, request: Request, *, json: bool) -> int:
    """What the command would do without --dry-run."""
    with tokenizing(console) as progress:
        examined = examine(run, name, request, progress=progress)
    rundir, planned = expected_directory(examined.asked, name, request), examined.planned
    text = dump(planned.run)
    console.print(text, markup=False, soft_wrap=True, end="")
    view = display(console, planned.run.steps, planned.run.watch.log_every, live=False)
    console.print(f"\nrun directory {rundir.path}{' (resumed)' if rundir.exists else ''}", style="dim", soft_wrap=True)
    for event in first_events(examined):
        view.show(event)
    console.print("dry run: nothing was started; `phalanx plan` explains the layout", style="dim", soft_wrap=True)
    opened = examined.opened
    answer = {
        "dry_run": True,
        "run_dir": str(rundir.path),
        "resumes": rundir.exists,
        "toml": text,
        "plan": decode_json(planned.plan.to_json()),
        "documents": opened.documents,
        "data_tokens": opened.tokens,
        "run_tokens": opened.run_tokens,
        "notices": list(examined.notices),
    }
    finish(json, answer)
    return 0


def _drawn_faults(faults: tuple[Fault, ...], prepared: Prepared) -> str:
    """All faults of the run in the grammar that its processes read, with random ones drawn."""
    ranks, nodes, steps = prepared.plan.processes, prepared.run.cluster.nodes, prepared.run.steps
    refuse([*check(faults, ranks, nodes, steps), *(program_problems(faults) if prepared.run.engine.name == "xla" else ())])
    return format_faults(expand_random(faults, steps=steps, ranks=ranks, nodes=nodes))


def _follow(job: Job, prepared: Prepared) -> None:
    """Shows events until the job ends."""
    with stopped_by_signals(job):
        view = display(console, prepared.run.steps, prepared.run.watch.log_every, live=console.is_terminal)
        console.print(f"run directory {prepared.rundir.path}{' (resumed)' if prepared.resumes else ''}", style="dim")
        if job.page is not None:
            console.print(f"page {job.page.wait()}", style="dim", markup=False, soft_wrap=True)
        if (metrics := metrics_address(prepared.run.watch)) is not None:
            console.print(f"metrics {metrics}", style="dim", markup=False, soft_wrap=True)
        try:
            for event in job.events():
                view.show(event)
        finally:
            view.close()


def _train_as_job(run: Run, name: str, request: Request, chaos: str, *, dry_run: bool, json: bool) -> int:
    """Starts the run as a job that goes on without this process. Its first host prepares it."""
    launcher = run.cluster.launcher
    unseen = {
        "--chaos": chaos,
        "--accept-changed-data": request.accept_changed_data,
        "--change": request.change,
        "--unrehearsed": request.unrehearsed,
    }
    refuse(
        [
            f"{option} cannot be used with --on {launcher}: the first host of the job prepares the run, and does not see it."
            for option, value in unseen.items()
            if value
        ]
    )
    refuse(written_secrets(run, f"--on {launcher}"))
    run = recorded_commits(run, name, request)
    train_on = {"slurm": _train_on_slurm, "kubernetes": _train_on_kubernetes}[launcher]
    return train_on(run, name, request, dry_run=dry_run, json=json)


def _train_on_slurm(run: Run, name: str, request: Request, *, dry_run: bool, json: bool) -> int:
    """Submits the run as a batch job and follows it."""
    from phalanx.launch import slurm

    if dry_run:
        print_submission(slurm.script(run, RunDir(request.directory or Path("runs") / name)), json)
        return 0
    rundir = choose_directory(run, name, request)
    rundir.release()  # node 0 of the job locks it
    reader = _reader(rundir)
    return _follow_submitted(slurm.submit(run, rundir), run, rundir, reader, json=json)


def _train_on_kubernetes(run: Run, name: str, request: Request, *, dry_run: bool, json: bool) -> int:
    """Creates the run's objects in the cluster and follows its pods."""
    from phalanx.launch import kubernetes

    if dry_run:
        print_submission(kubernetes.manifest(run, (request.directory or Path(name)).name), json)
        return 0
    api = kubernetes.open_api(run)
    rundir = choose_directory(run, name, request)
    try:
        reader = _reader(rundir)
        job = kubernetes.submit(api, run, rundir)
        code = _follow_submitted(job, run, rundir, reader, json=json)
        kubernetes.note_end(rundir, job)
    finally:
        rundir.release()
    return code


def _reader(rundir: RunDir) -> EventReader:
    """Reads the records from now on."""
    return EventReader(rundir.events_file, offset=rundir.events_file.stat().st_size if rundir.events_file.exists() else 0)


def _follow_submitted(job: SubmittedJob, run: Run, rundir: RunDir, reader: EventReader, *, json: bool) -> int:
    """Follows a job that goes on if this process ends."""
    console.print(f"{job.title}, run directory {rundir.path}", style="dim", soft_wrap=True)
    view = display(console, run.steps, run.watch.log_every, live=console.is_terminal)
    try:
        state = follow_job(job, reader, view.show)
    finally:
        view.close()
    if state is None:
        return 0
    summary = print_summary(rundir)
    console.print(f"{job.title}: {state}", style="dim", soft_wrap=True)
    code = job.exit_code(state)
    if code == RESUMABLE and not run.resumable:
        console.print(_NOT_SAVED, style="yellow", soft_wrap=True)
    finish(json, summary.to_json(rundir.path))
    return stop_code(run) if code == RESUMABLE else code


def _train_under_torchrun(place: Place, run_file: Path, overrides: list[str], request: Request, json: bool) -> int:
    """`torchrun -m phalanx train RUN.toml`: this process is one rank. Rank 0 checks and prepares for all, and broadcasts the
    result or its problems."""
    import torch

    from phalanx.parallel.mesh import disconnect
    from phalanx.worker import rank, rank_process

    try:
        # The other ranks get the resolved run from rank 0: only one asks the Hugging Face hub what its names mean.
        run = (load if place.rank == 0 else load_unresolved)(run_file, overrides)
    except RunError:
        if place.rank == 0:
            raise
        time.sleep(_TORCHRUN_STOPS)  # every rank has the same error: rank 0 reports it, and torchrun ends the others
        return 2
    mesh = _meet(place, run)
    broadcast = mesh.slow_broadcast(_PREPARATION_TIMEOUT)
    prepared: Prepared | None = None
    problems: tuple[str, ...] = ()
    if mesh.rank == 0:
        try:
            with tokenizing(console) as progress:
                prepared = prepare(run, run_file.stem, request, ranks=place.ranks, progress=progress)
        except RunError as error:
            problems = error.problems
    problems, shared = broadcast((problems, prepared and (prepared.run, prepared.plan, prepared.rundir.path)))
    if problems:
        if mesh.rank == 0:
            print_error(RunError(problems))  # before the others can leave: torchrun ends all ranks when one has ended
        disconnect(mesh)
        return 2
    run, plan, path = shared
    mesh = replace(mesh, layout=plan.layout)
    torch.set_num_threads(plan.threads)
    rundir = RunDir(path)
    show = None if prepared is None else _show_start(prepared)
    sinks = None if prepared is None else SinkProcess.of(prepared.run, rundir)
    log = EventLog(rundir.events_file)
    try:
        code = rank.TorchrunRank(run, rundir, rank_process.StopSignals(), log.emit, also=show).train(plan, mesh)
    except PhalanxError as error:
        print_error(error)  # the message suffices
        code = 1
    except Exception:
        traceback.print_exc()
        code = 1
    if sinks is not None and prepared is not None:
        prepared.rundir.release()  # as for everybody who looks, the run is over
        sinks.close()
    if prepared is not None:
        summary = print_summary(rundir)
        if code == NOT_SAVED:
            console.print(_NOT_SAVED, style="yellow", soft_wrap=True)
        if json:
            print_json(summary.to_json(rundir.path))
    return code


def _meet(place: Place, run: Run) -> Mesh:
    """Joins the other ranks where torchrun has told them to meet. Raises RunError if they cannot meet there."""
    from torch.distributed import DistNetworkError

    from phalanx.parallel.mesh import connect

    if run.engine.name == "xla":
        raise RunError('engine.name = "xla": torchrun starts ranks of the torch engine: use `phalanx train` alone.')
    device = run.cluster.device or ("cuda" if this_machine().gpus else "cpu")
    try:
        return connect(place, device, run.resilience.timeout)
    except DistNetworkError as error:
        host, port = torchrun_store()
        if "EADDRINUSE" in str(error):
            raise RunError(
                f"MASTER_PORT = {port}: another process uses this port of {host}, so that the ranks cannot meet there: start them with "
                "`torchrun --standalone`, which finds a free port, name another with --master-port, or end that process."
            ) from None
        raise RunError(
            f"MASTER_ADDR = {host}, MASTER_PORT = {port}: rank {place.rank} cannot meet the other ranks there ({_reason(error)}). If torchrun "
            "runs, look at its output and at the network between the hosts. If it does not, remove TORCHELASTIC_RUN_ID from the environment."
        ) from None


def _reason(error: Exception) -> str:
    """What torch says, without the stack of its C++ code."""
    return str(error).partition("\n")[0].rstrip(".")


def _show_start(prepared: Prepared) -> Callable[[Event], None]:
    """Logs and shows the first events of rank 0; returns the callback that shows the others."""
    view = display(console, prepared.run.steps, prepared.run.watch.log_every, live=False)
    log = EventLog(prepared.rundir.events_file)
    for event in first_events(prepared):
        view.show(log.emit(event))
    log.close()
    return view.show
