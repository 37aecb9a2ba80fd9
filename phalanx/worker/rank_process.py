"""The program of one rank of either engine: receives orders, trains in one generation after the other, and records events. `worker/rank` adds what the
torch engine's ranks do, `worker/xla_rank` what the XLA engine's processes do."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType
from typing import Generic, TypeVar

import torch

from phalanx.checkpointing.directory import list_checkpoints
from phalanx.checkpointing.replicas import replica_index
from phalanx.checkpointing.replicas.replica_index import MemoryLocation
from phalanx.control import protocol
from phalanx.data.dataset import Dataset, open_dataset
from phalanx.data.ingest import Progress
from phalanx.events.fault_log import FaultClaims
from phalanx.events.heartbeat import Heartbeat
from phalanx.events.records import Event, Step, StepSkipped, Stopped, Warned, WorkerStarted, encode
from phalanx.events.rundir import RunDir, replace_file
from phalanx.faults.grammar import parse
from phalanx.host.process_tree import stop_signals
from phalanx.parallel.mesh import Mesh
from phalanx.recovery.diagnose import HangReport
from phalanx.recovery.state import is_secondary_error
from phalanx.spec.errors import PhalanxError, RunError, toml
from phalanx.spec.hub import HubError, model_folder
from phalanx.spec.pinned_names import pin_run
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.hooks import StepHook
from phalanx.training.hooks.rank_faults import RankFaults
from phalanx.training.hooks.replica_check import Corruption
from phalanx.training.run_loop import RunLoop
from phalanx.worker import compute_check
from phalanx.worker.control_thread import ControlThread
from phalanx.worker.hang_report import register_stack_dump

T = TypeVar("T", bound=RunLoop)


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


class RankProgram(ABC, Generic[T]):
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
        self._trainer: T | None = None
        self._heartbeat: Heartbeat | None = None

    @abstractmethod
    def _make(self, plan: Plan, mesh: Mesh, data: Dataset) -> T:
        """The trainer of this rank, which is not built yet."""

    def _build(self, plan: Plan, mesh: Mesh, chaos: str = "") -> T:
        device = str(mesh.device) if mesh.device.index is not None else mesh.device.type
        self._emit(WorkerStarted(rank=mesh.rank, host=socket.gethostname(), pid=os.getpid(), device=device))
        self._data = self._data or open_dataset(self._run.data, self._run.train.sequence_length, self._run.train.seed)
        trainer = self._make(plan, mesh, self._data)
        if chaos:
            trainer.hooks.add(self._faults(chaos, mesh.rank))
        self._trainer = trainer
        self._signals.pass_to(trainer.stop)
        trainer.build()
        self._emit(trainer.placement())
        return trainer

    def _faults(self, chaos: str, rank: int) -> StepHook:
        return RankFaults(parse(chaos), rank=rank, done=FaultClaims(self._rundir.path), report=self._emit)

    def _record(self, event: Event, trainer: T) -> None:
        """Rank 0 writes the event to the log; every rank logs what it has measured."""
        if trainer.mesh.rank == 0:
            self._emit(event)
            if self._also is not None:
                self._also(event)
        if (measured := trainer.hooks.take_measurement()) is not None:
            self._emit(measured)


class RankProcess(RankProgram[T]):
    """A process that is a rank of one generation after the other, as the agent orders."""

    def __init__(self, control: ControlThread, run: Run, rundir: RunDir, signals: StopSignals):
        super().__init__(run, rundir, signals, self._record_now)
        self._control = control
        self._rank = 0
        self._main_thread = threading.get_ident()
        control.on_stop = signals.stop
        control.on_pause = lambda: self._trainer.pause() if self._trainer is not None else None
        # The state must not be left in the middle of a change.
        control.uninterruptible = lambda: self._trainer is not None and self._trainer.heartbeat.phase == "updating"
        control.locate = self._locate

    # What an engine does.

    @abstractmethod
    def _join(self, order: protocol.BeginRank) -> Mesh:
        """Meets the other ranks of a generation."""

    @abstractmethod
    def _leave(self, mesh: Mesh) -> None:
        """Leaves them in order, when all are done."""

    @abstractmethod
    def _report_state(self, generation: int) -> None:
        """The generation is over: reports what state this rank holds."""

    @abstractmethod
    def _hand_off(self, order: protocol.HandOff) -> None:
        """Copies this rank's state into host memory."""

    @abstractmethod
    def _release(self) -> None:
        """Frees the memory and connections of the previous generation."""

    @abstractmethod
    def _locate(self) -> HangReport:
        """What the main thread does."""

    def _on_event(self, event: Event, trainer: T) -> None:
        """An event of the training was recorded."""

    def _on_trained(self, trainer: T) -> None:
        """The training of this generation has ended."""

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
        mesh = self._join(order)
        trainer = self._build(plan, mesh, order.chaos)
        if (valid := order.begin.source.newest_step) is not None:
            trainer.checkpointer.remove_after(valid)
        memory = self._location(order.begin.source, trainer)
        for event in trainer.restore(memory):
            self._record(event, trainer)
        restored = protocol.RankRestored(generation=generation, step=trainer.progress.step, from_memory=memory is not None)
        control.report(restored)
        last: Event | None = None
        first = True
        for last in trainer.train(save_only=order.begin.save_only):
            self._record(last, trainer)
            self._on_event(last, trainer)
            if first and isinstance(last, Step | StepSkipped):
                control.report(protocol.FirstStepDone(generation=generation))
                first = False
        self._on_trained(trainer)
        if trainer.stop_signal.paused and not isinstance(last, Stopped):
            control.report(protocol.RankPaused(generation=generation))
            return None
        trainer.close()
        self._trainer = None
        self._leave(mesh)
        code = exit_code(self._run, last)
        control.report(protocol.RankEnded(generation=generation, code=code))
        return code

    def _location(self, source: protocol.StateSource, trainer: T) -> MemoryLocation | None:
        """The state in memory to restore; None: the newest checkpoint on disk is."""
        if not source.in_memory:
            return None
        memory, mesh, place = None, trainer.mesh, trainer.mesh.place
        if mesh.rank == 0:
            assert place.token is not None
            states = replica_index.complete_states([(host, port) for host, port in source.servers], place.token)
            wanted = (source.generation, source.step, source.ranks)
            state = next((state for state in states if (state.generation, state.step, state.ranks) == wanted), None)
            memory = None if state is None else MemoryLocation(state, place.token)
        location: MemoryLocation | None = mesh.broadcast_object(memory)
        if location is None:
            raise ConnectionError("Connection closed by peer: the copies in memory are gone")
        return location

    def _record_now(self, event: Event, *, if_new: bool = False) -> None:
        """Send a record to the agent, which passes it to the controller."""
        line = encode(replace(event, time=time.time()))
        self._control.report(protocol.Record(line=line, generation=self._control.generation, if_new=if_new))

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
