"""The controller of a run: begins generations of ranks, notices failures and carries out what `recovery/policy` decides. Runs inside one
agent, the author of the newest term.

Everything it knows comes from the agents' reports, so another agent can take over. It checks before each order that its term is still the
newest: a controller that was believed lost and wakes up later is obeyed by nobody, and finds out itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from dataclasses import replace

from phalanx.control import codec, protocol
from phalanx.control.channel import Channel
from phalanx.control.controller_state import Control, Generation, Member, RecoveryRecord
from phalanx.control.election import NodeServices, beat_seconds
from phalanx.control.observation import Observations
from phalanx.control.preflight import Preflight
from phalanx.control.recover import Recovery, Replanner
from phalanx.control.run_requests import Observed, RunRequest
from phalanx.control.watchdog import Watchdog, worker_failure
from phalanx.events.frames import Refused
from phalanx.events.heartbeat import Beat
from phalanx.events.records import (
    ControllerChanged,
    Event,
    FailureNoticed,
    FaultInjected,
    Finished,
    HostRejected,
    Recovered,
    Step,
    Stopped,
    decode,
)
from phalanx.host.probe import this_machine
from phalanx.recovery.diagnose import HangReport
from phalanx.recovery.state import Failure

_HEARTBEAT = 0.3  # seconds between two heartbeats to the agents, if there are few
_LEADERSHIP_SECONDS = 0.1  # for which this node still leads after a look at the registry, as far as records are concerned
_JOIN_TIMEOUT = 60.0  # seconds in which all nodes must have joined a new launch, and
_JOIN_TIMEOUT_PER_NODE = 0.1  # more for each: thousands load the same files from one file system
_SPARES_TIMEOUT = 0.3  # seconds more for nodes without ranks
_TAKEOVER_TIMEOUT = 1.0  # seconds in which living nodes join a new controller


class Controller(Control):
    """The controller of one term."""

    def __init__(self, agent: NodeServices, term: int):
        super().__init__(agent, term)
        self._replanner = Replanner(agent.run, agent.plan, lambda: this_machine().times(agent.hosts))
        self._watchdog = Watchdog(self, self._replanner)
        self._observations = Observations(self)
        self._leadership_checked = -_LEADERSHIP_SECONDS

    # --- reports of the agents ---

    async def serve_member(self, channel: Channel, join: protocol.Join) -> None:
        """Receive the reports of a node until its connection ends."""
        self.receive(join.node, join, channel)
        try:
            while True:
                self.receive(join.node, codec.decode(await channel.receive()))
        except Refused:
            return  # changed on the way: the node lives and connects again, or is silent and counts as lost soon
        except ConnectionError:
            pass
        member = self.state.members.get(join.node)
        if member is not None and member.channel is channel:
            self.lose_node(join.node, "its agent is gone")

    def receive(self, node: int, report: protocol.Report, channel: Channel | None = None) -> None:
        """Handle one report of a node."""
        if isinstance(report, protocol.Reports):
            for inner in report.reports:
                self.receive(node, inner)
            return
        if isinstance(report, protocol.Join):
            self._on_join(report, channel)
        elif node in self.state.members:
            self.state.members[node].last_heard = time.monotonic()
            self._handle(node, report)
        if not isinstance(
            report, protocol.Beats | protocol.Record | protocol.ClockAsked
        ):  # thousands a second, and no reason to look at all ranks
            self._changed.set()

    def _handle(self, node: int, report: protocol.Report) -> None:
        generation = self.state.generation
        match report:
            case protocol.Beats():
                self._on_beats(report)
            case protocol.ClockAsked():
                self._answer_clock(node, report)
            case protocol.HostChecked() | protocol.Computed() | protocol.LinkMeasured():
                self.state.checks.update(node, report)
            case protocol.RankLocation():
                if report.question == self.state.question:  # not a late answer to an earlier one
                    known = self.state.locations.get(report.rank, HangReport())
                    self.state.locations[report.rank] = known | report.report
            case Observed() if generation is not None and report.generation == generation.number:
                self._observations.on_observed(report)
            case RunRequest():
                self._observations.ask(report)
            case protocol.RankReport() if generation is not None and report.generation == generation.number:
                generation.update(report)
            case protocol.RanksBegan() if generation is not None and report.generation == generation.number:
                generation.names |= {int(rank): name for rank, name in report.names.items()}
            case protocol.RankDied():
                self._on_rank_died(report)
            case protocol.DataPrepared():
                self._on_data_prepared(node, report)
            case protocol.Record():
                self.state.members[node].recorded += self._write(report)
            case protocol.StopAsked():
                self.request_stop(report.reason)
            case protocol.Leave():
                self.expect_loss(node, report)
            case protocol.ReplicaServerMoved():
                host, port = report.address
                self.state.members[node].replica_server = (host, port)
                if generation is not None and self.state.copy_every is not None:
                    self.agent.spawn(self.set_replica_peers())

    def _answer_clock(self, node: int, report: protocol.ClockAsked) -> None:
        channel = self.state.members[node].channel
        if channel is not None:
            answer = protocol.ClockAnswered(term=self.term, node=self.agent.node, asked=report.at, now=time.monotonic())
            channel.post(codec.encode(answer))

    def _on_join(self, join: protocol.Join, channel: Channel | None) -> None:
        state, node = self.state, join.node
        host, port = join.replica_server
        known = state.members.get(node)
        if known is not None and known.join.name != join.name:
            self.lose_node(node, "it was started again")
        state.members[node] = member = Member(join, (host, port), channel, time.monotonic())
        member.preparing, member.problem = join.preparing, join.problem
        state.unreachable.discard(node)
        if join.stopping is not None:
            self.request_stop(join.stopping)
        if join.leaving is not None:
            self.expect_loss(node, join.leaving)
        generation = state.generation
        if generation is None:
            return
        # A deposed controller may have begun a generation of the same number.
        ours = join.last_begin is not None and join.last_begin.term == generation.term
        working = [worker for worker in join.workers.values() if worker.exit_code is None]
        if channel is not None and any(not ours or worker.generation != generation.number for worker in working):
            channel.post(codec.encode(protocol.Evict(term=self.term)))
        elif known is not None and known.join.name == join.name:
            self._on_reconnect(node, [worker for worker in join.workers.values() if worker.generation == generation.number])
        self._take_in(node, member)

    def _take_in(self, node: int, member: Member) -> None:
        """A node can get ranks, and keep copies of others."""
        if member.problem and node not in self.state.rejected:
            self.reject(node, "", f"node {node} cannot read the run's data: {member.problem}")
        if self.state.generation is None or member.preparing or node in self.state.rejected:
            return
        self.state.joined.add(node)
        if self.state.copy_every is not None:
            self.agent.spawn(self.set_replica_peers())

    def _on_data_prepared(self, node: int, report: protocol.DataPrepared) -> None:
        member = self.state.members[node]
        member.preparing, member.problem = False, report.problem
        if self.state.generation is not None:  # else the check of all hosts comes
            self._take_in(node, member)

    def _on_reconnect(self, node: int, workers: list[protocol.WorkerInfo]) -> None:
        """A node is back on a new connection with these ranks. Reports in between were lost: any other rank of the node is dead."""
        generation = self.state.generation
        assert generation is not None
        generation.ended |= {
            worker.rank: worker.exit_code for worker in workers if worker.rank is not None and worker.exit_code is not None
        }
        for rank in generation.ranks_on(node) - {worker.rank for worker in workers} - generation.ended.keys():
            failure = protocol.RankFailure(cause="died", reason="it is gone, or was never started")
            self._on_rank_died(protocol.RankDied(rank=rank, generation=generation.number, code=1, failure=failure))

    def record(self, record: protocol.Record) -> None:
        """Write a record of this node."""
        if self._write(record):
            self.agent.records.confirm_next()

    def _write(self, record: protocol.Record) -> bool:
        """Write a record; returns False if another controller must do it: this one may have been stopped for a while."""
        if self._deposed or time.monotonic() > self._leadership_checked + _LEADERSHIP_SECONDS:
            if not self.leads:
                return False
            self._leadership_checked = time.monotonic()
        if self.agent.chaos and isinstance(event := decode(record.line), FaultInjected):
            self.state.on_fault(event, self.agent.chaos)
        # The ranks of a former generation may have kept a record back. Those that survived have written the steps since.
        newest = 0 if self.state.generation is None else self.state.generation.number
        late = record.generation is not None and record.generation < newest
        with contextlib.suppress(OSError):
            self.agent.registry.record(record.line, if_new=record.if_new or late)
        return True

    def _on_beats(self, report: protocol.Beats) -> None:
        generation, now = self.state.generation, time.monotonic()
        for rank, (step, phase, age, seconds, busy, taken, number) in report.beats.items():
            if generation is not None and number == generation.number:
                generation.beats[int(rank)] = Beat(step, phase, now - age, seconds, busy, taken, number)

    def _on_rank_died(self, report: protocol.RankDied) -> None:
        generation = self.state.generation
        if generation is None or report.generation != generation.number or report.rank in generation.dead:
            return
        if report.step is not None:
            generation.steps_of_dead.append(report.step)
        generation.dead.add(report.rank)
        if report.code == -signal.SIGABRT and report.failure is None and self.agent.run.engine.name == "xla":
            # XLA ends a process when its coordinator is gone: another one has died, or this will count as a lost connection.
            generation.disconnected.setdefault(report.rank, "XLA has ended its process, as it does when it misses another one")
            return
        self.state.events.append(worker_failure(report, generation.step, self.agent.rundir))

    def drop_link(self, node: int) -> None:
        """Injected fault: the connection to that node breaks."""
        member = self.state.members.get(node)
        if member is not None and member.channel is not None:
            member.channel.close()
            self.lose_node(node, "its link is down", silent=True)

    async def _send_heartbeats(self) -> None:
        seconds = max(_HEARTBEAT, beat_seconds(self.agent.nodes, self.settings.heartbeat))
        while True:
            # The file first: an agent that receives the heartbeat later checks for a newer sign of life in the file.
            self.agent.registry.touch(self.agent.node)
            stalled, self._last_heartbeat = self.stalled, time.monotonic()
            if stalled:
                self.state.last_stall_end = self._last_heartbeat
            for member in self.state.members.values():
                if stalled:
                    member.last_heard = self._last_heartbeat
                if member.channel is not None:
                    alive = protocol.ControllerAlive(term=self.term, recorded=member.recorded)
                    member.channel.post(codec.encode(alive))
            await asyncio.sleep(seconds)

    # --- the run ---

    async def lead(self) -> None:
        """Control the run until it ends or another controller takes over."""
        heartbeats = asyncio.create_task(self._send_heartbeats())
        try:
            await _start(self, self._replanner)
            while self.agent.outcome is None and self.leads:
                if self._finish_if_complete():
                    break
                if self.state.events or self.state.joined:
                    await Recovery(self, self._replanner).run()
                else:
                    await self._watchdog.check()
                    self._observations.check()
                    await self.wait(0.25)
                self.check_silent_nodes()
        finally:
            heartbeats.cancel()
            for member in self.state.members.values():
                if member.channel is not None and self._deposed:
                    member.channel.close()

    def _finish_if_complete(self) -> bool:
        generation = self.state.generation
        if generation is None or not generation.complete:
            return False
        self._watchdog.record_recovery(generation)
        code = next(filter(None, generation.ended.values()), 0)
        if self.agent.run.command.program is not None:  # no rank knows that all of them are done
            self.agent.emit(Stopped(step=0, reason=self.agent.stopping or "asked to stop") if code else Finished(step=0))
        self.end(code)
        return True


async def _start(control: Control, replanner: Replanner) -> None:
    """Start the first generation once all nodes have joined; if another controller led before, take over its generation."""
    state, agent = control.state, control.agent
    expected = set(range(agent.nodes))
    timeout = _JOIN_TIMEOUT + _JOIN_TIMEOUT_PER_NODE * agent.nodes
    await control.until(lambda: expected <= state.members.keys() or state.newest_begin is not None, timeout)
    newest = state.newest_begin
    if newest is None:
        if missing := expected - state.members.keys():
            logs = agent.rundir.logs
            control.end(1, f"node {min(missing)} did not start within {timeout:.0f} s: see its log in {logs}.")
        elif await _data_is_prepared(control):
            await _begin_first(control, replanner)
        return
    gone = {newest.author} - {agent.handed_over}
    nodes = {*newest.assignment} - gone
    await control.until(lambda: nodes <= state.members.keys(), _TAKEOVER_TIMEOUT)
    # Spare nodes, too: one that joined a moment later would be too late to replace a lost node.
    others = set(agent.registry.announced()) - gone
    await control.until(lambda: others <= state.members.keys(), _SPARES_TIMEOUT)
    events = await agent.registry.history()
    unrecovered = _read_history(control, events)
    if newest.term != control.term:  # else this node was only cut off from the registry for a while
        agent.emit(ControllerChanged(term=control.term, node=agent.node))
    _take_over(control, newest, events)
    if state.events and unrecovered:  # the previous controller had begun to recover from them
        state.recovery = RecoveryRecord(unrecovered[0].time, [event.number for event in unrecovered])


async def _data_is_prepared(control: Control) -> bool:
    """Wait for hosts that still tokenize, as long as that takes; False if the run was asked to stop meanwhile, and ends."""
    state = control.state
    await control.until(
        lambda: state.stop_requested is not None or not any(member.preparing for member in state.members.values()), float("inf")
    )
    if not any(member.preparing for member in state.members.values()):
        return True
    control.end_stopped(0)
    return False


def _read_history(control: Control, events: list[Event]) -> list[FailureNoticed]:
    """Read the failures of this launch from its records, so that repeated ones are recognized. Returns those not recovered from."""
    state = control.state
    unrecovered: dict[int, FailureNoticed] = {}
    for event in events:
        if isinstance(event, HostRejected):
            state.rejected.add(event.node)
        elif isinstance(event, FaultInjected):
            state.on_fault(event, control.agent.chaos)
        elif isinstance(event, FailureNoticed):
            unrecovered[event.number] = event
            state.failures = max(state.failures, event.number)
            state.history += (Failure(event.cause, event.rank, event.step, event.message, event.node, time=event.time),)
        elif isinstance(event, Recovered):
            state.history = tuple(replace(failure, tried=failure.tried or event.action) for failure in state.history)
            for number in event.failures:
                unrecovered.pop(number, None)
    return list(unrecovered.values())


async def _begin_first(control: Control, replanner: Replanner) -> None:
    state, agent = control.state, control.agent
    chosen = await Preflight(control, replanner).run()
    if chosen is None:
        return
    plan, assignment = chosen
    state.joined.clear()
    if control.term > 1:  # every node that knew the previous generation is gone
        events = await agent.registry.history()
        state.failures = max((event.number for event in events if isinstance(event, FailureNoticed)), default=0) + 1
        step = _last_step(events)
        message = "all nodes were lost, and with them what was in memory"
        agent.emit(FailureNoticed(number=state.failures, cause="node lost", message=message, step=step))
        now = time.time()
        state.recovery = RecoveryRecord(now, [state.failures], source="disk", decided=now, step_before=step)
    await control.begin(plan, assignment, {}, protocol.StateSource(in_memory=False))


def _take_over(control: Control, begin: protocol.BeginGeneration, events: list[Event]) -> None:
    """Continue with the generation that another controller began, from what the agents report about it."""
    state = control.state
    generation = state.generation = Generation(begin.generation, begin.plan, tuple(begin.assignment), begin.term)
    for node, member in state.members.items():
        for name, worker in member.join.workers.items():
            if worker.generation == generation.number and worker.rank is not None:
                generation.names[worker.rank] = name
                if worker.exit_code is not None:
                    generation.ended[worker.rank] = worker.exit_code
        if not generation.ranks_on(node):
            state.joined.add(node)
    if any(isinstance(event, Finished) for event in events):
        control.end(0)
        return
    # No rank has reported to this controller yet.
    steps = (_last_step(events), *(member.join.step for member in state.members.values()))
    step = max((step for step in steps if step is not None), default=None)
    for node in dict.fromkeys(generation.assignment):
        if node not in state.members:
            generation.dead |= generation.ranks_on(node)
            reason = f"node {node}: its agent, which was the controller, is gone"
            state.events.append(Failure("node lost", None, step, reason, node))
    for rank in generation.living:
        if rank not in generation.names:
            generation.dead.add(rank)
            state.events.append(Failure("died", rank, step, f"rank {rank}: it is gone"))


def _last_step(events: list[Event]) -> int | None:
    return next((event.step for event in reversed(events) if isinstance(event, Step)), None)
