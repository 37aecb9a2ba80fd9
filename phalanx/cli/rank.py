"""The program of one rank: joins the others, trains, writes down what happens. Run by the worker command and under torchrun."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from types import FrameType

import torch

from phalanx.data.dataset import open_dataset
from phalanx.events.log import EventLog
from phalanx.events.records import Event, Stopped, WorkerStarted
from phalanx.events.rundir import RunDir
from phalanx.launch.local import RESUMABLE
from phalanx.parallel.mesh import Mesh, connect, disconnect
from phalanx.spec.errors import PhalanxError
from phalanx.spec.load import load
from phalanx.spec.place import Place
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.sinks import sinks
from phalanx.training.trainer import Trainer


class Signals:
    """SIGTERM and SIGINT from the moment this is made: kept until there is a trainer to stop, then passed on to it."""

    def __init__(self) -> None:
        self._received: str | None = None
        self._stop: Callable[[str], None] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._receive)

    def pass_to(self, stop: Callable[[str], None]) -> None:
        self._stop = stop
        if self._received is not None:
            stop(self._received)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self._received = signal.Signals(number).name
        if self._stop is not None:
            self._stop(self._received)


def guarded(place: Place, rundir: RunDir, signals: Signals) -> int:
    """`work`, with whatever goes wrong written where the launcher looks for it; returns the exit code."""
    try:
        run, plan = load(rundir.run_file), Plan.from_json(rundir.plan_file.read_text())
        torch.set_num_threads(plan.threads)
        mesh = connect(place, plan.device, run.resilience.timeout, plan.layout)
        return work(run, plan, mesh, rundir, signals)
    except BaseException as error:
        # Written to a file of its own and renamed, so that the launcher reads it whole or not at all.
        expected = isinstance(error, PhalanxError)
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        if isinstance(error, torch.OutOfMemoryError):
            reason += "\nA smaller train.micro_batch needs less memory; the batch stays the same through accumulation."
        report = {
            "time": time.time(),
            "reason": reason,
            "traceback": "" if expected else traceback.format_exc(),
        }
        partial = rundir.error_of(place.rank).with_suffix(".partial")
        partial.write_text(json.dumps(report))
        os.replace(partial, rundir.error_of(place.rank))
        return 1


def work(
    run: Run, plan: Plan, mesh: Mesh, rundir: RunDir, signals: Signals, also: Callable[[Event], None] | None = None
) -> int:
    """Train this rank's part to the end; `also` is told what rank 0 writes into the event log."""
    log = EventLog(rundir.events_file)
    name = f"{mesh.device.type}:{mesh.device.index}" if mesh.device.type == "cuda" else "cpu"
    log.emit(WorkerStarted(rank=mesh.rank, host=socket.gethostname(), pid=os.getpid(), device=name))
    data = open_dataset(run.data, run.train.sequence_length, run.train.seed)
    trainer = Trainer(run, plan, mesh, rundir.checkpoints, data)
    signals.pass_to(trainer.stop)
    trainer.build()
    log.emit(trainer.placement())
    listeners = [log.emit, *sinks(run, rundir.path), *([also] if also else [])] if mesh.rank == 0 else []

    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    for event in trainer.restore():
        tell(event)
    last: Event | None = None
    for last in trainer.events():
        tell(last)
        if (account := trainer.account()) is not None:
            log.emit(account)
    disconnect(mesh)
    log.close()
    return RESUMABLE if isinstance(last, Stopped) else 0
