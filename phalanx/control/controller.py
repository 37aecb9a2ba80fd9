"""The controller of a run: begins generations of ranks, notices failures and carries out what `recovery/policy` decides. Runs inside one
agent, the author of the newest term.

Everything it knows comes from the agents' reports, so another agent can take over. It checks before each order that its term is still the
newest: a controller that was believed lost and wakes up later is obeyed by nobody, and finds out itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import replace

from phalanx.checkpointing.replicas import replica_index
from phalanx.control import protocol, startup
from phalanx.control.channel import Channel
from phalanx.control.controller_state import ControllerState, Generation, Member, NodeServices
from phalanx.control.recover import Recovery, Replanner, copy_every
from phalanx.control.store_server import KeyValueStore
from phalanx.control.watchdog import Watchdog
from phalanx.events.heartbeat import Beat
from phalanx.host.env import visible_gpus
from phalanx.host.probe import probe
from phalanx.recovery.state import NodeLost, WorkerDied
from phalanx.spec.plan import Plan

_HEARTBEAT = 0.3  # seconds between two heartbeats to the agents
_STALL = 1.0  # seconds without one, after which this process was itself stopped or starved


class Controller:
    """The controller of one term."""

    def __init__(self, agent: NodeServices, term: int):
        self.agent, self.term, self.settings = agent, term, agent.run.resilience
        self.state = ControllerState(wanted=agent.plan.layout)
        self._replanner = Replanner(agent.run, agent.plan, lambda: probe(visible_gpus()))
        self._watchdog = Watchdog(self, self._replanner)
        self._deposed = False
        self._changed = asyncio.Event()
        self._last_heartbeat = time.monotonic()

    # --- reports of the agents ---

    async def serve_member(self, channel: Channel, join: protocol.Join) -> None:
        """Receive the reports of a node until its connection ends."""
        self.receive(join.node, join, channel)
        with contextlib.suppress(ConnectionError):
            while True:
                self.receive(join.node, protocol.decode(await channel.receive()))
        member = self.state.members.get(join.node)
        if member is not None and member.channel is channel:
            self._lose_node(join.node, "its supervisor is gone")

    def receive(self, node: int, report: protocol.Report, channel: Channel | None = None) -> None:
        """Handle one report of a node."""
        if isinstance(report, protocol.Join):
            self._on_join(report, channel)
        elif node in self.state.members:
            self.state.members[node].last_heard = time.monotonic()
            self._handle(node, report)
        self._changed.set()

    def _handle(self, node: int, report: protocol.Report) -> None:
        generation = self.state.generation
        match report:
            case protocol.Beats():
                self._on_beats(report)
            case protocol.RankLocation() | protocol.RankInspected():
                self._watchdog.hangs.on_answer(report)
            case protocol.RankReport() if generation is not None and report.generation == generation.number:
                generation.update(report)
            case protocol.RanksBegan() if generation is not None and report.generation == generation.number:
                generation.names |= {int(rank): name for rank, name in report.names.items()}
            case protocol.RankDied():
                self._on_rank_died(report)
            case protocol.StopRequested():
                self._on_stop_requested(report.reason)
            case protocol.ReplicaServerMoved():
                host, port = report.address
                self.state.members[node].replica_server = (host, port)
                if generation is not None and self.state.copy_every is not None:
                    self.agent.spawn(self._set_replica_peers(generation.assignment))

    def _on_join(self, join: protocol.Join, channel: Channel | None) -> None:
        state, node = self.state, join.node
        host, port = join.replica_server
        known = state.members.get(node)
        if known is not None and known.name != join.name:
            self._lose_node(node, "it was started again")
        state.members[node] = Member(node, join.name, join.slots, (host, port), channel, time.monotonic())
        state.joins[node] = join
        if join.last_begin is not None:
            state.begins.append(join.last_begin)
        if join.stopping is not None:
            self._on_stop_requested(join.stopping)
        generation = state.generation
        if generation is None:
            return
        # A deposed controller may have begun a generation of the same number.
        ours = join.last_begin is not None and join.last_begin.term == generation.term
        working = [worker for worker in join.workers.values() if worker.exit_code is None]
        if channel is not None and any(not ours or worker.generation != generation.number for worker in working):
            channel.post(protocol.encode(protocol.Evict(term=self.term)))
        elif known is not None and known.name == join.name:
            ranks = {worker.rank for worker in join.workers.values() if worker.generation == generation.number}
            self._on_reconnect(node, ranks)
        state.joined.add(node)

    def _on_reconnect(self, node: int, ranks: set[int | None]) -> None:
        """A node is back on a new connection with these ranks. Reports in between were lost: any other rank of the node is dead."""
        generation = self.state.generation
        assert generation is not None
        for rank, place in enumerate(generation.assignment):
            if place == node and rank not in ranks and rank not in generation.ended:
                failure = protocol.RankFailure(cause="died", reason="it is gone, or was never begun")
                self._on_rank_died(protocol.RankDied(rank=rank, generation=generation.number, code=1, failure=failure))

    def _on_beats(self, report: protocol.Beats) -> None:
        generation, now = self.state.generation, time.monotonic()
        for rank, values in report.beats.items():
            beat = Beat(*values)
            if generation is not None and beat.generation == generation.number:
                generation.beats[int(rank)] = beat._replace(since=now - beat.since)

    def _on_rank_died(self, report: protocol.RankDied) -> None:
        generation = self.state.generation
        if generation is None or report.generation != generation.number or report.rank in generation.dead:
            return
        if report.step is not None:
            generation.steps_of_dead.append(report.step)
        died = self._watchdog.worker_died(report)
        generation.dead[report.rank] = died
        self.state.events.append(died)

    def _on_stop_requested(self, reason: str) -> None:
        if self.state.stop_requested is None:
            self.state.stop_requested = time.monotonic()
            self.order(protocol.Stop(reason=reason))

    def _lose_node(self, node: int, reason: str) -> None:
        state = self.state
        if state.members.pop(node, None) is None:
            return
        state.joined.discard(node)
        generation = state.generation
        if generation is None or node not in generation.assignment:
            return
        for rank, place in enumerate(generation.assignment):
            if place == node and rank not in generation.dead:
                generation.dead[rank] = WorkerDied(rank, generation.step, "node lost", reason, node_lives=False)
        state.events.append(NodeLost(node, generation.step, f"node {node}: {reason}"))
        self._changed.set()

    def drop_link(self, node: int) -> None:
        """Injected fault: the connection to that node breaks."""
        member = self.state.members.get(node)
        if member is not None and member.channel is not None:
            member.channel.close()
            self._lose_node(node, "its link is down")

    # --- orders and waiting ---

    @property
    def leads(self) -> bool:
        """Whether this term is still the newest."""
        if self.agent.terms.newest() != (self.term, self.agent.name):
            self._deposed = True
        return not self._deposed

    def order(self, order: protocol.Order) -> None:
        """Send an order to every node, if this term is still the newest."""
        if not self.leads:
            return
        order = replace(order, term=self.term)
        for member in self.state.members.values():
            if member.channel is not None:
                member.channel.post(protocol.encode(order))
            else:
                self.agent.spawn(self.agent.obey(order))

    async def wait(self, seconds: float) -> None:
        """Wait for a report."""
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the condition holds; False if it does not in time."""
        deadline = time.monotonic() + seconds
        while not condition():
            left = deadline - time.monotonic()
            if left <= 0 or self._deposed:
                return False
            await self.wait(min(left, 0.25))
            self._check_silent_nodes()
        return True

    def _check_silent_nodes(self) -> None:
        if self.stalled:
            return  # the reports of the others are still waiting to be read
        now = time.monotonic()
        for member in list(self.state.members.values()):
            if member.channel is not None and now - member.last_heard > self.settings.heartbeat:
                member.channel.close()
                self._lose_node(member.node, f"no sign of life for {now - member.last_heard:.1f} s")

    @property
    def stalled(self) -> bool:
        """Whether this process was stopped or starved, and has not sent a heartbeat since."""
        return time.monotonic() - self._last_heartbeat > _STALL

    async def _send_heartbeats(self) -> None:
        while True:
            # The file first: an agent that receives the heartbeat later checks for a newer sign of life in the file.
            self.agent.terms.touch(self.agent.node)
            stalled, self._last_heartbeat = self.stalled, time.monotonic()
            if stalled:
                self.state.last_stall_end = self._last_heartbeat
            for member in self.state.members.values():
                if stalled:
                    member.last_heard = self._last_heartbeat
                if member.channel is not None:
                    member.channel.post(protocol.encode(protocol.ControllerAlive(term=self.term)))
            await asyncio.sleep(_HEARTBEAT)

    async def stacks(self, ranks: list[int]) -> dict[int, str]:
        """The stacks of these ranks."""
        assert self.state.generation is not None
        return await self._watchdog.hangs.stacks(self.state.generation, ranks)

    # --- the run ---

    async def lead(self) -> None:
        """Control the run until it ends or another controller takes over."""
        heartbeats = asyncio.create_task(self._send_heartbeats())
        try:
            await startup.start(self)
            while self.agent.outcome is None and self.leads:
                if self._finish_if_complete():
                    break
                if self.state.events or self.state.joined:
                    await Recovery(self, self._replanner).run()
                else:
                    await self._watchdog.check()
                    await self.wait(0.25)
                self._check_silent_nodes()
        finally:
            heartbeats.cancel()
            for store in self.agent.stores.values():
                store.end("this generation is over: another node decides now")
            for member in self.state.members.values():
                if member.channel is not None and self._deposed:
                    member.channel.close()

    async def begin(
        self,
        plan: Plan,
        assignment: tuple[int, ...],
        names: dict[int, str | None],
        source: protocol.StateSource,
        *,
        save_only: bool = False,
    ) -> None:
        """Begin a generation. `names`: surviving worker processes by new rank. `save_only`: it restores, saves and ends."""
        state, stores = self.state, self.agent.stores
        number = 0
        if state.generation is not None:
            number = state.generation.number + 1
            if state.generation.number in stores:
                stores[state.generation.number].end(f"generation {state.generation.number} is over")
        stores[number] = KeyValueStore()
        state.copy_every = copy_every(self.agent.run, plan, assignment)
        if state.copy_every is not None:
            await self._set_replica_peers(assignment)
        state.generation = Generation(number, plan, assignment, self.term)
        self.order(
            protocol.BeginGeneration(
                generation=number,
                plan=plan,
                ranks=[protocol.RankSlot(node=node, worker=names.get(rank)) for rank, node in enumerate(assignment)],
                source=source,
                store=list(self.agent.address),
                copy_every=state.copy_every,
                save_only=save_only,
                author=self.agent.node,
            )
        )

    async def _set_replica_peers(self, assignment: tuple[int, ...]) -> None:
        members = self.state.members
        servers = {node: members[node].replica_server for node in set(assignment) if node in members}
        await asyncio.to_thread(replica_index.set_peers, servers, self.agent.token)

    def _finish_if_complete(self) -> bool:
        generation = self.state.generation
        if generation is None or not generation.complete:
            return False
        self._watchdog.record_recovery(generation)
        self.end(protocol.RESUMABLE if protocol.RESUMABLE in generation.ended.values() else 0)
        return True

    def end(self, code: int, reason: str | None = None, rank: int | None = None, traceback: str = "") -> None:
        """End the run: tell all other nodes, then this one."""
        outcome = protocol.Outcome(code=code, reason=reason, rank=rank, traceback=traceback)
        for member in self.state.members.values():
            if member.channel is not None:
                member.channel.post(protocol.encode(protocol.Done(term=self.term, outcome=outcome)))
        asyncio.get_running_loop().call_later(0.05, self.agent.finish, outcome)
        self.agent.outcome = outcome
