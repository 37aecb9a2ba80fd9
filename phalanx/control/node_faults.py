"""Injects the faults of `--chaos` that hit a node, a link, the disk, or stop a process from outside."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

from phalanx.control.election import NodeServices, tell_launcher
from phalanx.control.processes import Worker
from phalanx.control.protocol import NodeAway
from phalanx.events.fault_log import DISK, FaultClaims, fault_record, fill_disk
from phalanx.faults.grammar import Fault, is_node_fault, parse

_DEFAULT_SECONDS = 5.0  # duration of a full disk or broken link if the fault has none


class NodeFaults:
    """The faults that one agent injects."""

    def __init__(self, agent: NodeServices):
        self._agent = agent
        run_dir: Path = agent.rundir.path
        faults = parse(agent.chaos)
        self._claims = FaultClaims(run_dir)
        self._pending = {
            number: fault for number, fault in enumerate(faults) if is_node_fault(fault) and fault.kind != "miscompute"
        }
        self._miscomputes = [fault for fault in faults if fault.kind == "miscompute" and fault.node == agent.node]
        self._waker: subprocess.Popen[bytes] | None = None
        if any(fault.kind == "fill-disk" for fault in faults):
            DISK.watch(run_dir)

    def miscomputes(self) -> bool:
        """Whether this node's devices compute wrongly. The fault lasts, and is recorded whenever they are checked."""
        for fault in self._miscomputes:
            self._agent.emit(fault_record(fault, None))
        return bool(self._miscomputes)

    def on_begin(self, injected: list[int]) -> None:
        """These faults have happened: a host that shares no folder with the others learns it here, for its ranks, too."""
        for number in injected if not self._agent.sees_launch else ():
            self._claims.claim(number)
            self._pending.pop(number, None)

    def on_step(self, step: int) -> None:
        """Inject the faults that are due after this many complete steps."""
        for number, fault in list(self._pending.items()):
            if step + 1 < (fault.step or 1) or not self._is_here(fault):
                continue
            del self._pending[number]
            if self._claims.claim(number):
                self._agent.emit(fault_record(fault, step + 1))
                self._inject(fault)

    def _is_here(self, fault: Fault) -> bool:
        if fault.kind == "fill-disk":
            return True
        if fault.kind == "drop-link":
            return fault.link is not None and fault.link[0] == self._agent.node
        if fault.node is not None:
            return fault.node == self._agent.node
        return any(worker.rank == fault.rank for worker in self._living())

    def _living(self) -> list[Worker]:
        return [worker for worker in self._agent.workers.values() if not worker.gone.is_set()]

    def _inject(self, fault: Fault) -> None:
        if fault.kind == "fill-disk":
            fill_disk(self._agent.rundir.path, fault.seconds or _DEFAULT_SECONDS)
        elif fault.kind == "drop-link" and fault.link is not None:
            self._agent.unreachable[fault.link[1]] = time.monotonic() + (fault.seconds or _DEFAULT_SECONDS)
            self._agent.drop_link(fault.link[1])
        elif fault.kind == "kill":
            self._kill_node(fault.seconds)
        elif fault.node is not None:
            self._freeze_node(fault.seconds)
        else:
            for worker in self._living():
                if worker.rank == fault.rank:
                    worker.kill(signal.SIGSTOP)
                    if fault.seconds is not None:
                        asyncio.get_running_loop().call_later(fault.seconds, worker.kill, signal.SIGCONT)

    def _kill_node(self, seconds: float | None) -> None:
        """Kill every process of the node at once, like a power failure: no memory is given back."""
        tell_launcher(NodeAway(seconds=seconds))
        self._agent.flush()
        pids = [self._agent.replica_process.pid, self._agent.fork_client.pid, *(worker.pid for worker in self._living())]
        for pid in [*pids, os.getpid()]:
            os.kill(pid, signal.SIGKILL)

    def _freeze_node(self, seconds: float | None) -> None:
        pids = [*(worker.pid for worker in self._living()), self._agent.replica_process.pid, os.getpid()]
        if seconds is not None:  # woken by a process that is not frozen
            wake = " ".join(map(str, pids))
            self._waker = subprocess.Popen(
                ["sh", "-c", f"sleep {seconds}; kill -CONT {wake} 2>/dev/null"], start_new_session=True
            )
        self._agent.flush()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    def close(self) -> None:
        if self._waker is not None:
            self._waker.kill()
            self._waker.wait()
