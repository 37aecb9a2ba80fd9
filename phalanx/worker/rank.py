"""The program of one rank: connects to the others, trains and records events. When its generation is over, the process stays and becomes a
rank of the next one. Forked by `worker/fork_server`; under torchrun `RankProgram.train` is the whole program."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from types import FrameType

import torch

from phalanx.checkpointing.directory import list_checkpoints
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.replicas import replica_index
from phalanx.checkpointing.replicas.memory_checkpoint import write_handoff
from phalanx.checkpointing.save import rank_file
from phalanx.checkpointing.state_tensor import written_boxes
from phalanx.control import protocol
from phalanx.data.dataset import Dataset, open_dataset
from phalanx.data.ingest import Progress
from phalanx.events.fault_log import FaultClaims
from phalanx.events.heartbeat import Heartbeat
from phalanx.events.records import Event, Step, StepSkipped, Stopped, Warned, WorkerStarted, encode
from phalanx.events.rundir import RunDir, replace_file
from phalanx.faults.grammar import parse
from phalanx.host.process_tree import stop_signals
from phalanx.parallel.mesh import Mesh, abandoned, connect, disconnect
from phalanx.recovery.diagnose import HangReport
from phalanx.recovery.state import is_secondary_error
from phalanx.spec.errors import PhalanxError, RunError, toml
from phalanx.spec.hub import HubError, model_folder
from phalanx.spec.pinned_names import pin_run
from phalanx.spec.plan import Place, Plan
from phalanx.spec.run import Run
from phalanx.training.hooks.rank_faults import RankFaults
from phalanx.training.hooks.replica_check import Corruption
from phalanx.training.trainer import Trainer
from phalanx.worker import compute_check
from phalanx.worker.control_thread import ControlThread
from phalanx.worker.hang_report import hang_report, register_stack_dump
from phalanx.worker.rank_requests import RankRequests

_KEPT_STEPS = 200
"""Step records that every rank keeps, to write them if rank 0 is lost."""


class StopSignals:
    """Receives SIGTERM, SIGUSR1, SIGINT and SIGHUP from its creation on, and passes them to the trainer once there is one."""

    def __init__(self) -> None:
        self._received: str | None = None
        self._stop: Callable[[str], None] | None = None
        for number in stop_signals():
            signal.signal(number, self._on_signal)

    def pass_to(self, stop: Callable[[str], None] | None) -> None:
        """Call `stop` for every request, including one received before. None: there is nothing to stop."""
        self._stop = stop
        if stop is not None and self._received is not None:
            stop(self._received)

    def stop(self, reason: str) -> None:
        """Request a stop, like a signal."""
        self._received = reason
        if self._stop is not None:
            self._stop(reason)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop(signal.Signals(number).name)


class RankProgram:
    """Builds the trainer of one rank and records what happens."""

    def __init__(
        self,
        run: Run,
        rundir: RunDir,
        signals: StopSignals,
        emit: Callable[[Event], object],
        also: Callable[[Event], None] | None = None,
    ):
        """`emit` records an event. `also` receives the events that rank 0 records."""
        self._run, self._rundir, self._signals, self._emit, self._also = run, rundir, signals, emit, also
        self._data: Dataset | None = None
        self._trainer: Trainer | None = None
        self._heartbeat: Heartbeat | None = None

    def train(self, plan: Plan, mesh: Mesh) -> int:
        """Train to the end without recovery, under torchrun; returns the exit code."""
        trainer = self._build(plan, mesh)
        last: Event | None = None
        for last in chain(trainer.restore(), trainer.events()):
            self._record(last, trainer)
        disconnect(mesh)
        return exit_code(self._run, last)

    def _build(self, plan: Plan, mesh: Mesh, chaos: str = "") -> Trainer:
        device = str(mesh.device) if mesh.device.index is not None else mesh.device.type
        self._emit(WorkerStarted(rank=mesh.rank, host=socket.gethostname(), pid=os.getpid(), device=device))
        self._data = self._data or open_dataset(self._run.data, self._run.train.sequence_length, self._run.train.seed)
        trainer = Trainer(self._run, plan, mesh, self._rundir.checkpoints, self._data, self._heartbeat)
        if chaos:
            done = FaultClaims(self._rundir.path)
            trainer.hooks.add(RankFaults(parse(chaos), rank=mesh.rank, done=done, report=self._emit))
        self._trainer = trainer
        self._signals.pass_to(trainer.stop)
        trainer.build()
        self._emit(trainer.state.placement())
        return trainer

    def _record(self, event: Event, trainer: Trainer) -> None:
        """Rank 0 writes the event to the log; every rank logs what it has measured."""
        if trainer.mesh.rank == 0:
            self._emit(event)
            if self._also is not None:
                self._also(event)
        if (measured := trainer.hooks.take_measurement()) is not None:
            self._emit(measured)


class Rank(RankProgram):
    """A process that is a rank of one generation after the other, as the agent orders."""

    def __init__(self, control: ControlThread, run: Run, rundir: RunDir, signals: StopSignals):
        super().__init__(run, rundir, signals, self._record_now)
        self._control = control
        self._steps: deque[Step | StepSkipped] = deque(maxlen=_KEPT_STEPS)
        self._rank = 0
        self._main_thread = threading.get_ident()
        self._requests = RankRequests(rundir, self._record_now, control.report)
        control.on_observe = self._requests.ask
        control.on_stop = signals.stop
        control.on_pause = lambda: self._trainer.pause() if self._trainer is not None else None
        # The state must not be left in the middle of a change.
        control.uninterruptible = lambda: self._trainer is not None and self._trainer.heartbeat.phase == "updating"
        control.locate = self._locate
        control.start()

    def serve(self) -> int:
        """Returns the exit code."""
        while True:
            order = self._control.orders.get()
            try:
                match order:
                    case None:
                        return 1  # the agent is gone
                    case protocol.BeginRank():
                        code = self._run_generation(order)
                        if code is not None:
                            return code
                    case protocol.Compute():
                        for result in compute_check.results(order):
                            self._control.report(protocol.Computed(result=result))
                    case protocol.PrepareData():
                        self._prepare_data(order)
                    case protocol.Halt():
                        self._report_state(order.generation)
                    case protocol.HandOff():
                        self._hand_off(order)
            except BaseException as error:
                self._fail(error)
                return 1

    def _prepare_data(self, order: protocol.PrepareData) -> None:
        told, host = False, socket.gethostname()

        def tell(progress: Progress) -> None:
            nonlocal told
            if not told:
                told, cache = True, self._run.data.cache
                self._emit(
                    Warned(
                        message=f"{host} tokenizes {progress.name}, because data.cache = {toml(cache)} has no token files of it "
                        "there. To tokenize once for all hosts, put data.cache on storage that they share."
                    )
                )

        try:
            self._fetch_hub_files()
            data = open_dataset(self._run.data, self._run.train.sequence_length, self._run.train.seed, tell)
            differs = order.fingerprint and data.fingerprint != order.fingerprint
            why = "it differs from the data on the host that started the run: copy that here, or remove the host."
            problem = f"{host}: {why}" if differs else ""
        except RunError as error:
            problem = f"{host}: {' '.join(error.problems)}"
        self._control.report(protocol.DataPrepared(problem=problem))

    def _fetch_hub_files(self) -> None:
        """Have the files of the run's hub names in the cache of this host, once for all its ranks. Raises RunError."""
        run = pin_run(self._run)
        if run.model.from_ is None or list_checkpoints(self._rundir.checkpoints):
            return  # a resumed run has its weights in its checkpoint
        try:
            model_folder(run.model.from_)
        except HubError as error:
            raise RunError(f"model.from = {toml(run.model.from_)}: {error}") from None

    def _run_generation(self, order: protocol.BeginRank) -> int | None:
        """Train until the run or the generation ends; returns an exit code if the run has ended."""
        control = self._control
        generation = order.begin.generation
        try:
            try:
                if not control.begin(generation):
                    return None
                self._release()
                return self._train(order)
            finally:
                control.working = False  # not interrupted from here on
                control.wait_until_cut()
        except BaseException as error:
            if control.over:
                return None  # the order to halt is in the queue
            if isinstance(error, Corruption):
                control.report(
                    protocol.ReplicasDiffer(
                        generation=generation,
                        culprits=list(error.verdict.guilty),
                        what=error.verdict.what,
                        last_valid=error.last_valid,
                        reason=str(error),
                    )
                )
                return None
            if not isinstance(error, RuntimeError | ConnectionError) or not is_secondary_error(str(error)):
                raise
            # A rank or a connection was lost; the controller knows which, or will find out.
            control.report(protocol.ConnectionLost(generation=generation, reason=f"{type(error).__name__}: {error}"))
            return None

    def _train(self, order: protocol.BeginRank) -> int | None:
        control, generation = self._control, order.begin.generation
        plan, place = order.begin.plan, order.place
        self._rank = place.rank
        _redirect_output(self._rundir.rank_log(place.rank))
        torch.set_num_threads(plan.threads)
        if self._heartbeat is None:
            self._heartbeat = Heartbeat(Path(order.heartbeat))
            register_stack_dump(Path(order.heartbeat).with_suffix(".stack"))
        self._heartbeat.start(generation)
        mesh = connect(place, plan.device, self._run.resilience.timeout, plan.layout)
        trainer = self._build(plan, mesh, order.chaos)
        if (valid := order.begin.source.newest_step) is not None:
            trainer.checkpointer.remove_after(valid)
        for event in trainer.restore(self._location(order.begin.source, mesh, place)):
            self._record(event, trainer)
        control.report(protocol.RankRestored(generation=generation, step=trainer.progress.step))
        last: Event | None = None
        first = True
        for last in trainer.train(save_only=order.begin.save_only):
            self._record(last, trainer)
            self._requests.between_steps(trainer)
            if isinstance(last, Step | StepSkipped):
                self._steps.append(last)
                if first:
                    control.report(protocol.FirstStepDone(generation=generation))
                first = False
        self._requests.finish(trainer)
        if trainer.stop_signal.paused and not isinstance(last, Stopped):
            control.report(protocol.RankPaused(generation=generation))
            return None
        trainer.close()
        self._trainer = None
        disconnect(mesh)
        code = exit_code(self._run, last)
        control.report(protocol.RankEnded(generation=generation, code=code))
        return code

    def _location(self, source: protocol.StateSource, mesh: Mesh, place: Place) -> Location | None:
        """Where to restore from; None: the newest checkpoint on disk."""
        if not source.in_memory:
            return None
        memory = None
        if mesh.rank == 0:
            assert place.token is not None
            states = replica_index.complete_states([(host, port) for host, port in source.servers], place.token)
            wanted = (source.generation, source.step, source.ranks)
            state = next((state for state in states if (state.generation, state.step, state.ranks) == wanted), None)
            memory = None if state is None else replica_index.MemoryLocation(state, place.token)
        location: Location | None = mesh.broadcast_object(memory)
        if location is None:
            raise ConnectionError("Connection closed by peer: the copies in memory are gone")
        return location

    def _report_state(self, generation: int) -> None:
        """The state stays in memory until the next generation begins, and no longer: no local of `serve` may refer to the trainer."""
        trainer = self._trainer if generation == self._control.generation else None
        self._control.report(survivor_state(trainer, generation))

    def _hand_off(self, order: protocol.HandOff) -> None:
        trainer, covered = self._trainer, False
        assert trainer is not None
        try:
            newest = order.newest
            assert newest.step is not None
            if trainer.progress.step < newest.step:
                assert newest.divisor is not None and newest.bad is not None
                roll_forward(trainer, newest.divisor, newest.bad)
            covered = hand_off(trainer, order.contributors)
        except (OSError, MemoryError) as error:  # not enough memory: the controller falls back to an older state
            print(f"The state is not handed off: {error}", flush=True)
        if order.newest.rank == trainer.mesh.rank:
            self._write_missing_steps(trainer)
        self._control.report(protocol.HandedOff(generation=order.generation, covered=covered))

    def _write_missing_steps(self, trainer: Trainer) -> None:
        """Send step records that may have been lost with rank 0. Every rank has them."""
        if trainer.last_record is not None and trainer.last_record not in self._steps:
            self._steps.append(trainer.last_record)
        for event in self._steps:
            if event.step <= trainer.progress.step:
                self._record_now(event, if_new=True)

    def _record_now(self, event: Event, *, if_new: bool = False) -> None:
        """Send a record to the agent, which passes it to the controller."""
        line = encode(replace(event, time=time.time()))
        self._control.report(protocol.Record(line=line, generation=self._control.generation, if_new=if_new))

    def _release(self) -> None:
        """Free the memory and connections of the previous generation."""
        self._signals.pass_to(None)
        self._requests.abandon()
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
        # The interruption may have skipped the end of a `with torch.no_grad()`.
        torch.set_grad_enabled(True)
        with abandoned():
            gc.collect()

    def _locate(self) -> HangReport:
        trainer = self._trainer
        if trainer is None or not trainer.is_built:
            return hang_report(self._main_thread, {}, None)
        modules = {id(module): name for part in trainer.sharded.parts for name, module in part.named_modules() if name}
        return hang_report(self._main_thread, modules, trainer.mesh)

    def _fail(self, error: BaseException) -> None:
        """Report why this rank fails, to the agent and in a file."""
        failure = rank_failure(error)
        with suppress(OSError):  # the disk is full; the agent gets the report all the same
            replace_file(self._rundir.rank_error_file(self._rank), json.dumps(asdict(failure)))
        self._control.report(protocol.RankFailed(generation=self._control.generation, failure=failure))


