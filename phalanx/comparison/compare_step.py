"""Measures the training step of Phalanx next to that of its peers, on one device and one shape: `phalanx bench step`.

Each trainer is a process of its own, so that memory is its own. The processes stay alive and take turns, so that a device that slows down
slows all of them; where they do not fit in memory together, every turn is a fresh process.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Literal, TypeVar

from phalanx.comparison.comparison_report import COMPARED_STEPS, TOLERANCES, StepComparison, TrainerResult
from phalanx.comparison.step_messages import (
    PHALANX,
    PHALANX_XLA,
    Built,
    Failed,
    Message,
    TakeSteps,
    TrainerJob,
    Turn,
    decode,
    encode,
)
from phalanx.data.dataset import open_dataset
from phalanx.host.env import worker_env
from phalanx.host.process_tree import end_session, python_command, silent_end
from phalanx.launch.model_check import measure
from phalanx.planning.machine_fit import PlannedRun
from phalanx.planning.planner import plan_run
from phalanx.planning.request import PlanRequest
from phalanx.spec.check import check
from phalanx.spec.dump import dump
from phalanx.spec.engine import Engine
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine, Plan, Size
from phalanx.spec.run import Checkpoint, Cluster, Run, Watch
from phalanx.spec.sources import kind

TRAINERS = (PHALANX, PHALANX_XLA, "transformers", "torchtitan", "torchtitan-fsdp", "hand", "jax")
"""All trainers, in the order of the table."""
_PACKAGES = {
    PHALANX_XLA: (("jax", "torchax"), 'pip install "phalanx[xla]"'),
    "transformers": (("transformers",), 'pip install "phalanx[hf]"'),
    "torchtitan": (("torchtitan",), "pip install torchtitan"),
    "torchtitan-fsdp": (("torchtitan",), "pip install torchtitan"),
    "jax": (("jax",), "pip install jax"),
}
"""The packages that a trainer needs, and how to install them."""
_ROOM = 0.9
"""Part of the memory that all trainers together may fill, by the plan's promise for Phalanx, to stay alive at the same time."""
T = TypeVar("T", bound=Message)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparisonSettings:
    """How to measure."""

    trainers: tuple[str, ...] = TRAINERS
    micro_batch: int | None = None
    """Sequences of a step. Default: the run's `train.micro_batch`, or the plan's."""
    steps: int = 20
    """Measured steps of each trainer."""
    warmup: int = 5
    """Steps before them, in which code is compiled and Phalanx accounts a step."""
    rounds: int = 4
    """Turns of each trainer."""
    compile: bool | None = None
    """Default: Phalanx as the run says, peers on GPUs. XLA compiles in any case."""

    def problems(self) -> list[str]:
        """What is wrong with the settings, in sentences."""
        unknown = [name for name in self.trainers if name not in TRAINERS]
        found = [f"--peers {name} is not known: choose from {', '.join(TRAINERS)}." for name in unknown]
        if not self.trainers:
            found.append(f"--peers names no trainer: choose from {', '.join(TRAINERS)}.")
        least = {"--micro-batch": (self.micro_batch, 1), "--steps": (self.steps, 1), "--warmup": (self.warmup, 1)}
        for option, (value, limit) in (least | {"--rounds": (self.rounds, 1)}).items():
            if value is not None and value < limit:
                found.append(f"{option} {value} must be at least {limit}.")
        if self.rounds > self.steps:
            found.append(f"--rounds {self.rounds} is more than --steps {self.steps}: every round takes at least one step.")
        return found


def compare(
    run: Run, machine: Machine, settings: ComparisonSettings, on_status: Callable[[str], None] = lambda status: None
) -> StepComparison:
    """Runs every trainer and compares them. `on_status` receives what is going on. RunError before anything starts."""
    refuse(settings.problems())
    given, planned = run, bench_run(run, machine, settings)
    run, plan = planned.run, planned.plan
    open_dataset(run.data, run.train.sequence_length, run.train.seed)  # its problems are reported here, not by every process
    entries = {name: _Entry(name, _absent(name), planned) for name in TRAINERS if name in settings.trainers}
    if PHALANX_XLA in entries:
        _plan_for_xla(entries[PHALANX_XLA], given, machine, replace(settings, micro_batch=plan.micro_batch))
    with TemporaryDirectory() as folder:
        contest = _Contest(plan, settings, Path(folder), entries, on_status)
        together = planned.need * len(contest.running()) <= _ROOM * _capacity(machine, plan)
        fresh = not (together and contest.in_turns())
        if fresh:
            contest.one_by_one()
    spec, length = run.model, run.train.sequence_length
    return StepComparison(
        model=_model_name(run),
        parameters=plan.parameters,
        active=plan.active or plan.parameters,
        has_experts=spec.moe is not None,
        micro_batch=plan.micro_batch,
        sequence=length,
        device=machine.gpus[0].name
        if plan.device == "cuda"
        else f"{plan.threads} thread{'s' if plan.threads > 1 else ''} of {machine.cpu}",
        text=f"{kind(run.data) if not run.data.mix else 'a mixture'}, tokenizer {run.data.tokenizer}",
        masked=run.data.document_mask,
        fresh=fresh,
        rounds=settings.rounds,
        warmup=settings.warmup,
        flops=plan.flops_per_token,
        causal_flops=spec.flops_per_token(length, causal=True) if spec.is_builtin else None,
        peaks=_peaks(run, plan, machine),
        load=os.getloadavg()[0],
        results=tuple(entry.result() for entry in entries.values()),
    )


