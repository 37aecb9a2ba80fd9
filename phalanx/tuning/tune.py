"""The one entry of tuning: searches maths-preserving settings of a run that make its steps faster on this machine. Called by `px.tune` and
`phalanx tune`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from phalanx.data.dataset import open_dataset
from phalanx.host.machine_profile import write_profile
from phalanx.launch.model_check import check_weights, measure
from phalanx.planning.feedback import Measured, learned
from phalanx.planning.machine_fit import need_and_promise
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.keys import KEYS as RUN_KEYS
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine
from phalanx.spec.run import Run
from phalanx.tuning.duel import Bench, TrialFailed
from phalanx.tuning.trial_bench import ProcessBench
from phalanx.tuning.trial_run import Planner, Side, trial_run
from phalanx.tuning.tunable_keys import DIMENSIONS, fixed_keys
from phalanx.tuning.tuner import Trial, TuneJob, Tuner, TuneResult
from phalanx.verification.tolerance import TOLERANCES

_BUSY = 0.5
"""Load per core before the first trial from which on the plan does not learn from the times."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TuneSettings:
    """How to search."""

    minutes: float = 10.0
    """Maximum time of all trials."""
    ranks: int | None = None
    """Ranks of a trial. Default: those that `phalanx train` starts here."""
    vary: tuple[str, ...] = ()
    """Keys to vary although the run sets them."""
    only: tuple[str, ...] = ()
    """Vary these keys alone, even those that the run sets. Default: all."""
    learn: bool | None = None
    """Whether plans on this machine learn from the times. Default: if nothing else used it before the first trial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Watcher:
    """Receives what happens meanwhile."""

    on_status: Callable[[str], None] = lambda status: None
    on_trial: Callable[[Trial], None] = lambda trial: None


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned:
    """What the plan has learned, or why nothing."""

    reason: str | None = None
    """Why nothing; None: it has."""
    file: str | None = None
    measured: float | None = None
    """Seconds of a step of the result."""
    before: float | None = None
    after: float | None = None
    """What plans promise of it."""


def set_keys(run: Run) -> frozenset[str]:
    """The keys of a run made in Python whose values are not the defaults."""
    return frozenset(path for path, key in RUN_KEYS.items() if "*" not in path and key.of(run) not in (None, key.default))


def tune(
    run: Run,
    machine: Machine,
    settings: TuneSettings,
    given: frozenset[str],
    watcher: Watcher,
    bench: Bench | None = None,
) -> tuple[TuneResult, Learned]:
    """Searches, and has plans learn from it. `given`: the keys that the user has set, which keep their values. RunError before anything
    starts, RunFailed if the run does not train as it is."""
    load = os.getloadavg()[0] / machine.cores
    fixed = fixed_keys(given, frozenset((*settings.vary, *settings.only)))
    job = tune_job(run, machine, settings, fixed)
    one = job.defaults.run
    open_dataset(one.data, one.train.sequence_length, one.train.seed)  # its problems are reported here, not by every process
    check_weights(one)
    with TemporaryDirectory(prefix="phalanx-tune-") as folder:
        tuner = Tuner(
            job, bench or ProcessBench(Path(folder)), time.monotonic, on_status=watcher.on_status, on_trial=watcher.on_trial
        )
        try:
            result = tuner.run()
        except TrialFailed as failed:
            raise RunFailed(f"The run does not train as it is: {failed.reason}.") from None
    return result, _learn(result, machine, settings, load)


def tune_job(run: Run, machine: Machine, settings: TuneSettings, fixed: frozenset[str]) -> TuneJob:
    """What the search starts from."""
    defaults, planner = plan_defaults(run, machine, settings)
    if settings.ranks is not None:
        fixed |= {"cluster.cpu_ranks"}
    return TuneJob(
        defaults=defaults,
        dimensions=[dimension for dimension in DIMENSIONS if not settings.only or dimension.key in settings.only],
        fixed=fixed,
        machine=planner.machine,
        planner=planner,
        budget=60 * settings.minutes,
        tolerance=loss_tolerance(defaults),
    )


def plan_defaults(run: Run, machine: Machine, settings: TuneSettings) -> tuple[Side, Planner]:
    """The run as it is on this machine, and what plans changes of it. RunError where it cannot train here."""
    one, part = trial_run(run, machine, settings.ranks)
    planner = Planner(part, measure(one, part))
    try:
        return planner.defaults(one), planner
    except RunError as error:
        if settings.ranks is not None or one.layout == Layout():
            raise
        ranks = len(machine.gpus) if machine.gpus and one.cluster.device != "cpu" else machine.cores
        raise RunError(
            [*error.problems, f"To tune the run with the ranks that this machine has, give --ranks {ranks}."]
        ) from None


def loss_tolerance(side: Side) -> float:
    """Largest relative difference of a loss that rounding explains, as `phalanx verify` has it."""
    precision, numbers = side.run.precision, str(side.plan.compute)
    if numbers == "fp32" and "bf16" in (precision.reduce, precision.optimizer):
        numbers = "bf16"
    return TOLERANCES["experts" if side.run.model.moe is not None and numbers != "fp32" else numbers].loss


def _learn(result: TuneResult, machine: Machine, settings: TuneSettings, load: float) -> Learned:
    """Fits the constants of plans to the measured steps and stores them in the machine's profile."""
    if settings.learn is False:
        return Learned(reason="--no-learn")
    if settings.ranks is not None and machine.gpus:
        return Learned(reason="trials had fewer GPUs than the machine")
    if not result.steps:
        return Learned(reason="nothing was measured")
    if settings.learn is None and load > _BUSY:
        return Learned(
            reason=f"other programs used the machine, with a load of {load:.1f} per core; --learn learns nevertheless"
        )
    of_defaults = [step for step in result.steps if step.run == result.defaults.run]
    steps = of_defaults + [step for step in result.steps if step not in of_defaults]
    constants = learned(steps, machine)
    if not constants:
        return Learned(reason="the plan does not know what the model computes")
    best = next((step for step in steps if step.run == result.best.run), steps[0])
    taught = replace(machine, measured=tuple((dict(machine.measured) | constants).items()))
    path = write_profile(machine, constants)
    return Learned(file=str(path), measured=best.seconds, before=_promised(best, machine), after=_promised(best, taught))


def _promised(step: Measured, machine: Machine) -> float | None:
    _, promise = need_and_promise(step.run, machine, step.plan)
    return None if promise is None else promise.seconds


def typical_seconds(result: TuneResult, setting: str) -> float | None:
    """The median time of a step of a setting in the last duel that it was part of."""
    rows = [row for row in result.measurements if row.setting == setting]
    last = [row.seconds for row in rows if (row.trial, row.stage) == (rows[-1].trial, rows[-1].stage)]
    return median(last) if last else None
