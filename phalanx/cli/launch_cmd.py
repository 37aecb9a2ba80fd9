"""`phalanx launch`: runs any program on many ranks, with the same launchers, detection of failures, restarts and logs as a training run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from phalanx.cli.lost_terminal import stopped_by_signals
from phalanx.cli.options import AsJson
from phalanx.cli.output import console, finish, follow_job, print_submission
from phalanx.control.protocol import RESUMABLE
from phalanx.dashboard.progress import display
from phalanx.events.log import EventReader, launch_events
from phalanx.events.records import Event, FailureNoticed, Recovered, Stopped
from phalanx.events.run_logs import LogReader
from phalanx.events.rundir import RunDir
from phalanx.launch.job import Job
from phalanx.launch.launcher import SubmittedJob
from phalanx.launch.prepare import Request, choose_directory
from phalanx.launch.prepare_program import prepare_program
from phalanx.spec.dump import written_secrets
from phalanx.spec.errors import RunFailed, refuse, toml
from phalanx.spec.load import load, loads
from phalanx.spec.run import Run
from phalanx.watch.sink_process import metrics_address

_POLL = 0.2  # seconds between two looks at the log of rank 0


def launch(
    program: Annotated[
        list[str] | None, Argument(metavar="-- PROGRAM [ARGUMENT]...", help="The program and its arguments, after --.")
    ] = None,
    on: Annotated[
        str | None, Option(help="What starts the ranks: local, ssh, slurm, ray or kubernetes. Sets cluster.launcher.")
    ] = None,
    hosts: Annotated[Path | None, Option(help="--on ssh: a file with one host per line. See docs/ssh.md.")] = None,
    nodes: Annotated[int | None, Option(help="Number of hosts. Sets cluster.nodes.")] = None,
    ranks_per_node: Annotated[
        int | None, Option("--ranks-per-node", "--nproc-per-node", help="Ranks on each host. Default: its GPUs, or 1.")
    ] = None,
    spares: Annotated[int | None, Option(help="Hosts that stay idle and replace a lost one.")] = None,
    min_nodes: Annotated[
        int | None, Option(help="Continue on fewer hosts, but at least these. Default: wait for a lost host.")
    ] = None,
    restarts: Annotated[int | None, Option(help="Failures within an hour that the program is restarted after.")] = None,
    hang: Annotated[
        float | None, Option(help="Seconds for which a rank may leave the file $PHALANX_PROGRESS untouched. Default: no limit.")
    ] = None,
    notice: Annotated[float | None, Option(help="Seconds between SIGTERM and SIGKILL when the program shall end.")] = None,
    env: Annotated[list[str] | None, Option(help="A variable of the program's environment, as NAME=VALUE.")] = None,
    run_dir: Annotated[Path | None, Option(help="Directory for logs and records. Default: runs/NAME of the program.")] = None,
    fresh: Annotated[bool, Option("--fresh", help="Use a new directory even if an unfinished one could be continued.")] = False,
    run_file: Annotated[
        Path | None, Option(help="A run file with more settings: [cluster], [resilience] and [command] are used.")
    ] = None,
    settings: Annotated[list[str] | None, Option("--set", help="Another setting, such as cluster.bind=10.0.0.5.")] = None,
    dry_run: Annotated[
        bool, Option("--dry-run", help="--on slurm or kubernetes: print what would be submitted, and end.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Run any program on many ranks: start it with rendezvous variables, restart it after failures, keep its logs.

    The variables are those of torchrun (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, …). After a failure the program is ended on all ranks and
    started again; it restores its own checkpoint. See docs/launch.md.
    """
    given = {
        "command.program": program or None,
        "cluster.launcher": "ssh" if hosts is not None and on is None else on,
        "cluster.hosts": None if hosts is None else str(hosts),
        "cluster.nodes": nodes,
        "command.ranks_per_node": ranks_per_node,
        "resilience.spares": spares,
        "command.min_nodes": min_nodes,
        "resilience.restarts": restarts,
        "command.hang": hang,
        "resilience.preemption_notice": notice,
        "command.environment": env or None,
    }
    overrides = [f"{key}={toml(value)}" for key, value in given.items() if value is not None] + (settings or [])
    run, request = _load(run_file, overrides), Request(directory=run_dir, fresh=fresh)
    launch_program = _launch_as_job if run.cluster.launcher in ("slurm", "kubernetes") else _launch
    raise typer.Exit(launch_program(run, request, dry_run=dry_run, json=json))


