"""The Python API: plan, train, verify and rehearse a run, and compare its step. `phalanx` exports these functions."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from phalanx.host.env import torchrun_place
from phalanx.host.probe import this_machine
from phalanx.launch.job import Job
from phalanx.launch.model_check import measure
from phalanx.launch.prepare import Request, prepare
from phalanx.planning.machines.hardware import planned
from phalanx.spec.check import check
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.load import resolve
from phalanx.spec.plan import Place, Plan
from phalanx.spec.preset_vocabulary import vocabulary_question
from phalanx.spec.run import Run

if TYPE_CHECKING:
    from phalanx.comparison.compare_step import ComparisonSettings
    from phalanx.comparison.comparison_report import StepComparison
    from phalanx.rehearsal.result import Rehearsal
    from phalanx.training.trainer import Trainer
    from phalanx.verification.parity import Report


def plan(run: Run) -> Plan:
    """The best plan of the run on its [cluster], or on this machine if it names none."""
    from phalanx.planning.planner import choose  # imports numpy

    run = _checked(run)
    if planned(run) and run.model.module is None:
        return choose(run, None)
    return choose(run, this_machine(), size=measure(run))


def explain(run: Run) -> str:
    """The explanation of the plan, as `phalanx plan` prints it."""
    from io import StringIO

    from rich.console import Console

    from phalanx.dashboard.plan_text import show_plan
    from phalanx.planning.planner import plan
    from phalanx.planning.request import PlanRequest

    run = _checked(run)
    text = StringIO()
    report = plan(PlanRequest(run, None if planned(run) else this_machine()))
    show_plan(Console(file=text, width=100, highlight=False), report)
    return text.getvalue()


def train(
    run: Run,
    *,
    run_dir: str | Path | None = None,
    name: str = "run",
    fresh: bool = False,
    accept_changed_data: bool = False,
    change: bool = False,
) -> Job:
    """Starts the workers of the run on this machine; iterate over `Job.events()` until the end.

    As on the command line, an unfinished run is resumed. A run whose text has changed since is refused, unless
    `accept_changed_data` is set, and so is one with other settings; `change` accepts those that `phalanx train --change` does. The workers die with the calling thread.
    """
    directory = None if run_dir is None else Path(run_dir)
    request = Request(directory=directory, fresh=fresh, accept_changed_data=accept_changed_data, change=change)
    return Job(prepare(_checked(run), name, request))


def trainer(run: Run, *, checkpoints: str | Path = "checkpoints") -> Trainer:
    """A trainer in this process with its initial weights, ready to step: a single process, or one rank of torchrun."""
    from phalanx.parallel.mesh import connect
    from phalanx.planning.planner import plan_run
    from phalanx.training.trainer import Trainer

    run, place = _checked(run), torchrun_place() or Place()
    refuse(vocabulary_question(run))
    planned_run = plan_run(run, this_machine(), place.ranks, measure(run))
    run, plan = planned_run.run, planned_run.plan
    built = Trainer(run, plan, connect(place, plan.device, run.resilience.timeout, plan.layout), Path(checkpoints))
    built.build()
    built.load_initial_weights()
    return built


def verify(run: Run, *, steps: int = 8, ranks: int | None = None, account: bool = False, device: str = "cpu") -> Report:
    """Proves that the layout of the run computes the same as one device, with a small model of its family on CPU ranks.

    `ranks`: maximum number of ranks, by default 8; `account`: also measure communication and memory of each rank. `device`: "cuda" for
    ranks on this machine's GPUs, which they share where there are fewer. Differences, errors and hangs are in the
    report. Works in notebooks and after any use of torch: ranks are then started by a new process, which loads torch for them.
    """
    unused = "torch" not in sys.modules and threading.active_count() == 1
    from phalanx.verification.cases import gpus_of
    from phalanx.verification.parity import verify as prove
    from phalanx.verification.pool_process import PoolProcess
    from phalanx.verification.rank_pool import RankPool

    gpus = () if device == "cpu" else gpus_of(this_machine(), device)
    if gpus and account:
        raise RunError('verify(account=True) measures CPU ranks: remove it, or device = "cuda".')
    return prove(_checked(run), steps=steps, ranks=ranks, account=account, gpus=gpus, pool=RankPool if unused else PoolProcess)


def rehearse(run: Run, plan: Plan | None = None, *, rank: int = 0, memory: int | None = None) -> Rehearsal:
    """Runs the program of one rank on fake tensors, without the other ranks: its memory, communication and compute, and errors.

    `plan`: a plan of `plan(run)`, by default that of the run's cluster or of this machine; `memory`: bytes of a device, instead of
    its own.
    """
    from phalanx.rehearsal.rehearse import rehearsal_job
    from phalanx.rehearsal.rehearse import rehearse as rehearsed

    run = _checked(run)
    if plan is not None:
        run = replace(run, layout=plan.layout, train=replace(run.train, micro_batch=plan.micro_batch))
    job = rehearsal_job(run, this_machine(), measure(run), memory)
    return rehearsed(job.run, plan or job.plan, rank, job.device)


def bench_step(run: Run, settings: ComparisonSettings | None = None) -> StepComparison:
    """Measures the training step of the run's model on one device, next to transformers, torchtitan and a hand-written loop.

    Every trainer is a process of its own with the same initial weights and tokens. `settings`: see
    `phalanx.comparison.compare_step.ComparisonSettings`.
    """
    from phalanx.comparison.compare_step import ComparisonSettings, compare

    return compare(_checked(run), this_machine(), settings or ComparisonSettings())


def _checked(run: Run) -> Run:
    """The resolved run. A run made in Python has not been checked by the loader, so it is checked here."""
    run = resolve(run)
    if problems := check(run):
        raise RunError(problems)
    return run