def _plan_for_xla(entry: _Entry, run: Run, machine: Machine, settings: ComparisonSettings) -> None:
    """The XLA engine has a plan of its own, for the same micro-batch. What it does not compute is its reason not to run."""
    compiling = replace(run.memory, compile=None, cuda_graphs=None)  # keys of the torch engine
    try:
        entry.planned = bench_run(replace(run, memory=compiling), machine, replace(settings, compile=None), "xla")
    except RunError as refused:
        entry.reason = entry.reason or refused.problems[0]


def bench_run(
    run: Run, machine: Machine, settings: ComparisonSettings, engine: Literal["torch", "xla"] = "torch"
) -> PlannedRun:
    """The run as one rank of this machine trains it, without whatever happens between steps. RunError names what peers cannot do."""
    problems = []
    if run.command.program is not None:
        problems.append("[command] names a program of its own, whose step cannot be measured: give a run file with [model].")
    if run.optimizer.name != "adamw":
        problems.append(
            f'optimizer.name = "{run.optimizer.name}": all trainers are compared with AdamW; set optimizer.name = "adamw".'
        )
    if run.precision.compute not in (None, *TOLERANCES):
        problems.append(
            f'precision.compute = "{run.precision.compute}": peers do not scale their loss; set precision.compute = "bf16".'
        )
    refuse(problems)
    given = settings.micro_batch or run.train.micro_batch
    total = settings.warmup + settings.steps + 1  # one more, so that the last step is like the others
    train = replace(
        run.train, batch_tokens=None, tokens=None, steps=total, eval_every=None, sample_every=None, sample_prompts=()
    )
    compiled = run.memory.compile if settings.compile is None else settings.compile
    one = replace(
        run,
        model=replace(run.model, from_=None),  # all start from the weights that follow from the seed
        train=replace(train, batch=given or run.batch, micro_batch=given),
        optimizer=replace(run.optimizer, sync_every=1),
        memory=replace(run.memory, compile=compiled),
        layout=Layout(data=1),
        engine=Engine(name=engine),
        cluster=Cluster(device=run.cluster.device, threads=run.cluster.threads),
        checkpoint=Checkpoint(),
        watch=Watch(),
    )
    refuse(check(one))
    size = measure(one)
    chosen = plan_run(one, machine, 1, size).plan.micro_batch
    return plan_run(replace(one, train=replace(one.train, batch=chosen, micro_batch=chosen)), machine, 1, size)


def _model_name(run: Run) -> str:
    spec = run.model
    shape = f"{spec.dim} × {spec.layers} layers"
    return spec.module or (spec.custom_key if spec.config else None) or (f"{spec.preset}, {shape}" if spec.preset else shape)


def _absent(name: str) -> str | None:
    """Why a peer cannot run here, if its package is not installed."""
    packages, install = _PACKAGES.get(name, (("phalanx",), ""))
    return f"not installed: {install}" if any(find_spec(package) is None for package in packages) else None


def _capacity(machine: Machine, plan: Plan) -> int:
    return machine.memory if plan.device == "cpu" else min(gpu.memory for gpu in machine.gpus)


def _peaks(run: Run, plan: Plan, machine: Machine) -> dict[str, float]:
    """Peak FLOP/s of one device by number format."""
    size = Size(parameters=plan.parameters, active=plan.active or plan.parameters, flops_per_token=plan.flops_per_token)
    peaks = {}
    for compute in ("fp32", "bf16", "fp8"):
        request = PlanRequest(replace(run, precision=replace(run.precision, compute=compute)), machine, 1, size)
        if (peak := request.plan(plan.layout, 1).peak_flops) is not None:
            peaks[compute] = peak
    return peaks


@dataclass
class _Entry:
    """A trainer and what is known of its steps."""

    name: str
    reason: str | None
    planned: PlannedRun
    """The run, and how this trainer takes its steps."""
    built: Built | None = None
    first_step: float | None = None
    """Of its first process."""
    turns: list[Turn] = field(default_factory=list)
    """Without warm-up."""
    losses: tuple[float, ...] = ()

    def forget(self) -> None:
        """Drops what was measured while others were alive. The first step stays: later ones find programs compiled."""
        self.built, self.turns, self.losses = None, [], ()

    def result(self) -> TrainerResult:
        if self.reason is not None or self.built is None or not self.turns:
            return TrainerResult(name=self.name, reason=self.reason or "took no step")
        reserved = [turn.reserved for turn in self.turns if turn.reserved is not None]
        return TrainerResult(
            name=self.name,
            version=self.built.version,
            settings=self.built.settings,
            compute=self.built.compute,
            token_losses=self.built.token_losses,
            first_step=self.first_step or 0.0,
            seconds=tuple(second for turn in self.turns for second in turn.seconds),
            cpu_seconds=tuple(second for turn in self.turns for second in turn.cpu_seconds),
            losses=self.losses[:COMPARED_STEPS],
            memory=max(turn.memory for turn in self.turns),
            reserved=max(reserved, default=None),
        )


