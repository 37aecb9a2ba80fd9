"""The program of a run with `engine.name = "xla"`: one process for all devices, which the command itself becomes. Nothing supervises it: after a stop or a crash
the same command resumes from the newest checkpoint."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from phalanx.events.records import Event, WorkerStarted
from phalanx.events.rundir import RunDir
from phalanx.host.env import use_virtual_devices
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.worker.rank import StopSignals, exit_code

if TYPE_CHECKING:
    from phalanx.xla.xla_trainer import XlaTrainer

_CACHE = "compiled"
"""Folder in `data.cache` with compiled programs: neither a resumed run nor another one compiles them again."""


def check_installed() -> None:
    """Raises RunError if this machine has no JAX."""
    missing = [name for name in ("jax", "torchax") if find_spec(name) is None]
    if missing:
        raise RunError(f'engine.name = "xla" needs {" and ".join(missing)}: install them with `pip install "phalanx[xla]"`.')


def make_trainer(run: Run, plan: Plan, checkpoints: Path) -> XlaTrainer:
    """A trainer in this process, which has all devices of the run and has not used JAX before. Nothing is built yet."""
    if plan.device == "cpu":
        use_virtual_devices(plan.ranks)
    from phalanx.xla.compiled import use_cache
    from phalanx.xla.xla_trainer import XlaTrainer

    torch.set_num_threads(plan.threads)
    use_cache(Path(run.data.cache).expanduser() / _CACHE)
    return XlaTrainer(run, plan, checkpoints)


def train(run: Run, plan: Plan, rundir: RunDir, emit: Callable[[Event], object]) -> int:
    """Trains to the end, or until a signal asks to stop; returns the exit code. `emit` records an event."""
    signals = StopSignals()
    emit(WorkerStarted(rank=0, host=socket.gethostname(), pid=os.getpid(), device=plan.device))
    trainer = make_trainer(run, plan, rundir.checkpoints)
    signals.pass_to(trainer.stop)
    trainer.build()
    emit(trainer.placement())
    last: Event | None = None
    for last in chain(trainer.restore(), trainer.events()):
        emit(last)
    return exit_code(run, last)
