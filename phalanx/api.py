"""The Python API: every verb as a function. `phalanx` exports them; docs/python.md describes them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

from phalanx.events.records import Event
from phalanx.host.env import torchrun_place
from phalanx.host.probe import this_machine
from phalanx.launch.job import Job
from phalanx.launch.model_check import measure, measured
from phalanx.launch.prepare import Request, prepare
from phalanx.planning.machines.hardware import planned
from phalanx.spec.check import check
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.hub import model_folder
from phalanx.spec.load import loads, resolve
from phalanx.spec.new_run_file import Answers, run_file
from phalanx.spec.pinned_names import pin_run
from phalanx.spec.plan import Place, Plan
from phalanx.spec.preset_vocabulary import vocabulary_question
from phalanx.spec.run import Run

if TYPE_CHECKING:
    from phalanx.comparison.compare_step import ComparisonSettings
    from phalanx.comparison.comparison_report import StepComparison
    from phalanx.dashboard.run_list import RunInfo
    from phalanx.evaluation.convert import Converted
    from phalanx.evaluation.generated_text import Generation
    from phalanx.evaluation.text_loss import Evaluation
    from phalanx.launch.sweep import MemberResult
    from phalanx.models.sampling import Sampling
    from phalanx.rehearsal.compiled_rehearsal import CompiledRehearsal
    from phalanx.rehearsal.result import Rehearsal
    from phalanx.training.rate_search import RateSearch
    from phalanx.training.trainer import Trainer
    from phalanx.tuning.tune import TuneSettings
    from phalanx.tuning.tuner import Trial, TuneResult
    from phalanx.verification.parity import Report
    from phalanx.xla.xla_trainer import XlaTrainer


class ResumeOptions(TypedDict, total=False):
    """How `train` treats a run that is in its directory."""

    fresh: bool
    """Start a new run even if an unfinished one could be resumed."""
    accept_changed_data: bool
    """Resume a run although its text has changed since it was saved."""
    change: bool
    """Resume a run with other values of the settings that `phalanx train --change` accepts."""


def plan(run: Run) -> Plan:
    """The best plan of the run on its [cluster], or on this machine if it names none."""
    from phalanx.planning.planner import choose  # imports numpy

    run = _checked(run)
    machine = None if planned(run) else this_machine()
    return choose(run, machine, size=measure(run, machine, trace=True))


def explain(run: Run) -> str:
    """The explanation of the plan, as `phalanx plan` prints it."""
    from io import StringIO

    from rich.console import Console

    from phalanx.dashboard.plan_text import show_plan
    from phalanx.planning.planner import plan
    from phalanx.planning.request import PlanRequest

    run = _checked(run)
    text, machine = StringIO(), None if planned(run) else this_machine()
    report = plan(PlanRequest(measured(run, machine), machine))
    show_plan(Console(file=text, width=100, highlight=False), report)
    return text.getvalue()


def train(
    run: Run,
    *,
    run_dir: str | Path | None = None,
    name: str = "run",
    on_event: Callable[[Event], None] | None = None,
    **options: Unpack[ResumeOptions],
) -> Job:
    """Starts the workers of the run on this machine; call `Job.wait()`, or iterate over `Job.events()`, until the end.

    `run_dir`: the directory of the run; without it, runs/`name`. `on_event` is called with every event that is read, such as
    `phalanx.events.records.Step`; it may call `Job.stop`. As on the command line, an unfinished run is resumed; `options` are those of `ResumeOptions`:
    `fresh`, `accept_changed_data` and `change`. The workers die with the calling thread.
    """
    directory = None if run_dir is None else Path(run_dir)
    return Job(prepare(_checked(run), name, Request(directory=directory, **options)), on_event=on_event)


def trainer(
    run: Run, *, checkpoints: str | Path = "checkpoints", on_event: Callable[[Event], None] | None = None
) -> Trainer | XlaTrainer:
    """A trainer in this process with its initial weights, ready to step: a single process, or one rank of torchrun. With `engine.name = "xla"`
    this process has all devices of the run, and must not have used JAX before if they are virtual ones of the CPU.

    `on_event` is called with every event of its steps, evaluations, saves and restorations.
    """
    from phalanx.parallel.mesh import connect
    from phalanx.planning.planner import plan_run
    from phalanx.spec.check_engine import missing_engine
    from phalanx.training.trainer import Trainer
    from phalanx.worker.xla_program import make_trainer

    run, place = _checked(run), torchrun_place() or Place()
    refuse([*vocabulary_question(run), *missing_engine(run)])
    on_xla = run.engine.name == "xla"  # one process then has all ranks
    planned_run = plan_run(run, this_machine(), None if on_xla else place.ranks, measure(run, trace=False))
    run, plan = planned_run.run, planned_run.plan
    if run.model.from_ is not None:
        model_folder(run.model.from_)  # downloads the weights of a hub name
    built: Trainer | XlaTrainer
    if on_xla:
        built = make_trainer(run, plan, Path(checkpoints))
    else:
        built = Trainer(run, plan, connect(place, plan.device, run.resilience.timeout, plan.layout), Path(checkpoints))
    built.build()
    built.load_initial_weights()
    built.on_event = on_event
    return built


def generate(
    checkpoint: str | Path,
    prompt: str = "",
    *,
    tokens: int = 200,
    sampling: Sampling | None = None,
    device: str | None = None,
) -> Generation:
    """Samples text from a checkpoint, the newest one of a run directory, or a Hugging Face folder.

    `tokens`: at most so many; `sampling`: `px.Sampling(temperature=…, top_k=…, top_p=…, seed=…)`, by default a temperature of 0.8.
    """
    from phalanx.evaluation.generated_text import sample_text
    from phalanx.evaluation.open_model import open_model
    from phalanx.models.sampling import Sampling

    if tokens < 1:
        raise RunError(f"generate: tokens = {tokens} must be at least 1.")
    return sample_text(open_model(checkpoint, device), prompt, tokens, sampling or Sampling(temperature=0.8))


def evaluate(
    checkpoint: str | Path,
    *,
    paths: Sequence[str | Path] = (),
    sequences: int | None = None,
    batch: int | None = None,
    device: str | None = None,
) -> Evaluation:
    """Loss and perplexity of a checkpoint, of the newest one of a run directory, or of a Hugging Face folder.

    On the held-out text of the run, by source, or on the text in `paths`. `sequences`: at most so many windows of each source.
    """
    from phalanx.evaluation.open_model import open_model
    from phalanx.evaluation.text_loss import TextOptions, text_loss

    named = {"paths": tuple(map(str, paths))} if paths else {}
    return text_loss(open_model(checkpoint, device), TextOptions(source=named, sequences=sequences, batch=batch))


def export(checkpoint: str | Path, folder: str | Path, *, dtype: str | None = None) -> Converted:
    """Writes a checkpoint, or the newest one of a run directory, as a new folder that transformers loads.

    `dtype`: "fp32", "bf16" or "fp16"; by default as stored.
    """
    from phalanx.evaluation.convert import TORCH, export_checkpoint

    if dtype is not None and dtype not in TORCH:
        raise RunError(f"export: dtype = {dtype}: choose {', '.join(TORCH)}.")
    return export_checkpoint(checkpoint, Path(folder), dtype)


def lr_find(
    run: Run, *, low: float = 1e-6, high: float = 1.0, steps: int = 100, on_step: Callable[[], None] = lambda: None
) -> RateSearch:
    """Searches a learning rate: takes steps in this process, on one device, with a rate that grows from `low` to `high`.

    Its `suggestion` is where the loss falls fastest. Nothing is saved. `on_step` is called after each step.
    """
    import tempfile

    from phalanx.spec.layout import Layout
    from phalanx.training.rate_search import growing_rates, search_rate

    if not (0 < low < high < float("inf")) or steps < 10:
        raise RunError(f"lr_find: low = {low:g}, high = {high:g}, steps = {steps}: needs 0 < low < high and at least 10 steps.")
    alone = replace(run.cluster, nodes=1, cpu_ranks=None, launcher="local")
    run = replace(run, layout=Layout(), cluster=alone, checkpoint=replace(run.checkpoint, save=False))
    run = replace(run, optimizer=replace(run.optimizer, sync_every=1))  # one device has no other to synchronize with
    with tempfile.TemporaryDirectory(prefix="phalanx-") as folder:
        built = trainer(run, checkpoints=Path(folder) / "checkpoints")
        try:
            return search_rate(built, growing_rates(low, high, steps), on_step)
        finally:
            built.close()


def runs(folder: str | Path = "runs", *, sort: str = "when") -> list[RunInfo]:
    """The runs in a folder and the folders below it, as `phalanx runs` lists them."""
    from phalanx.dashboard.run_list import list_runs

    return list_runs(Path(folder), sort)


def sweep(
    run: Run,
    grid: Mapping[str, Sequence[object]],
    *,
    folder: str | Path = "runs/sweep",
    parallel: int = 1,
    show: Callable[[str], None] = lambda line: None,
) -> list[MemberResult]:
    """Trains the run with each combination of values, such as `{"optimizer.learning_rate": [1e-4, 3e-4]}`; returns the results, best first.

    Every run is a process of its own, with a run directory in `folder` that its values name. A failed one does not end the others. The same
    call resumes runs that were stopped, and does not repeat finished ones. `parallel`: runs side by side, each with its part of this
    machine. `show` gets lines of text meanwhile.
    """
    from phalanx.launch.sweep import Sweep, members
    from phalanx.spec.dump import dump
    from phalanx.spec.errors import toml
    from phalanx.spec.load import loads

    text = dump(_checked(run))
    written = {key: [toml(value) for value in values] for key, values in grid.items()}
    found = members(written, Path(folder), lambda settings: loads(text, name="sweep", overrides=settings))
    return Sweep(found, parallel).results(show)


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


def rehearse(run: Run, plan: Plan | None = None, *, rank: int = 0, memory: int | None = None) -> Rehearsal | CompiledRehearsal:
    """Runs the program of one rank on fake tensors, without the other ranks: its memory, communication and compute, and errors. With
    `engine.name = "xla"` it compiles the step, which is the same on all devices, for virtual ones.

    `plan`: a plan of `plan(run)`, by default that of the run's cluster or of this machine; `memory`: bytes of a device, instead of
    its own.
    """
    from phalanx.planning.request import with_engine
    from phalanx.rehearsal.compiled_rehearsal import rehearse_compiled
    from phalanx.rehearsal.rehearse import rehearsal_job
    from phalanx.rehearsal.rehearse import rehearse as rehearsed

    run = with_engine(_checked(run))
    if plan is not None:
        run = replace(run, layout=plan.layout, train=replace(run.train, micro_batch=plan.micro_batch))
    machine = this_machine()
    job = rehearsal_job(run, machine, measure(run, machine, trace=True), memory)
    if run.engine.name == "xla":
        return rehearse_compiled(replace(job, plan=plan or job.plan))
    return rehearsed(job.run, plan or job.plan, rank, job.device)


def bench_step(run: Run, settings: ComparisonSettings | None = None) -> StepComparison:
    """Measures the training step of the run's model on one device, with both engines, next to transformers, torchtitan and loops in plain PyTorch and JAX.

    Every trainer is a process of its own with the same initial weights and tokens. `settings`: see
    `phalanx.comparison.compare_step.ComparisonSettings`.
    """
    from phalanx.comparison.compare_step import ComparisonSettings, compare

    return compare(_checked(run), this_machine(), settings or ComparisonSettings())


def tune(
    run: Run, settings: TuneSettings | None = None, *, on_trial: Callable[[Trial], None] = lambda trial: None
) -> TuneResult:
    """Searches settings that make the steps of the run faster on this machine and do not change what it computes.

    Its `keys` are the chosen ones, `apply(run)` is the run with them. Keys of the run that are not at their defaults keep their values, unless
    `settings` names them; see `phalanx.tuning.tune.TuneSettings`. `on_trial` is called with every finished trial.
    """
    from phalanx.tuning.tune import TuneSettings, Watcher, set_keys
    from phalanx.tuning.tune import tune as search

    result, _ = search(_checked(run), this_machine(), settings or TuneSettings(), set_keys(run), Watcher(on_trial=on_trial))
    return result


def init(answers: Answers, file: str | Path = "run.toml") -> Run:
    """Writes a new run file, as `phalanx init` does, and returns its run. RunError if the file exists or would be refused.

    `answers`: see `phalanx.Answers`.
    """
    file = Path(file)
    if file.exists():
        raise RunError(f"{file} exists: name another file, or remove it.")
    text = run_file(answers, str(file))
    run = loads(text, name=str(file))
    file.write_text(text, encoding="utf-8")
    return run


def _checked(run: Run) -> Run:
    """The resolved run. A run made in Python has not been checked by the loader, so it is checked here."""
    run = resolve(pin_run(run))
    if problems := check(run):
        raise RunError(problems)
    return run
