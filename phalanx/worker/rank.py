"""The program of one rank: joins the others, trains, writes down what happens; when its generation is over, it stays and waits for
its place in the next. Run by the nursery; under torchrun, `train_rank` alone."""

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
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from phalanx.checkpointing.location import Location
from phalanx.checkpointing.replicas import replica_index
from phalanx.control.protocol import RESUMABLE, is_secondary_error
from phalanx.data.dataset import Dataset, open_dataset
from phalanx.events.fault_log import FaultClaims
from phalanx.events.heartbeat import Heartbeat
from phalanx.events.log import EventLog, recorded_steps
from phalanx.events.records import Event, Step, StepSkipped, Stopped, WorkerStarted
from phalanx.events.rundir import RunDir
from phalanx.faults.grammar import parse
from phalanx.parallel.mesh import Mesh, abandoned, connect, disconnect
from phalanx.spec.errors import PhalanxError
from phalanx.spec.load import load
from phalanx.spec.plan import Place, Plan
from phalanx.spec.run import Run
from phalanx.training.hooks.rank_faults import RankFaults
from phalanx.training.hooks.replica_check import Corruption
from phalanx.training.sinks import sinks
from phalanx.training.trainer import Trainer
from phalanx.worker.control_thread import ControlThread
from phalanx.worker.handoff import hand_off, roll_forward, survivor_state
from phalanx.worker.hang_report import hang_report, register_stack_dump

_UNINTERRUPTED = ("updating",)
"""Phases in which a state is being changed."""


_REMEMBERED = 200
"""Steps that every rank could tell of in place of the one that does."""