def _load(run_file: Path | None, overrides: list[str]) -> Run:
    """The settings of the command line, over those of a run file if there is one."""
    missing = "give the program after --, such as `phalanx launch -- python train.py`."
    if run_file is None and not any(override.startswith("command.program=") for override in overrides):
        raise typer.BadParameter(missing)
    run = loads("", name="phalanx launch", overrides=overrides) if run_file is None else load(run_file, overrides)
    if run.command.program is None:
        raise typer.BadParameter(f"{run_file} has no command.program: {missing}")
    return run


def _launch(run: Run, request: Request, *, dry_run: bool, json: bool) -> int:
    prepared = prepare_program(run, _name(run), request)
    job = Job(prepared)
    try:
        _follow(job, prepared.rundir)
    except RunFailed as failure:
        print(f"error: {failure}", file=sys.stderr)
    code = job.exit_code or 0
    _conclude(prepared.rundir, code, json, error=job.failure.reason if job.failure is not None else None)
    return code


def _name(run: Run) -> str:
    """The name of a program's directory: of the script rather than of its interpreter."""
    program = run.command.program or ()
    scripts = [word for word in program if word.endswith((".py", ".sh"))]
    return Path(scripts[0] if scripts else program[0]).stem or "program"


def _follow(job: Job, rundir: RunDir) -> None:
    """Shows what happens, and the output of rank 0."""
    with stopped_by_signals(job), _output(rundir):
        if job.page is not None:
            console.print(f"page {job.page.wait()}", style="dim", markup=False, soft_wrap=True)
        if (metrics := metrics_address(job.run.watch)) is not None:
            console.print(f"metrics {metrics}", style="dim", markup=False, soft_wrap=True)
        for event in job.events():
            _show(event)


def _show(event: Event) -> None:
    if not isinstance(event, Stopped):
        display(console, 0, 1, live=False).show(event)


@contextmanager
def _output(rundir: RunDir) -> Iterator[None]:
    """Prints what rank 0 writes from now on."""
    console.print(f"run directory {rundir.path}; below is the output of rank 0", style="dim", soft_wrap=True)
    reader, over = LogReader(rundir, "rank-0.log", from_end=True), threading.Event()

    def copy() -> None:
        while True:
            last = over.wait(_POLL)
            for line in reader.new():
                print(line.text, file=console.file, flush=True)
            if last:
                return

    thread = threading.Thread(target=copy, name="output")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _launch_as_job(run: Run, request: Request, *, dry_run: bool, json: bool) -> int:
    """Submits the program to Slurm or Kubernetes and follows it. The job goes on if this process ends."""
    from phalanx.launch import kubernetes, slurm

    refuse(written_secrets(run, f"--on {run.cluster.launcher}"))
    name, on_slurm = _name(run), run.cluster.launcher == "slurm"
    if dry_run:
        directory = request.directory or Path("runs") / name
        text = slurm.script(run, RunDir(directory)) if on_slurm else kubernetes.manifest(run, directory.name)
        print_submission(text, json)
        return 0
    api = None if on_slurm else kubernetes.open_api(run)
    rundir = choose_directory(run, name, request)
    if on_slurm:
        rundir.release()  # node 0 of the job locks it
    try:
        reader = EventReader(rundir.events_file, offset=rundir.events_file.stat().st_size if rundir.events_file.exists() else 0)
        job: SubmittedJob = slurm.submit(run, rundir) if api is None else kubernetes.submit(api, run, rundir)
        code = _follow_job(job, rundir, reader, json=json)
        if isinstance(job, kubernetes.KubernetesJob):
            kubernetes.note_end(rundir, job)
    finally:
        rundir.release()
    return code


def _follow_job(job: SubmittedJob, rundir: RunDir, reader: EventReader, *, json: bool) -> int:
    console.print(job.title, style="dim", soft_wrap=True)
    with _output(rundir):
        state = follow_job(job, reader, _show)
    if state is None:
        return 0
    console.print(f"{job.title}: {state}", style="dim", soft_wrap=True)
    code = job.exit_code(state)
    _conclude(rundir, code, json)
    return code


def _conclude(rundir: RunDir, code: int, json: bool, error: str | None = None) -> None:
    events = launch_events(rundir.events_file)
    failures = sum(isinstance(event, FailureNoticed) for event in events)
    seconds = [event.seconds for event in events if isinstance(event, Recovered)]
    if code == RESUMABLE:
        console.print("Stopped. To continue, run the same command again.", style="yellow")
    if failures:
        slowest = f", the slowest within {max(seconds):.1f} s" if seconds else ""
        console.print(f"failures: {failures}, recovered: {len(seconds)}{slowest}; logs in {rundir.logs}", soft_wrap=True)
    result = {"exit_code": code, "failures": failures, "recovered": len(seconds), "run_dir": str(rundir.path)}
    finish(json, result | ({"error": [error]} if error else {}))
