"""A node's part of the check before the first generation: what its host is, what its devices compute, and how fast its links are. Carries out
the orders of `control/preflight`. And its part of the data: token files that its host does not have."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from phalanx.control import protocol
from phalanx.control.election import NodeServices
from phalanx.control.processes import OnReport, Worker
from phalanx.host.host_check import DeviceResult
from phalanx.host.host_report import HostQuestion, HostReport, digest_of, report
from phalanx.host.link_probe import LinkServer, measure_link

COMPUTE_SECONDS = 60.0  # in which a device must have computed: a GPU that was asleep, or loads its kernels from a slow disk


class NodeCheck:
    """The checks of one node."""

    def __init__(self, agent: NodeServices, slots: int, bind: str, fork: Callable[[int, OnReport], Awaitable[Worker]]):
        """`fork`: starts a worker on a slot."""
        self._agent, self._slots, self._bind, self._fork = agent, slots, bind, fork
        self._report: asyncio.Task[HostReport] | None = None
        self._link_server: LinkServer | None = None

    def prepare(self) -> None:
        """Collect now what takes time, such as the answer of GPU drivers."""
        question = HostQuestion(run_dir=str(self._agent.rundir.path.absolute()), launch="")
        self._report = asyncio.create_task(asyncio.to_thread(report, question))

    async def check(self, order: protocol.CheckHost, wrong: bool) -> None:
        """Report what the host is, and then what its devices compute. `wrong`: an injected fault makes the result wrong."""
        assert self._report is not None, "a run on several nodes prepares"
        rundir = self._agent.rundir
        known, files = await self._report, digest_of([rundir.run_file, rundir.plan_file])
        self.close()
        self._link_server = LinkServer(self._bind, self._agent.token, self._agent.run.cluster.port_range)
        checked = replace(known, files=files, clock=time.time())
        self._agent.report(protocol.HostChecked(report=checked, link_server=list(self._link_server.address)))
        if order.compute:
            await asyncio.gather(*(self._compute(slot, order, wrong) for slot in range(self._slots)))

    async def _compute(self, slot: int, order: protocol.CheckHost, wrong: bool) -> None:
        # The first process of a node with GPUs checks the CPU, too.
        devices = [order.device, *(["cpu"] if slot == 0 and order.device != "cpu" else [])]
        results: list[DeviceResult] = []
        complete = asyncio.Event()

        def on_report(worker: Worker, message: object) -> None:
            if isinstance(message, protocol.Computed):
                results.append(message.result)
                if len(results) == len(devices):
                    complete.set()

        worker = await self._fork(slot, on_report)
        worker.send(protocol.Compute(slot=slot, devices=devices, compute=order.compute, wrong=wrong))
        await _first_of(complete, worker.gone, timeout=COMPUTE_SECONDS)
        ended = "its process has ended" if worker.gone.is_set() else f"no result within {COMPUTE_SECONDS:.0f} s"
        worker.kill()
        missing = [
            DeviceResult(name="CPU" if kind == "cpu" else f"GPU {slot}", problem=ended) for kind in devices[len(results) :]
        ]
        for result in [*results, *missing]:
            self._agent.report(protocol.Computed(result=result))

    async def prepare_data(self, fingerprint: str) -> str:
        """Have a worker open the run's data, and compare it; returns what is wrong with it. Takes as long as it must: there may be terabytes to tokenize."""
        answered = asyncio.Event()
        problem = "the process that opened the run's data has ended; its log has the reason"

        def on_report(worker: Worker, message: object) -> None:
            nonlocal problem
            if isinstance(message, protocol.Record):
                self._agent.records.add(message)
            elif isinstance(message, protocol.DataPrepared):
                problem = message.problem
                answered.set()

        worker = await self._fork(0, on_report)
        worker.send(protocol.PrepareData(fingerprint=fingerprint))
        await _first_of(answered, worker.gone)
        worker.kill()
        return problem

    async def measure(self, order: protocol.MeasureLinks) -> None:
        """Measure the link to this node's peer of the round, if this node is the first of a pair."""
        for node, peer in order.pairs:
            if node != self._agent.node:
                continue
            host, port = order.addresses[str(peer)]
            try:
                speed = await asyncio.to_thread(measure_link, (host, port), self._agent.token, order.seconds)
                self._agent.report(protocol.LinkMeasured(peer=peer, speed=speed))
            except OSError as error:
                self._agent.report(protocol.LinkMeasured(peer=peer, speed=None, problem=str(error) or type(error).__name__))

    def close(self) -> None:
        """Stop listening."""
        if self._link_server is not None:
            with contextlib.suppress(OSError):
                self._link_server.close()
            self._link_server = None


async def _first_of(*events: asyncio.Event, timeout: float | None = None) -> None:
    """Waits until one of the events is set, or the time is over."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
