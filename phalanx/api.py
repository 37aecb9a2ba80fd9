"""The verbs for programs: plan a run, train it in processes of its own or step by step in this one, prove its layout. See `phalanx`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.host.env import torchrun_place, visible_gpus
from phalanx.host.probe import probe
from phalanx.launch.local import Job
from phalanx.launch.model_check import measure
from phalanx.launch.prepare import Request, prepare
from phalanx.planning.machines.hardware import planned
from phalanx.spec.check import check
from phalanx.spec.errors import RunError
from phalanx.spec.load import resolve
from phalanx.spec.plan import Place, Plan
from phalanx.spec.run import Run

if TYPE_CHECKING:
    from phalanx.rehearsal.result import Rehearsal
    from phalanx.training.trainer import Trainer
    from phalanx.verification.parity import Report


def plan(run: Run) -> Plan:
    """The run laid out on the machines of its [cluster], or on this one where it names none."""
    from phalanx.planning.planner import choose  # imports numpy

    run = _checked(run)
    if planned(run) and run.model.module is None:
        return choose(run, None)
    return choose(run, probe(visible_gpus()), size=measure(run))


def explain(run: Run) -> str:
    """Why that plan and no other, as `phalanx plan` prints it: for the cluster that the run names, or for this machine."""
    from io import StringIO

    from rich.console import Console

    from phalanx.dashboard.plan_text import show_plan
    from phalanx.planning.planner import plan
    from phalanx.planning.request import PlanRequest

    run = _checked(run)
    text = StringIO()
    report = plan(PlanRequest(run, None if planned(run) else probe(visible_gpus())))
    show_plan(Console(file=text, width=100, highlight=False), report)
    return text.getvalue()


def train(
    run: Run,
    *,
    run_dir: str | Path | None = None,
    name: str = "run",
    fresh: bool = False,
    accept_changed_data: bool = False,
) -> Job:
    """Start the run's workers on this machine; read `Job.events()` to follow them to the end.

    As on the command line, a run that was stopped goes on where it was, unless its text has changed since and that is not
    accepted. The workers die with the thread that called this.
    """
    directory = None if run_dir is None else Path(run_dir)
    request = Request(directory=directory, fresh=fresh, accept_changed_data=accept_changed_data)
    return Job(prepare(_checked(run), name, request))


def trainer(run: Run, *, checkpoints: str | Path = "checkpoints") -> Trainer:
    """A trainer in this process, built, with the weights it starts from, ready to step: alone, or as one of torchrun's ranks."""
    from phalanx.parallel.mesh import connect
    from phalanx.planning.planner import plan_run
    from phalanx.training.trainer import Trainer

    run, place = _checked(run), torchrun_place() or Place()
    settled = plan_run(run, probe(visible_gpus()), place.ranks, measure(run))
    run, laid = settled.run, settled.plan
    built = Trainer(run, laid, connect(place, laid.device, run.resilience.timeout, laid.layout), Path(checkpoints))
    built.build()
    built.load_initial_weights()
    return built


def verify(run: Run, *, steps: int = 8, ranks: int | None = None, account: bool = False) -> Report:
    """Prove that the run's layout computes what one device does, with a small model of its family on CPU ranks of this machine.

    `ranks`: at most so many, 8 if left out; `account`: also what each rank sends and keeps. Anything that differs, raises or hangs
    on a rank is in the report. Ranks are forks of this process: call it before torch has started threads or a GPU.
    """
    from phalanx.verification.parity import verify as prove

    return prove(_checked(run), steps=steps, ranks=ranks, account=account)


def rehearse(run: Run, plan: Plan | None = None, *, rank: int = 0, memory: int | None = None) -> Rehearsal:
    """The real program of one rank of the run, on tensors without memory and among ranks that are not there: what it takes, sends and
    computes, and what would fail.

    For the cluster that the run names, or for this machine; `plan`: laid out so, as `plan(run)` gives it; `memory`: bytes of a device, in place of what it has.
    """
    from phalanx.rehearsal.job import laid_out
    from phalanx.rehearsal.rehearse import rehearse as rehearsed

    run = _checked(run)
    if plan is not None:
        run = replace(run, layout=plan.layout, train=replace(run.train, micro_batch=plan.micro_batch))
    job = laid_out(run, probe(visible_gpus()), measure(run), memory)
    return rehearsed(job.run, plan or job.plan, rank, job.stage)


def _checked(run: Run) -> Run:
    """A run made in Python has not been through the loader: what that would refuse is refused here."""
    run = resolve(run)
    if problems := check(run):
        raise RunError(problems)
    return run
