"""The program of one rank of the torch engine: connects to the others, trains and records events. When its generation is over, the process stays and
becomes a rank of the next one. Forked by `worker/fork_server`; under torchrun `TorchrunRank.train` is the whole program."""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch

from phalanx.checkpointing.replicas.memory_checkpoint import write_handoff
from phalanx.checkpointing.save import rank_file
from phalanx.checkpointing.state_tensor import written_boxes
from phalanx.control import protocol
from phalanx.data.dataset import Dataset
from phalanx.events.records import Event, Step, StepSkipped
from phalanx.events.rundir import RunDir
from phalanx.parallel.mesh import Mesh, abandoned, connect, disconnect
from phalanx.recovery.diagnose import HangReport
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.trainer import Trainer
from phalanx.worker.control_thread import ControlThread
from phalanx.worker.hang_report import hang_report
from phalanx.worker.rank_process import RankProcess, RankProgram, StopSignals, exit_code
from phalanx.worker.rank_requests import RankRequests

_KEPT_STEPS = 200
"""Step records that every rank keeps, to write them if rank 0 is lost."""


class TorchrunRank(RankProgram[Trainer]):
    """A rank that torchrun has started."""

    def train(self, plan: Plan, mesh: Mesh) -> int:
        """Train to the end without recovery; returns the exit code."""
        trainer = self._build(plan, mesh)
        last: Event | None = None
        for last in chain(trainer.restore(), trainer.events()):
            self._record(last, trainer)
        disconnect(mesh)
        return exit_code(self._run, last)

    def _make(self, plan: Plan, mesh: Mesh, data: Dataset) -> Trainer:
        return Trainer(self._run, plan, mesh, self._rundir.checkpoints, data)


class Rank(RankProcess[Trainer]):
    """A rank that the agent of its node has started."""

    def __init__(self, control: ControlThread, run: Run, rundir: RunDir, signals: StopSignals):
        super().__init__(control, run, rundir, signals)
        self._steps: deque[Step | StepSkipped] = deque(maxlen=_KEPT_STEPS)
        self._requests = RankRequests(rundir, self._record_now, control.report)
        control.on_observe = self._requests.ask
        control.start()

    def _make(self, plan: Plan, mesh: Mesh, data: Dataset) -> Trainer:
        return Trainer(self._run, plan, mesh, self._rundir.checkpoints, data, self._heartbeat)

    def _join(self, order: protocol.BeginRank) -> Mesh:
        plan = order.begin.plan
        return connect(order.place, plan.device, self._run.resilience.timeout, plan.layout)

    def _leave(self, mesh: Mesh) -> None:
        disconnect(mesh)

    def _on_event(self, event: Event, trainer: Trainer) -> None:
        self._requests.between_steps(trainer)
        if isinstance(event, Step | StepSkipped):
            self._steps.append(event)

    def _on_trained(self, trainer: Trainer) -> None:
        self._requests.finish(trainer)

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

    def _release(self) -> None:
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