def rank_failure(error: BaseException) -> protocol.RankFailure:
    """An error as a report."""
    expected = isinstance(error, PhalanxError)
    reason = str(error) if expected else f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        reason += "\nA smaller train.micro_batch needs less memory; the batch stays the same through accumulation."
    trace = "" if expected else "".join(traceback.format_exception(error))
    return protocol.RankFailure(reason=reason, traceback=trace, expected=expected)


def exit_code(run: Run, last: Event | None) -> int:
    """Of a process whose run ended with this event."""
    return protocol.stop_code(run) if isinstance(last, Stopped) else 0


def _redirect_output(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)


# The state that a rank still holds when its generation is over. Nothing here waits for another rank.


def survivor_state(trainer: Trainer | None, generation: int = -1) -> protocol.SurvivorReport:
    """Which state the trainer holds, wherever it was interrupted: none while it is built or in the middle of an update."""
    if trainer is None or not trainer.ready or trainer.stepper.update_incomplete:
        return protocol.SurvivorReport(generation=generation, step=None)
    applied, divisor, bad = trainer.stepper.applied, None, None
    if applied is not None and applied.divisor is not None and applied.verdict is not None:
        divisor, bad = float(applied.divisor), float(applied.verdict)
    return protocol.SurvivorReport(
        generation=generation,
        step=trainer.progress.step,
        prepared=trainer.stepper.pending is not None,
        divisor=divisor,
        bad=bad,
        rewinds=len(trainer.progress.left_out),
    )


def roll_forward(trainer: Trainer, divisor: float, bad: float) -> None:
    """Apply the step that other ranks have applied and this rank had prepared."""
    trainer.stepper.roll_forward(trainer.optimizer, divisor, bad)
    trainer.progress.advance(trainer.run.batch, int(bad), trainer.stepper.scale)


def hand_off(trainer: Trainer, contributors: list[int]) -> bool:
    """Write this rank's share of the state into host memory. `contributors` are the ranks that hold the state.

    Returns False, and writes nothing, if the contributors lack tensors of this rank's pipeline rank.
    """
    mesh = trainer.mesh
    mesh.mark_lost(set(range(mesh.ranks)).difference(contributors))
    tensors = trainer.tensors()
    if not all(mesh.covers(*replicas.key) for replicas in {tensor.replicas for tensor in tensors.values()}):
        return False
    assert mesh.place.replica_folder is not None
    boxes, folder = written_boxes(tensors), Path(mesh.place.replica_folder)
    file = replace(rank_file(mesh, tensors, boxes), rank=contributors.index(mesh.rank), ranks=len(contributors))
    metadata = trainer.checkpointer.metadata(trainer.progress)
    write_handoff(folder, mesh.place.generation, file, boxes, trainer.progress.step, metadata)
    return True
