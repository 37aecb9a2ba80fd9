"""A process of the XLA engine: joins the others as one system of JAX, trains on its devices, and is replaced when its generation is over. Forked by
`worker/fork_server`.

JAX cannot leave a system that has lost a process, nor can a compiled program be interrupted. So no process outlives its generation: it freezes at
the order to halt, and the agent kills it and starts new ones. They restore the newest state, from the copies in memory that outlive their processes or from
a checkpoint, and find their programs compiled.
"""

from __future__ import annotations

import os
import signal

from phalanx.checkpointing.replicas.replica_index import MemoryLocation
from phalanx.control import protocol
from phalanx.control.run_requests import Observe, Observed
from phalanx.data.dataset import Dataset
from phalanx.events.fault_log import FaultClaims
from phalanx.events.rundir import RunDir
from phalanx.faults.grammar import parse
from phalanx.host.env import leave_gpu_memory
from phalanx.parallel.mesh import Mesh, connect, disconnect
from phalanx.recovery.diagnose import PROGRAM, HangReport
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.hooks import StepHook
from phalanx.training.hooks.rank_faults import ProgramFaults
from phalanx.worker.control_thread import ControlThread
from phalanx.worker.hang_report import hang_report
from phalanx.worker.rank_process import RankProcess, StopSignals
from phalanx.xla.compiled import use_cache
from phalanx.xla.join_processes import join, leave
from phalanx.xla.xla_trainer import XlaTrainer


class XlaRank(RankProcess[XlaTrainer]):
    """A process with some of the run's devices, which is a rank of the control plane."""

    def __init__(self, control: ControlThread, run: Run, rundir: RunDir, signals: StopSignals):
        super().__init__(control, run, rundir, signals)
        control.on_observe = self._decline
        control.on_halt = self._freeze
        control.start()

    def _make(self, plan: Plan, mesh: Mesh, data: Dataset) -> XlaTrainer:
        return XlaTrainer(self._run, plan, self._rundir.checkpoints, data, self._heartbeat, processes=mesh)

    def _faults(self, chaos: str, rank: int) -> StepHook:
        return ProgramFaults(parse(chaos), rank=rank, done=FaultClaims(self._rundir.path), report=self._emit)

    def _join(self, order: protocol.BeginRank) -> Mesh:
        """Over gloo for what the hosts agree on; the devices meet through JAX."""
        leave_gpu_memory()  # plans fill more than JAX would take
        use_cache(self._run)
        mesh = connect(order.place, "cpu", self._run.resilience.timeout, Layout(data=order.place.ranks))
        join(mesh, order.begin.plan)
        return mesh

    def _leave(self, mesh: Mesh) -> None:
        leave(mesh)
        disconnect(mesh)

    def _on_trained(self, trainer: XlaTrainer) -> None:
        """The next generation has other processes."""
        if trainer.stop_signal.paused and self._run.checkpoint.save:
            trainer.save()
        elif trainer.stop_signal.paused:
            trainer.checkpointer.settle()

    def _location(self, source: protocol.StateSource, trainer: XlaTrainer) -> MemoryLocation | None:
        """Copies may be rarer than checkpoints, and a run that pauses saves one."""
        memory = super()._location(source, trainer)
        return None if memory is None or trainer.checkpointer.has_newer(memory) else memory

    def _freeze(self, generation: int) -> None:
        """In the control thread, at the order to halt: what the main thread does, nobody may see any more."""
        self._report_state(generation)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _report_state(self, generation: int) -> None:
        self._control.report(protocol.SurvivorReport(generation=generation, step=None))

    def _decline(self, order: Observe) -> None:
        problem = f'engine.name = "xla" has no {order.request.kind}: use the profiler of JAX'
        self._control.report(Observed(generation=order.generation, request=order.request.id, problem=problem))

    def _hand_off(self, order: protocol.HandOff) -> None:
        """Nobody asks a process that has reported no state."""

    def _release(self) -> None:
        """Nothing: a process has one generation."""

    def _locate(self) -> HangReport:
        report = hang_report(self._main_thread, {}, None)
        if self._trainer is not None and self._trainer.in_program:
            report |= {"operation": PROGRAM, "group": None, "place": f"waiting in {PROGRAM}"}
        return report