class StopSignals:
    """SIGTERM, SIGUSR1 and SIGINT from the moment this is made: kept until there is a trainer to stop, then passed on to it."""

    def __init__(self) -> None:
        self._received: str | None = None
        self._stop: Callable[[str], None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def pass_to(self, stop: Callable[[str], None] | None) -> None:
        """None: there is nothing to stop any more."""
        self._stop = stop
        if stop is not None and self._received is not None:
            stop(self._received)

    def stop(self, reason: str) -> None:
        """As if a signal had come."""
        self._received = reason
        if self._stop is not None:
            self._stop(reason)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.stop(signal.Signals(number).name)


def serve_rank(link: socket.socket, rundir: RunDir, signals: StopSignals) -> int:
    """A rank's whole life: one generation after the other, as the supervisor orders. Returns the exit code."""
    return _Rank(ControlThread(link), rundir, signals).serve()


class _Rank:
    def __init__(self, attendant: ControlThread, rundir: RunDir, signals: StopSignals):
        self._attendant, self._rundir, self._signals = attendant, rundir, signals
        self._run: Run = load(rundir.run_file)
        self._data: Dataset | None = None
        self._trainer: Trainer | None = None
        self._log = EventLog(rundir.events_file)
        self._sinks: list[Callable[[Event], None]] | None = None
        self._steps: deque[Step | StepSkipped] = deque(maxlen=_REMEMBERED)
        self._rank = 0
        attendant.on_stop = signals.stop
        attendant.on_pause = self._pause
        attendant.busy = lambda: self._trainer is not None and self._trainer.heartbeat.phase in _UNINTERRUPTED
        attendant.where = self._where
        self._main = threading.get_ident()
        self._pulse: Heartbeat | None = None
        attendant.start()

    def serve(self) -> int:
        while True:
            order = self._attendant.orders.get()
            if order is None:
                return 1
            what = order["order"]
            if what == "exit":
                return int(order["code"])
            try:
                if what == "begin":
                    code = self._generation(order)
                    if code is not None:
                        return code
                elif what == "halt":
                    self._stand(order["generation"])
                elif what == "hand over":
                    self._hand_over(order)
            except BaseException as error:
                self._fail(error)
                return 1

    def _generation(self, order: dict[str, Any]) -> int | None:
        """To its end, or until it is over; an exit code where there is nothing more to do."""
        attendant, generation = self._attendant, order["generation"]
        attendant.generation = generation
        if attendant.over:
            return None
        try:
            try:
                attendant.working = True
                self._clear()
                return self._work(order)
            finally:
                attendant.working = False  # from here on nobody interrupts
        except BaseException as error:
            if attendant.over:
                return None  # the order to halt is there already
            if isinstance(error, Corruption):
                found = {"ranks": list(error.guilty), "what": error.what, "agreed": error.last_agreed, "reason": str(error)}
                attendant.tell({"say": "corrupt", "generation": generation} | found)
                return None
            if not isinstance(error, RuntimeError | ConnectionError) or not is_secondary_error(str(error)):
                raise
            # Another was lost, or a connection: who, the supervisor knows, or will find out.
            attendant.tell({"say": "broken", "generation": generation, "reason": f"{type(error).__name__}: {error}"})
            return None

    def _work(self, order: dict[str, Any]) -> int | None:
        attendant = self._attendant
        plan = Plan.from_json(json.dumps(order["plan"]))
        place = Place(**order["place"] | {"store": tuple(order["place"]["store"])})
        self._rank = place.rank
        _redirect(self._rundir.rank_log(place.rank))
        torch.set_num_threads(plan.threads)
        if self._pulse is None:
            self._pulse = Heartbeat(Path(order["pulse"]))
            register_stack_dump(Path(order["pulse"]).with_suffix(".stack"))
        self._pulse.start(place.generation)
        mesh = connect(place, plan.device, self._run.resilience.timeout, plan.layout)
        trainer = self._prepared(plan, mesh, order["chaos"])
        listeners = self._listeners(mesh.rank)
        source = self._source(order["source"], mesh, place)
        for event in trainer.restore(source):
            for listener in listeners:
                listener(event)
        attendant.tell({"say": "restored", "generation": place.generation, "step": trainer.progress.step})
        last: Event | None = None
        first = True
        for last in trainer.train(save_only=order["save"]):
            for listener in listeners:
                listener(last)
            if isinstance(last, Step | StepSkipped):
                self._steps.append(last)
            if first and isinstance(last, Step | StepSkipped):
                attendant.tell({"say": "stepped", "generation": place.generation, "step": last.step})
                first = False
            if (account := trainer.take_measurement()) is not None:
                self._log.emit(account)
        if trainer.stop_signal.paused and not isinstance(last, Stopped):
            attendant.tell({"say": "paused", "generation": place.generation, "step": trainer.progress.step})
            return None
        trainer.close()
        self._trainer = None
        disconnect(mesh)
        code = RESUMABLE if isinstance(last, Stopped) else 0
        attendant.tell({"say": "ended", "generation": place.generation, "code": code})
        return code

    def _prepared(self, plan: Plan, mesh: Mesh, chaos: str) -> Trainer:
        name = f"{mesh.device.type}:{mesh.device.index}" if mesh.device.type == "cuda" else "cpu"
        self._log.emit(WorkerStarted(rank=mesh.rank, host=socket.gethostname(), pid=os.getpid(), device=name))
        self._data = self._data or open_dataset(self._run.data, self._run.train.sequence_length, self._run.train.seed)
        trainer = Trainer(self._run, plan, mesh, self._rundir.checkpoints, self._data, self._pulse)
        if chaos:
            done, place = FaultClaims(self._rundir.path), mesh.place
            trainer.hooks.add(RankFaults(parse(chaos), rank=place.rank, done=done, report=self._log.emit))
        self._trainer = trainer
        self._signals.pass_to(trainer.stop)
        trainer.build()
        self._log.emit(trainer.placement())
        return trainer

    def _listeners(self, rank: int) -> list[Callable[[Event], Any]]:
        if rank:
            return []
        if self._sinks is None:
            self._sinks = list(sinks(self._run, self._rundir.path))
        return [self._log.emit, *self._sinks]

    def _source(self, source: dict[str, Any], mesh: Mesh, place: Place) -> Location | None:
        """Where the state is: a copy in the memory of nodes, or None: the newest on disk."""
        if source["kind"] != "memory":
            assert self._trainer is not None
            return None if source["until"] is None else self._trainer.checkpointer.newest_until(source["until"], set())
        found = None
        if mesh.rank == 0:
            addresses = [(host, port) for host, port in source["holders"]]
            assert place.token is not None
            states = replica_index.complete_states(addresses, place.token)
            wanted = (source["generation"], source["step"], source["ranks"])
            chosen = next((one for one in states if (one.generation, one.step, one.ranks) == wanted), None)
            found = None if chosen is None else replica_index.MemoryLocation(chosen, place.token)
        location: Location | None = mesh.broadcast_object(found)
        if location is None:
            raise ConnectionError("Connection closed by peer: the copies in memory are gone")
        return location

    def _pause(self) -> None:
        if self._trainer is not None:
            self._trainer.pause()

    def _stand(self, generation: int) -> None:
        """The generation is over: say what this rank has. It stays in memory until the next begins."""
        found = survivor_state(self._trainer if generation == self._attendant.generation else None)
        self._attendant.tell({"say": "standing", "generation": generation} | asdict(found))

    def _hand_over(self, order: dict[str, Any]) -> None:
        trainer, covered, problem = self._trainer, False, None
        assert trainer is not None
        try:
            if trainer.progress.step < order["step"]:
                roll_forward(trainer, order["divisor"], order["bad"])
            covered = hand_off(trainer, order["contributors"])
        except (OSError, MemoryError) as error:  # there is no room: the next best thing is gone on from
            problem = str(error)
        if order["teller"] == trainer.mesh.rank:
            self._tell_steps(trainer)
        self._attendant.tell({"say": "handed", "generation": order["generation"], "covered": covered, "problem": problem})

    def _tell_steps(self, trainer: Trainer) -> None:
        """Whoever tells of steps may have been lost with some that it had not written yet. Every rank knows them all."""
        if trainer.last_record is not None and trainer.last_record not in self._steps:
            self._steps.append(trainer.last_record)
        told = recorded_steps(self._rundir.events_file)
        for event in self._steps:
            if event.step not in told and event.step <= trainer.progress.step:
                self._log.emit(event)

    def _clear(self) -> None:
        """Let go of the generation before: its memory, and its connections."""
        self._signals.pass_to(None)
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None
        # What interrupted it may have left a mode behind that a `with` was about to end.
        torch.set_grad_enabled(True)
        with abandoned():
            gc.collect()

    def _where(self) -> dict[str, Any]:
        trainer = self._trainer
        if trainer is None or not trainer.is_built:
            return dict(hang_report(self._main, {}, None))
        modules = {id(module): name for part in trainer.sharded.parts for name, module in part.named_modules() if name}
        return dict(hang_report(self._main, modules, trainer.mesh))

    def _fail(self, error: BaseException) -> None:
        """Say what went wrong where the supervisor looks for it."""
        report = failure(error)
        # Written to a file of its own and renamed, so that it is read whole or not at all.
        partial = self._rundir.rank_error_file(self._rank).with_suffix(".partial")
        try:
            partial.write_text(json.dumps(report))
            os.replace(partial, self._rundir.rank_error_file(self._rank))
        except OSError:
            pass  # a full disk: the supervisor is told all the same
        self._attendant.tell({"say": "failed", "generation": self._attendant.generation} | report)


def failure(error: BaseException) -> dict[str, Any]:
    """An error as it is written down."""
    expected = isinstance(error, PhalanxError)
    reason = str(error) if expected else f"{type(error).__name__}: {error}"
    if isinstance(error, torch.OutOfMemoryError):
        reason += "\nA smaller train.micro_batch needs less memory; the batch stays the same through accumulation."
    words = "" if expected else "".join(traceback.format_exception(error))
    return {"time": time.time(), "reason": reason, "traceback": words, "expected": expected}


def train_rank(
    run: Run, plan: Plan, mesh: Mesh, rundir: RunDir, signals: StopSignals, also: Callable[[Event], None] | None = None
) -> int:
    """Train this rank's part to the end, with nobody to recover it; `also` is told what rank 0 writes into the event log."""
    log = EventLog(rundir.events_file)
    name = f"{mesh.device.type}:{mesh.device.index}" if mesh.device.type == "cuda" else "cpu"
    log.emit(WorkerStarted(rank=mesh.rank, host=socket.gethostname(), pid=os.getpid(), device=name))
    data = open_dataset(run.data, run.train.sequence_length, run.train.seed)
    trainer = Trainer(run, plan, mesh, rundir.checkpoints, data)
    signals.pass_to(trainer.stop)
    trainer.build()
    log.emit(trainer.placement())
    listeners = [log.emit, *sinks(run, rundir.path), *([also] if also else [])] if mesh.rank == 0 else []
    for event in trainer.restore():
        for listener in listeners:
            listener(event)
    last: Event | None = None
    for last in trainer.events():
        for listener in listeners:
            listener(last)
        if (account := trainer.take_measurement()) is not None:
            log.emit(account)
    disconnect(mesh)
    log.close()
    return RESUMABLE if isinstance(last, Stopped) else 0


def _redirect(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
