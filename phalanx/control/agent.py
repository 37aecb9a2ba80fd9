"""The agent of one node: supervises its workers, its fork server and its in-memory replicas. One agent is also the controller.

    python -m phalanx.control.agent       reads its settings as one line of JSON from standard input

The agent never loads torch, so it survives what kills the workers. It prints the outcome of the run as a line of JSON on standard output
and takes further orders on standard input; when that ends, because its parent died, the node ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.control import codec, protocol, store_server
from phalanx.control.channel import MAX_UNAUTHENTICATED, Channel, Listener
from phalanx.control.clock_sync import ClockSync
from phalanx.control.controller import Controller
from phalanx.control.election import LeaderClient, NodeServices, beat_seconds, rank_beat_seconds, tell_launcher
from phalanx.control.launcher_registry import LauncherRegistry
from phalanx.control.node_check import NodeCheck
from phalanx.control.node_faults import NodeFaults
from phalanx.control.processes import ForkClient, OnReport, ReplicaProcess, Worker, inspect_process
from phalanx.control.run_requests import Observe, RunRequest
from phalanx.events import heartbeat
from phalanx.events.heartbeat import Beat
from phalanx.events.records import StrangerRefused, Warned
from phalanx.events.run_logs import note_size
from phalanx.host.env import adopt, program_env, worker_env
from phalanx.host.process_tree import adopt_orphans, die_with, kill_session, stop_signals, unblock_stop_signals
from phalanx.spec.plan import Place

_REFUSAL_RECORDS = 5.0  # seconds between two records of refused connections
_MAX_LINE = 16 << 20  # bytes of a message from the launcher
_LOG_BLOCK = 1 << 16  # bytes of a log that are sent at a time
_LOG_SECONDS = 0.5  # between two looks at the logs
_LAST_WORDS = 0.02  # seconds after a worker's death in which its last report is read from its pipe


class Agent(NodeServices):
    """The agent of one node of one run."""

    def __init__(self, settings: protocol.AgentSettings):
        super().__init__(settings)
        self.slots, self._bind = settings.slots, settings.bind
        self._topology = settings.topology
        self.last_begin: protocol.BeginGeneration | None = None
        """The order that began the newest generation."""
        trains = self.run.command.program is None
        environment = worker_env(self.plan, self._bind) if trains else program_env(self._bind)
        self.fork_client = ForkClient(self.rundir, environment, self._on_fork_server_failure)
        self._kept: protocol.KeepWorkers | None = None
        self._controller: Controller | None = None
        self._leader = LeaderClient(self, self._lead)
        self._forked = 0
        self._restarting: asyncio.Task[Any] | None = None
        self._refused, self._refusal_recorded = 0, 0.0
        self._faults = NodeFaults(self)
        self._clock = ClockSync(self.node, self.report, self.emit)
        self._check = NodeCheck(self, self.slots, self._bind, self._fork)
        self._preparing, self._data, self._data_problem = trains and not settings.data_opened, settings.data, ""

    # --- the life of the node ---

    async def live(self) -> None:
        """Run until the run is over."""
        # While the fork server loads torch, which takes longer.
        if self.nodes > 1:
            self._check.prepare()
        ports = self.run.cluster.port_range
        self.replica_process = await asyncio.to_thread(ReplicaProcess, self.rundir, self.node, self._bind, self.token, ports)
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, self._reap)
        limit = max(MAX_UNAUTHENTICATED, 2 * self.nodes)
        listener = Listener(self._bind, self.token, self._on_connection, self.on_refused, ports, limit=limit)
        self.address = listener.address
        self.registry.announce(self.node, protocol.NodeInfo(name=self.name, address=list(self.address), pid=os.getpid()))
        tasks = [self.spawn(self._follow()), self.spawn(self._send_beats()), self.spawn(self._watch_logs())]
        if self.run.watch.timeline and self.nodes > 1:
            tasks.append(self.spawn(self._clock.run()))
        await self._over.wait()
        for task in tasks:
            task.cancel()
        self.fork_client.close()
        for worker in self.workers.values():
            worker.kill()
        for worker in self.workers.values():
            await worker.gone.wait()
        await listener.close()
        self._check.close()
        self.replica_process.close()
        self._faults.close()

    async def _follow(self) -> None:
        await self.fork_client.ready.wait()
        if self._preparing:
            self.spawn(self._prepare_data())
        await self._leader.follow()

    async def _prepare_data(self) -> None:
        self._data_problem = await self._check.prepare_data(self._data)
        self._preparing = False
        self.report(protocol.DataPrepared(problem=self._data_problem))

    async def _lead(self, term: int) -> None:
        self._controller = Controller(self, term)
        self.records.connect(self._controller.record)
        try:
            self._controller.receive(self.node, self.join_report())
            await self._controller.lead()
        finally:
            self.records.connect(None)
            self._controller = None

    def _on_fork_server_failure(self, reason: str, log: str) -> None:
        if self.last_begin is not None:
            os._exit(70)  # the others see a lost node
        self.finish(protocol.Outcome(code=1, reason=reason, traceback=log))

    def stop(self, reason: str) -> None:
        """Save and end: requested by the launcher, or by a signal."""
        if self.stopping is None:
            self.stopping = reason
            for worker in self.workers.values():
                worker.send(protocol.Stop(reason=reason))
            self.report(protocol.StopAsked(reason=reason))

    def leave(self, message: protocol.Leave) -> None:
        """The host goes away: the controller moves the ranks elsewhere, then releases this node."""
        if self.leaving is None:
            self.leaving = message
            self.emit(Warned(message=f"Node {self.node} goes away: {message.reason}"))
            self.report(message)

    # --- connections and reports ---

    async def _on_connection(self, channel: Channel) -> None:
        """Serve a peer that knows the token: a rank that uses its store, or a node that joins."""
        first = await channel.receive()
        if "store" in first:
            await store_server.serve(channel, self.stores, first)
            return
        join = codec.decode(first)
        if isinstance(join, protocol.Join) and self._controller is not None and self._accepts(join):
            await self._controller.serve_member(channel, join)

    def _accepts(self, join: protocol.Join) -> bool:
        """Whether a node may join: not one whose agent was started again while it was cut off."""
        info = self.registry.info(join.node)
        return self.reachable(join.node) and info is not None and info.name == join.name

    def on_refused(self, address: str, reason: str) -> None:
        """A peer without the token was refused, or a changed message. Records are rate-limited: a port scan must not fill the log."""
        self._refused += 1
        if time.monotonic() >= self._refusal_recorded + _REFUSAL_RECORDS:
            self.emit(StrangerRefused(address=address, node=self.node, reason=reason, count=self._refused))
            self._refused, self._refusal_recorded = 0, time.monotonic()

    def flush(self) -> None:
        self._leader.flush()

    def drop_link(self, node: int) -> None:
        """Injected fault: the link to another node breaks."""
        for worker in self.workers.values():
            worker.send(protocol.CutConnections())
        (self._controller or self._leader).drop_link(node)

    def join_report(self) -> protocol.Join:
        """Everything that a controller must know about this node."""
        return protocol.Join(
            node=self.node,
            name=self.name,
            slots=self.slots,
            topology=self._topology,
            replica_server=list(self.replica_process.address),
            workers={
                worker.name: protocol.WorkerInfo(rank=worker.rank, generation=worker.generation, exit_code=worker.exit_code)
                for worker in self.workers.values()
                if worker.rank is not None and (not worker.gone.is_set() or worker.exit_code is not None)
            },
            last_begin=self.last_begin,
            step=max((beat.step for beat in self._beats().values()), default=None),
            stopping=self.stopping,
            leaving=self.leaving,
            preparing=self._preparing,
            problem=self._data_problem,
        )

    def report(self, report: protocol.Report) -> None:
        """Report to the controller."""
        if self._controller is not None:
            self._controller.receive(self.node, report)
        else:
            self._leader.send(report)

    async def _send_beats(self) -> None:
        """Report the heartbeats of the ranks, which are also the heartbeat of the node."""
        seconds = beat_seconds(self.nodes, self.run.resilience.heartbeat)
        of_ranks, due = rank_beat_seconds(self.nodes, self.slots, self.run.resilience.heartbeat), 0.0
        while True:
            beats, now = self._beats(), time.monotonic()
            with_ranks = now >= due
            due = now + of_ranks - seconds / 2 if with_ranks else due
            self.report(protocol.Beats(beats=beats if with_ranks else {}))
            self._faults.on_step(max((beat.step for beat in beats.values()), default=-1))
            await asyncio.sleep(seconds)

    def _beats(self) -> dict[str, Beat]:
        now = time.monotonic()
        beats: dict[str, Beat] = {}
        for worker in self.workers.values():
            if worker.gone.is_set() or worker.rank is None or (beat := heartbeat.read(worker.heartbeat)) is None:
                continue
            beats[str(worker.rank)] = beat._replace(since=now - beat.since)
        return beats

    async def _watch_logs(self) -> None:
        """Note when ranks and this node's helper processes write to their logs; send it to the launcher if it cannot read them."""
        logs, seen = self.rundir.logs, dict[str, int]()
        for path in logs.glob("*.log"):
            seen[path.name] = path.stat().st_size
        while True:
            ranks = {worker.rank for worker in self.workers.values() if worker.rank is not None}
            own = [self.rundir.rank_log(rank) for rank in sorted(ranks)]
            own += [logs / f"{name}-{self.node}.log" for name in ("node", "replicas")]
            for path in own if self.sees_launch else sorted(logs.glob("*.log")):
                with contextlib.suppress(OSError):
                    if (size := path.stat().st_size) > seen.get(path.name, 0):
                        seen[path.name] = self._on_log(path, seen.get(path.name, 0), size)
            await asyncio.sleep(_LOG_SECONDS)

    def _on_log(self, path: Path, begin: int, size: int) -> int:
        """A log has grown; returns up to where that is known elsewhere now."""
        if self.sees_launch:
            note_size(path, size, time.time())
            return size
        with path.open("rb") as file:
            file.seek(begin)
            block = file.read(_LOG_BLOCK)
        tell_launcher(protocol.LogText(name=path.name, text=block.decode(errors="replace"), time=time.time()))
        return begin + len(block)

    # --- orders ---

    async def obey(self, order: protocol.Order) -> None:
        """Carry out an order of the controller."""
        match order:
            case protocol.KeepWorkers():
                self._kept = order
            case protocol.ClockAnswered():
                self._clock.on_answer(order)
            case protocol.CheckHost():
                self.spawn(self._check.check(order, self._faults.miscomputes()))
            case protocol.MeasureLinks():
                self.spawn(self._check.measure(order))
            case protocol.BeginGeneration():
                self._check.close()
                self._faults.on_begin(order.injected)
                await self._begin(order)
            case protocol.Halt() | protocol.Pause() | protocol.LocateRanks():
                for worker in self._workers_of(order.generation):
                    worker.send(order)
            case protocol.HandOff():
                for worker in self._workers_of(order.generation, set(order.contributors)):
                    worker.send(order)
            case Observe():
                for worker in self._workers_of(order.generation, set(order.ranks)):
                    worker.send(order)
            case protocol.Kill():
                for worker in self._workers_of(order.generation, order.ranks):
                    worker.failure = order.failure
                    worker.kill()
            case protocol.Inspect():
                for worker in self._workers_of(order.generation, order.ranks):
                    self.spawn(self._inspect(worker, order))
            case protocol.Evict():
                for worker in self.workers.values():
                    if worker.rank is not None:  # else it prepares the data
                        worker.kill()
            case protocol.Release():
                self._over.set()
            case protocol.Stop():
                self.stop(order.reason)
            case protocol.Done():
                self.finish(order.outcome)

    def _workers_of(self, generation: int, ranks: Collection[int] | None = None) -> list[Worker]:
        return [
            worker
            for worker in self.workers.values()
            if worker.generation == generation and not worker.gone.is_set() and (ranks is None or worker.rank in ranks)
        ]

    async def _begin(self, order: protocol.BeginGeneration) -> None:
        """Start this node's ranks of a generation: survivors by name, the others forked now. Workers that lose theirs are killed."""
        self.last_begin = order
        kept = self._kept.names if self._kept is not None and self._kept.generation == order.generation else {}
        names = {rank: kept.get(str(rank)) for rank in order.ranks_on(self.node)}
        survivors = {name for name in names.values() if name is not None}
        replaced = [
            worker
            for worker in self.workers.values()
            if worker.rank is not None and worker.name not in survivors and worker.exit_code is None
        ]
        for worker in replaced:
            worker.kill()
        if self.run.engine.name == "xla":  # its devices' memory must be free
            await asyncio.gather(*(worker.gone.wait() for worker in replaced))
        free = iter(sorted(set(range(self.slots)) - {self.workers[name].slot for name in survivors if name in self.workers}))
        new = [rank for rank, name in names.items() if name is None]
        forked = dict(zip(new, await asyncio.gather(*(self._fork(next(free)) for _ in new)), strict=True))
        if self.last_begin is not order:  # the next generation has begun meanwhile
            for worker in forked.values():
                worker.kill()
            return
        workers = {rank: forked[rank] if name is None else self.workers.get(name) for rank, name in names.items()}
        known = {str(rank): name or forked[rank].name for rank, name in names.items()}
        self.report(protocol.RanksBegan(generation=order.generation, names=known))
        for rank, process in workers.items():
            if process is None or process.gone.is_set():
                self.report(protocol.RankDied(rank=rank, generation=order.generation, code=-9))
                continue
            process.rank, process.generation, process.exit_code = rank, order.generation, None
            process.send(self._begin_rank(order, process))
            if self.stopping is not None:
                process.send(protocol.Stop(reason=self.stopping))

    def _begin_rank(self, order: protocol.BeginGeneration, worker: Worker) -> protocol.BeginRank:
        assert worker.rank is not None
        place = Place(
            rank=worker.rank,
            ranks=order.ranks,
            local_rank=worker.slot,
            store=(order.store[0], order.store[1]),
            replica_folder=str(self.replica_process.folder),
            generation=order.generation,
            token=self.token,
            node=self.node,
            copy_every=order.copy_every,
        )
        return protocol.BeginRank(begin=order, place=place, heartbeat=str(worker.heartbeat), chaos=self.chaos)

    async def _fork(self, slot: int, on_report: OnReport | None = None) -> Worker:
        self._forked += 1
        name, page = f"{self.node}.{self._forked}", self.replica_process.folder / f"pulse-{self._forked}"
        worker = await self.fork_client.fork(name, slot, page, on_report or self._on_rank_report)
        self.workers[name] = worker
        self._reap()  # it may have died before it was known here
        return worker

    async def _inspect(self, worker: Worker, order: protocol.Inspect) -> None:
        seen = await inspect_process(worker)
        assert worker.rank is not None
        self.report(protocol.RankLocation(generation=order.generation, rank=worker.rank, question=order.question, report=seen))

    # --- the workers ---

    def _on_rank_report(self, worker: Worker, report: protocol.Report) -> None:
        if isinstance(report, protocol.Record):
            self.records.add(report)
            return
        assert isinstance(report, protocol.RankReport), "only workers without a rank check their host"
        if isinstance(report, protocol.RankFailed):
            worker.failure = report.failure  # reported with its death
            return
        if isinstance(report, protocol.RankEnded):
            worker.exit_code = report.code
        assert worker.rank is not None
        self.report(replace(report, rank=worker.rank))

    async def _restart_replica_process(self) -> None:
        """The replica server died; its memory did not."""
        try:
            await asyncio.to_thread(self.replica_process.restart)
        except OSError as error:
            self.emit(Warned(message=f"Node {self.node} no longer keeps copies in memory: {error}."))
            return
        self.emit(Warned(message=f"The process that keeps node {self.node}'s copies in memory was lost, and started again."))
        self.report(protocol.ReplicaServerMoved(address=list(self.replica_process.address)))

    def _reap(self) -> None:
        """A child died: find out which."""
        if self.replica_process.lost and (self._restarting is None or self._restarting.done()):
            self._restarting = self.spawn(self._restart_replica_process())
        for worker in self.workers.values():
            if worker.gone.is_set():
                continue
            try:
                pid, status = os.waitpid(worker.pid, os.WNOHANG)
            except ChildProcessError:
                pid, status = worker.pid, 1 << 8
            if pid:
                worker.on_exit()
                if self.run.command.program is not None:
                    kill_session(worker.pid)
                loop = asyncio.get_running_loop()
                loop.call_later(_LAST_WORDS, self._report_death, worker, os.waitstatus_to_exitcode(status))

    def _report_death(self, worker: Worker, code: int) -> None:
        if worker.rank is None or worker.exit_code == code:
            return
        self.report(
            protocol.RankDied(
                rank=worker.rank, generation=worker.generation, code=code, failure=worker.failure, step=worker.last_step
            )
        )


