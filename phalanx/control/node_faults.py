"""Strikes those faults of `--chaos` that take a node, a link, the disk, or stop a process from outside. Part of a node's supervisor;
without faults it is not made."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from typing import TYPE_CHECKING

from phalanx.events.fault_log import DISK, FaultClaims, fault_record, fill_disk
from phalanx.faults.grammar import Fault, is_node_fault, parse

if TYPE_CHECKING:
    from phalanx.control.agent import Agent
    from phalanx.control.processes import Worker

_FULL = 5.0  # seconds that a full disk lasts where nothing is said


class NodeFaults:
    """The faults of one node."""

    def __init__(self, agent: Agent):
        self._agent = agent
        every = parse(agent.chaos)
        self._struck = FaultClaims(agent.rundir.path)
        self._mine = {number: fault for number, fault in enumerate(every) if is_node_fault(fault)}
        self._waker: subprocess.Popen[bytes] | None = None
        self.apart: dict[int, float] = {}
        """Nodes that this one does not reach, and until when."""
        if any(fault.kind == "fill-disk" for fault in every):
            DISK.watch(agent.rundir.path)

    def reached(self, node: int) -> bool:
        """Whether nothing keeps this node from that one."""
        return time.monotonic() >= self.apart.get(node, 0.0)

    def look(self, step: int) -> None:
        """So many steps are complete."""
        for number, fault in list(self._mine.items()):
            if step + 1 < (fault.step or 1):
                continue
            if not self._is_mine(fault):
                continue
            del self._mine[number]
            if self._struck.claim(number):
                self._agent.emit(fault_record(fault, step + 1))
                self._strike(fault)

    def _is_mine(self, fault: Fault) -> bool:
        if fault.kind == "fill-disk":
            return True
        if fault.kind == "drop-link":
            return fault.link is not None and fault.link[0] == self._agent.node
        if fault.node is not None:
            return fault.node == self._agent.node
        return any(worker.rank == fault.rank and not worker.gone.is_set() for worker in self._agent.workers.values())

    def _strike(self, fault: Fault) -> None:
        agent = self._agent
        if fault.kind == "fill-disk":
            fill_disk(agent.rundir.path, fault.seconds or _FULL)
        elif fault.kind == "drop-link" and fault.link is not None:
            self.apart[fault.link[1]] = time.monotonic() + (fault.seconds or _FULL)
            agent.part_from(fault.link[1])
        elif fault.kind == "kill":
            self._end_node(fault.seconds)
        elif fault.node is not None:
            self._freeze_node(fault.seconds)
        else:
            self._freeze_rank([worker for worker in agent.workers.values() if worker.rank == fault.rank], fault.seconds)

    def _end_node(self, seconds: float | None) -> None:
        """As when the power goes: everything of the node at once, nothing given back."""
        agent = self._agent
        print(json.dumps({"away": seconds}), flush=True)
        others = [worker.pid for worker in agent.workers.values() if not worker.gone.is_set()]
        for pid in [agent.keeper.pid, agent.nursery.pid, *others, os.getpid()]:
            if pid is not None:
                os.kill(pid, signal.SIGKILL)

    def _freeze_rank(self, workers: list[Worker], seconds: float | None) -> None:
        for worker in workers:
            worker.kill(signal.SIGSTOP)
            if seconds is not None:
                asyncio.get_running_loop().call_later(seconds, worker.kill, signal.SIGCONT)

    def _freeze_node(self, seconds: float | None) -> None:
        agent = self._agent
        workers = [worker.pid for worker in agent.workers.values() if not worker.gone.is_set()]
        pids = [*workers, agent.keeper.pid, os.getpid()]
        if seconds is not None:  # by somebody who is not frozen
            wake = " ".join(map(str, pids))
            self._waker = subprocess.Popen(
                ["sh", "-c", f"sleep {seconds}; kill -CONT {wake} 2>/dev/null"], start_new_session=True
            )
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)

    def close(self) -> None:
        if self._waker is not None:
            self._waker.kill()
            self._waker.wait()