class _TrainerFailed(Exception):
    def __init__(self, failed: Failed):
        super().__init__(failed.reason)
        self.failed = failed


class _Crowded(Exception):
    """The trainers do not fit in memory together."""


class _Process:
    """The process of a trainer."""

    def __init__(self, job: TrainerJob, env: Mapping[str, str], log: Path):
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                python_command("phalanx.comparison.trainer_process"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=env,
                start_new_session=True,  # Ctrl-C is for the parent, which ends its processes
            )
        self._log = log
        self._send(job)

    def _send(self, message: Message) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # the missing answer says why
            self._process.stdin.write(encode(message))
            self._process.stdin.flush()

    def receive(self, expected: type[T]) -> T:
        """The next message. Raises `_TrainerFailed`."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        message = decode(line) if line.endswith("\n") else Failed(reason=silent_end(self._process, self._log))
        if isinstance(message, Failed):
            raise _TrainerFailed(message)
        assert isinstance(message, expected), message
        return message

    def take(self, steps: int) -> Turn:
        self._send(TakeSteps(steps=steps))
        return self.receive(Turn)

    def close(self) -> None:
        end_session(self._process)


class _Contest:
    """Starts trainers and lets them take turns."""

    def __init__(
        self,
        plan: Plan,
        settings: ComparisonSettings,
        folder: Path,
        entries: dict[str, _Entry],
        on_status: Callable[[str], None],
    ):
        self._plan, self._settings, self._folder = plan, settings, folder
        self._entries, self._status = entries, on_status
        self._alive: dict[str, _Process] = {}

    def running(self) -> list[_Entry]:
        return [entry for entry in self._entries.values() if entry.reason is None]

    def in_turns(self) -> bool:
        """Measures with all processes alive. False, and nothing is kept, if they do not fit in memory together."""
        try:
            with self._processes():
                for entry in self.running():
                    with self._failing(entry):
                        self._start(entry)
                for number, steps in enumerate(self._shares(), start=1):
                    for entry in self._order(number):
                        with self._failing(entry):
                            self._take(entry, number, steps)
            return True
        except _Crowded:
            for entry in self.running():
                entry.forget()
            return False

    def one_by_one(self) -> None:
        """Measures with a fresh process for each turn."""
        for number, steps in enumerate(self._shares(), start=1):
            for entry in self._order(number):
                with self._processes(), self._failing(entry):
                    self._start(entry)
                    self._take(entry, number, steps)

    def _shares(self) -> list[int]:
        """Steps of each round."""
        steps, rounds = self._settings.steps, self._settings.rounds
        return [steps * (place + 1) // rounds - steps * place // rounds for place in range(rounds)]

    def _order(self, number: int) -> Iterable[_Entry]:
        """Every other round is reversed, so that a steady drift affects all alike."""
        entries = self.running()
        return entries if number % 2 else entries[::-1]

    def _start(self, entry: _Entry) -> None:
        """Starts a process, waits for its trainer and warms it up."""
        self._status(f"{entry.name}: building")
        peers_compile = self._plan.device == "cuda" if self._settings.compile is None else self._settings.compile
        run, plan = entry.planned.run, entry.planned.plan
        job = TrainerJob(
            trainer=entry.name,
            run=dump(run),
            plan=plan.to_json(),
            compile=bool(run.memory.compile) if entry.name == PHALANX else peers_compile,
            folder=mkdtemp(dir=self._folder),
            parent=os.getpid(),
        )
        process = _Process(job, worker_env(self._plan), self._folder / f"{entry.name}.log")
        self._alive[entry.name] = process
        entry.built = process.receive(Built)
        self._status(f"{entry.name}: warming up")
        turn = process.take(self._settings.warmup)
        entry.first_step = entry.first_step or turn.seconds[0]
        if turn.retries and len(self._alive) > 1:
            raise _Crowded
        entry.losses = entry.losses or turn.losses

    def _take(self, entry: _Entry, number: int, steps: int) -> None:
        self._status(f"{entry.name}: round {number} of {self._settings.rounds}")
        turn = self._alive[entry.name].take(steps)
        entry.turns.append(turn)
        if number == 1:  # after a short warm-up, its losses are among the first
            entry.losses += turn.losses

    @contextlib.contextmanager
    def _failing(self, entry: _Entry) -> Iterator[None]:
        """A failure of one trainer is its result; the others go on."""
        try:
            yield
        except _TrainerFailed as error:
            if error.failed.out_of_memory and len(self._alive) > 1:
                raise _Crowded from None
            entry.reason = error.failed.reason
            self._alive.pop(entry.name).close()

    @contextlib.contextmanager
    def _processes(self) -> Iterator[None]:
        """Ends all processes at its end."""
        try:
            yield
        finally:
            while self._alive:
                self._alive.popitem()[1].close()