async def _main() -> None:
    loop, launcher = asyncio.get_running_loop(), asyncio.StreamReader(limit=_MAX_LINE)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(launcher), sys.stdin)
    if not (line := await launcher.readline()):
        return  # the parent is gone
    settings: protocol.AgentSettings = codec.decode(json.loads(line))
    die_with(settings.parent or os.getppid())
    adopt_orphans()
    adopt(settings.environment)
    agent = Agent(settings)
    for number in stop_signals():
        loop.add_signal_handler(number, agent.stop, signal.Signals(number).name)
    unblock_stop_signals()
    agent.spawn(_follow_launcher(agent, launcher))
    await agent.live()


async def _follow_launcher(agent: Agent, launcher: asyncio.StreamReader) -> None:
    """Stop when the launcher asks. If it is gone, end this process at once, and the workers with it."""
    while line := await launcher.readline():
        message = codec.decode(json.loads(line))
        if isinstance(message, protocol.Stop):
            agent.stop(message.reason)
        elif isinstance(message, protocol.Leave):
            agent.leave(message)
        elif isinstance(message, RunRequest):
            agent.report(message)
        elif isinstance(agent.registry, LauncherRegistry):
            agent.registry.receive(message)
    os._exit(1)


if __name__ == "__main__":
    asyncio.run(_main())
    sys.stdout.flush()
    os._exit(0)
