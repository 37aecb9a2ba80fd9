"""What the controller knows, as plain data: the nodes, the running generation of ranks, and what has happened and is not handled yet; and
`Control`, its orders to the nodes. `controller`, `watchdog` and `recover` share both."""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, islice

from phalanx.checkpointing.replicas import replica_index, shm_slots
from phalanx.control import codec, protocol
from phalanx.control.channel import Channel
from phalanx.control.election import NodeServices, beat_seconds
from phalanx.control.processes import BYTES_PER_PARAMETER
from phalanx.control.store_server import KeyValueStore
from phalanx.events.frames import Address, to_body
from phalanx.events.heartbeat import Beat
from phalanx.events.records import FaultInjected, HostRejected, Stopped, Warned, WorkerFailed
from phalanx.faults.grammar import parse
from phalanx.host.host_check import DeviceResult
from phalanx.recovery import state as policy
from phalanx.recovery.diagnose import HangReport
from phalanx.recovery.relayout import replicated_elsewhere
from phalanx.recovery.state import Failure, NodeJoined, NodeLeaving, Situation
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

_ANSWER_TIMEOUT = 1.0  # seconds in which a rank reports its location
_INSPECT_TIMEOUT = 1.5  # seconds in which an agent inspects a rank that does not answer
_QUIET = 3  # heartbeats that may be missing before a node may be lost
_CHECKING = 0.1  # part of the time that may be spent on looking whether a condition holds
_OFFER_SECONDS = 1.5  # in which another node claims a term that is offered
_OFFER_POLL = 0.1  # seconds between two looks whether one has
_STALL = 1.0  # seconds without a heartbeat, after which this process was itself stopped or starved


@dataclass(slots=True)
class Member:
    """A node that has joined the run."""

    join: protocol.Join
    replica_server: Address
    channel: Channel | None
    """None: the controller's own node."""
    last_heard: float
    recorded: int = 0
    """Records that have arrived on this connection."""
    leaves: float | None = None
    """When its host goes away, by this machine's clock; None: it stays."""
    preparing: bool = False
    """It prepares the run's data, and gets no ranks before."""
    problem: str = ""
    """Of the run's data on its host."""


@dataclass(slots=True)
class Generation:
    """The ranks that work together until one is lost, and what they have reported."""

    number: int
    plan: Plan
    assignment: tuple[int, ...]
    """Node of each rank."""
    term: int = 0
    """Term in which it began."""
    names: dict[int, str | None] = field(default_factory=dict)
    """Worker process of each rank, as far as known."""
    dead: set[int] = field(default_factory=set)
    beats: dict[int, Beat] = field(default_factory=dict)
    """Newest heartbeat of each rank, on this machine's clock."""
    survivors: dict[int, protocol.SurvivorReport] = field(default_factory=dict)
    handed_off: dict[int, protocol.HandedOff] = field(default_factory=dict)
    restored: dict[int, int] = field(default_factory=dict)
    """Step that each rank has restored."""
    from_memory: bool = True
    """None of them from disk."""
    first_steps: dict[int, float] = field(default_factory=dict)
    """When the first step of each rank was complete."""
    paused: set[int] = field(default_factory=set)
    ended: dict[int, int] = field(default_factory=dict)
    """Exit codes of ranks that are done."""
    steps_of_dead: list[int] = field(default_factory=list)
    """Last complete steps of ranks that died."""
    disconnected: dict[int, str] = field(default_factory=dict)
    """Ranks that lost a connection, with their error."""
    corruption: protocol.ReplicasDiffer | None = None
    corruption_handled: bool = False
    _ranks_on: dict[int, set[int]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        for rank, node in enumerate(self.assignment):
            self._ranks_on.setdefault(node, set()).add(rank)

    @property
    def ranks(self) -> int:
        return len(self.assignment)

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.dead]

    def ranks_on(self, node: int) -> set[int]:
        return self._ranks_on.get(node, set())

    @property
    def step(self) -> int | None:
        """Newest complete step that any rank has reported; None if there is none, or the ranks run a program of the user's own."""
        if not self.plan.parameters:
            return None
        reported = [report.step for report in self.survivors.values() if report.step is not None]
        beats = [beat.step for beat in self.beats.values()]
        return max([*beats, *reported, *self.restored.values(), *self.steps_of_dead], default=None)

    @property
    def valid_state_known(self) -> bool:
        """Whether it is known whose state is right. Wrong gradients were not applied: if only they differ, every state is right."""
        return self.corruption is None or bool(self.corruption.culprits) or self.corruption.what == "gradients"

    @property
    def last_valid(self) -> int | None:
        """The newest step whose state may be used; None: no limit."""
        if self.corruption is None or self.corruption.what == "gradients":
            return None
        restored = min(self.restored.values(), default=0)
        return restored if self.corruption.last_valid is None else self.corruption.last_valid

    @property
    def untouched(self) -> bool:
        """This is the first generation of the launch and no step was taken, so there is nothing to save."""
        return self.number == 0 and not self.first_steps and not any(beat.steps_taken for beat in self.beats.values())

    @property
    def complete(self) -> bool:
        return len(self.ended) == self.ranks

    def update(self, report: protocol.RankReport) -> None:
        """Record what one of its ranks reports."""
        rank = report.rank
        match report:
            case protocol.SurvivorReport():
                self.survivors[rank] = report
            case protocol.HandedOff():
                self.handed_off[rank] = report
            case protocol.RankRestored():
                self.restored[rank] = report.step
                self.from_memory &= report.from_memory
            case protocol.FirstStepDone():
                self.first_steps.setdefault(rank, time.time())
            case protocol.RankPaused():
                self.paused.add(rank)
            case protocol.RankEnded():
                self.ended[rank] = report.code
            case protocol.ConnectionLost():
                self.disconnected.setdefault(rank, report.reason)
            case protocol.ReplicasDiffer():
                self.corruption = report

    def newest_state(self) -> tuple[int, list[int], protocol.SurvivorReport] | None:
        """The newest step among the survivors' states, the ranks that have or can still apply it, and the report of one that has it.

        None if no survivor has a usable state.
        """
        unusable = self.dead | set(self.corruption.culprits if self.corruption is not None else ())
        limit = math.inf if self.last_valid is None else self.last_valid
        usable = {
            rank: report
            for rank, report in self.survivors.items()
            if report.step is not None and report.step <= limit and rank not in unusable
        }
        if not usable or not self.valid_state_known:
            return None
        step = max(report.step or 0 for report in usable.values())
        newest = next(report for report in usable.values() if report.step == step)
        have = [rank for rank, report in usable.items() if report.step == step]
        can_apply = [rank for rank, report in usable.items() if report.step == step - 1 and report.prepared]
        return step, sorted(have + can_apply), newest

    def stage(self, rank: int) -> int:
        """Index of a rank in its pipeline."""
        return rank // (self.ranks // self.plan.layout.pipeline)

    def covers_all_stages(self, ranks: list[int]) -> bool:
        return len(set(map(self.stage, ranks))) == self.plan.layout.pipeline


@dataclass(slots=True)
class HostChecks:
    """What the nodes have reported about their hosts before the first generation."""

    reports: dict[int, tuple[protocol.HostChecked, float]] = field(default_factory=dict)
    """With the time of arrival."""
    computed: dict[int, list[DeviceResult]] = field(default_factory=dict)
    links: dict[tuple[int, int], protocol.LinkMeasured] = field(default_factory=dict)
    """The last measurement of each pair."""

    def update(self, node: int, report: protocol.HostChecked | protocol.Computed | protocol.LinkMeasured) -> None:
        match report:
            case protocol.HostChecked():
                self.reports[node] = (report, time.time())
            case protocol.Computed():
                self.computed.setdefault(node, []).append(report.result)
            case protocol.LinkMeasured():
                self.links[node, report.peer] = report


@dataclass(slots=True)
class RecoveryRecord:
    """A recovery in progress: what its `recovered` record will say."""

    noticed: float
    failures: list[int] = field(default_factory=list)
    action: str = "restart"
    source: str = "live"
    decided: float = 0.0
    step_before: int | None = None
    """Newest complete step before the failure."""
    restarted: float | None = None


@dataclass(slots=True)
class ControllerState:
    """Everything the controller of one term knows."""

    wanted: Layout
    """Layout that the run asks for."""
    members: dict[int, Member] = field(default_factory=dict)
    generation: Generation | None = None
    checks: HostChecks = field(default_factory=HostChecks)
    rejected: set[int] = field(default_factory=set)
    """Nodes that failed the check before the first generation: they get no ranks and keep no copies."""
    events: list[policy.Event] = field(default_factory=list)
    """What happened and is not handled yet."""
    joined: set[int] = field(default_factory=set)
    """Nodes that joined and are not handled yet."""
    joined_during_recovery: set[int] = field(default_factory=set)
    unreachable: set[int] = field(default_factory=set)
    """Nodes that went silent in this generation, whether they died or this node is cut off from them. A node whose process ended is not
    among them: its machine has said so."""
    history: tuple[Failure, ...] = ()
    failures: int = 0
    """Failures noticed so far in this launch."""
    dead: tuple[int, ...] = ()
    """Ranks without a process while the run waits for a node."""
    first_step: int = 0
    """Step that this launch began from."""
    injected: set[int] = field(default_factory=set)
    """Faults of `--chaos` that have happened, by number."""
    recovery: RecoveryRecord | None = None
    """The recovery whose first step is not complete yet."""
    stop_requested: float | None = None
    """When the run was asked to stop."""
    saving: bool = False
    """The running generation only saves."""
    copy_every: int | None = None
    """Steps between two replicas of the state in host memory; None: no replicas."""
    observing: bool = False
    """Ranks carry out a request (`control/observation`)."""
    question: int = 0
    """Number of the last question to the ranks where they are."""
    locations: dict[int, HangReport] = field(default_factory=dict)
    """Their answers, and what agents have seen of ranks that did not answer."""
    last_stall_end: float = field(default_factory=time.monotonic)
    """When this process last woke from being stopped or starved: silence before that is not the fault of others."""

    def situation(self, run: Run) -> Situation:
        """The input of `recovery/policy`."""
        assert self.generation is not None
        return Situation(
            wanted=self.wanted,
            layout=self.generation.plan.process_layout,
            assignment=self.generation.assignment,
            nodes=self.nodes(),
            history=self.history,
            dead=self.dead,
            first_step=self.first_step,
            settings=run.resilience,
            counts_steps=run.command.program is None,
            saves=run.checkpoint.save,
            batch=run.batch if run.command.program is None and self.generation.plan.devices_per_process == 1 else None,
        )

    @property
    def newest_begin(self) -> protocol.BeginGeneration | None:
        """The newest generation that any node knows of."""
        begins = [member.join.last_begin for member in self.members.values() if member.join.last_begin is not None]
        return max(begins, key=lambda begin: begin.generation, default=None)

    def nodes(self, *, all_of_them: bool = False) -> dict[int, int]:
        """Slots of every node that may train and stays; with `all_of_them`, of those that leave, too. Nodes that are near each other in the
        network are neighbors: ranks fill them in this order."""
        near = sorted(self.members.items(), key=lambda item: (item[1].join.topology, item[0]))
        return {
            number: member.join.slots
            for number, member in near
            if number not in self.rejected and not member.preparing and (all_of_them or member.leaves is None)
        }

    @property
    def leaving(self) -> list[int]:
        return [node for node, member in self.members.items() if member.leaves is not None]

    def replica_servers(self) -> list[Address]:
        return [member.replica_server for node, member in self.members.items() if node not in self.rejected]

    def on_fault(self, event: FaultInjected, chaos: str) -> None:
        """One of the faults of `--chaos` happens now."""
        numbers = (number for number, fault in enumerate(parse(chaos)) if str(fault) == event.fault)
        self.injected |= set(islice((number for number in numbers if number not in self.injected), 1))

    def take_events(self) -> list[policy.Event]:
        """Everything that has happened since the last call."""
        events = [*self.events, *(NodeJoined(node) for node in sorted(self.joined))]
        self.events.clear()
        self.joined.clear()
        return events


class Control:
    """What the controller of one term knows and does: orders to the nodes, waiting for their reports, generations."""

    def __init__(self, agent: NodeServices, term: int):
        self.agent, self.term, self.settings = agent, term, agent.run.resilience
        self.state = ControllerState(wanted=agent.plan.process_layout)
        self._deposed = False
        self._changed = asyncio.Event()
        self._last_heartbeat = time.monotonic()

    @property
    def leads(self) -> bool:
        """Whether this term is still the newest."""
        if not self.agent.registry.holds(self.term, self.agent.name):
            self._deposed = True
        return not self._deposed

    def order(self, order: protocol.Order, only: int | None = None) -> None:
        """Send an order to every node, or to one, if this term is still the newest."""
        if not self.leads:
            return
        order = replace(order, term=self.term)
        body = to_body(codec.encode(order))  # once for all: there may be thousands of nodes
        members = self.state.members
        for member in members.values() if only is None else filter(None, [members.get(only)]):
            self._send(member, order, body)

    def _send(self, member: Member, order: protocol.Order, body: bytes) -> None:
        if member.channel is not None:
            member.channel.post_body(body)
        else:
            self.agent.spawn(self.agent.obey(order))

    async def wait(self, seconds: float) -> None:
        """Wait for a report, unless one has come since the last call."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), seconds)
        self._changed.clear()

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Wait until the condition holds; False if it does not in time."""
        now = time.monotonic()
        deadline = now + seconds
        while not condition():
            # With thousands of ranks this takes milliseconds, and their reports come in thousands.
            checked = time.monotonic() - now
            left = deadline - time.monotonic()
            if left <= 0 or self._deposed:
                return False
            await asyncio.sleep(checked / _CHECKING)
            await self.wait(min(left, 0.25))
            now = time.monotonic()
            self.check_silent_nodes()
        return True

    def check_silent_nodes(self) -> None:
        if self.stalled:
            return  # the reports of the others are still waiting to be read
        now = time.monotonic()
        for node, member in list(self.state.members.items()):
            if member.channel is not None and now - member.last_heard > self.settings.heartbeat:
                member.channel.close()
                self.lose_node(node, f"no sign of life for {now - member.last_heard:.1f} s", silent=True)

    @property
    def stalled(self) -> bool:
        """Whether this process was stopped or starved, and has not sent a heartbeat since."""
        return time.monotonic() - self._last_heartbeat > _STALL

    async def lost_majority(self) -> bool:
        """Whether more nodes have gone silent than are left: then this node may be the one that is cut off."""
        state = self.state
        if not state.unreachable:
            return False

        def heard() -> bool:
            last = min((member.last_heard for member in state.members.values() if member.channel is not None), default=math.inf)
            return time.monotonic() - last < _QUIET * beat_seconds(self.agent.nodes, self.settings.heartbeat)

        await self.until(heard, self.settings.heartbeat)  # others that are silent, too, are lost a moment later
        return len(state.unreachable) > len(state.members)

    async def offer_term(self) -> bool:
        """Let another node lead if any can reach the others; continue in a new term if none claims it. Returns whether this node leads."""
        registry, name = self.agent.registry, self.agent.name
        registry.offer(self.term)
        await self.until(lambda: registry.newest()[0] != self.term, _OFFER_SECONDS)
        if await registry.claim(self.term + 1, name):
            self.term += 1
        return self.leads

    async def step_down(self) -> None:
        """Let a node lead that stays: this one is leaving, and the next generation shall not depend on it."""
        self.agent.registry.offer(self.term)
        self.order(protocol.HandOver())
        self._deposed = True  # records that arrive from now on are the next controller's to write
        deadline = time.monotonic() + _OFFER_SECONDS
        while self.agent.registry.newest()[0] == self.term and time.monotonic() < deadline:
            await asyncio.sleep(_OFFER_POLL)

    def request_stop(self, reason: str) -> None:
        """The run saves and ends."""
        if self.state.stop_requested is None:
            self.state.stop_requested = time.monotonic()
            self.order(protocol.Stop(reason=reason))

    def expect_loss(self, node: int, leave: protocol.Leave) -> None:
        """A node goes away: its ranks move elsewhere first."""
        member = self.state.members[node]
        if member.leaves is not None:
            return
        member.leaves = time.monotonic() + (math.inf if leave.seconds is None else leave.seconds)
        self.state.events.append(NodeLeaving(node))
        if self.state.copy_every is not None:  # copies of others go elsewhere
            self.agent.spawn(self.set_replica_peers())

    def release_leaving(self, generation: Generation) -> None:
        """Let nodes go that are leaving and are not needed any more."""
        for node in self.state.leaving:
            if not generation.ranks_on(node) and self.state.recovery is None:
                self.order(protocol.Release(), node)

    def reject(self, node: int, host: str, message: str) -> None:
        """A host is not fit for this run: it gets no ranks and keeps no copies."""
        self.state.rejected.add(node)
        self.agent.emit(HostRejected(node=node, host=host, message=message))

    def lose_node(self, node: int, reason: str, *, silent: bool = False) -> None:
        """Forget a node. Its ranks are dead. `silent`: it may be alive, but not be reachable from here."""
        state = self.state
        if state.members.pop(node, None) is None:
            return
        if silent:
            state.unreachable.add(node)
        state.joined.discard(node)
        generation = state.generation
        if generation is None or not generation.ranks_on(node):
            if state.copy_every is not None:  # it may have kept copies of others
                self.agent.spawn(self.set_replica_peers())
            return
        generation.dead |= generation.ranks_on(node)
        state.events.append(Failure("node lost", None, generation.step, f"node {node}: {reason}", node))
        self._changed.set()

    async def ask(self, generation: Generation, ranks: list[int]) -> None:
        """Ask ranks for their location, then their agents about those that do not answer."""
        state = self.state
        state.locations.clear()
        state.question += 1
        self.order(protocol.LocateRanks(generation=generation.number, question=state.question))

        def unanswered() -> list[int]:
            return [rank for rank in ranks if rank not in state.locations]

        await self.until(lambda: bool(state.events) or not unanswered(), _ANSWER_TIMEOUT)
        if silent := unanswered():
            self.order(protocol.Inspect(generation=generation.number, question=state.question, ranks=silent))
            await self.until(lambda: bool(state.events) or not unanswered(), _INSPECT_TIMEOUT)

    async def stacks(self, generation: Generation, ranks: list[int]) -> dict[int, str]:
        """The stacks of these ranks, from their own reports or from outside."""
        await self.ask(generation, ranks)
        locations = {rank: self.state.locations.get(rank, HangReport()) for rank in ranks}
        return {rank: location.get("stack") or location.get("dump") or "" for rank, location in locations.items()}

    def kill_hung(self, ranks: list[int], reason: str, stack: str) -> None:
        assert self.state.generation is not None
        failure = protocol.RankFailure(cause="hung", reason=reason, traceback=stack)
        self.order(protocol.Kill(generation=self.state.generation.number, ranks=ranks, failure=failure))

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
        state = self.state
        number = 0 if state.generation is None else state.generation.number + 1
        self.agent.stores[number] = KeyValueStore()
        state.copy_every = copy_every(self.agent.run, plan, assignment)
        if state.copy_every is not None:
            await self.set_replica_peers()
        elif number == 0 and (problem := no_room_for_replicas(self.agent.run, plan, assignment)) is not None:
            self.agent.emit(Warned(message=problem))
        state.generation = Generation(number, plan, assignment, self.term)
        state.unreachable.clear()
        for node, own in _by_node(assignment, names).items():
            if node in state.members:
                keep = protocol.KeepWorkers(term=self.term, generation=number, names=own)
                self._send(state.members[node], keep, to_body(codec.encode(keep)))
        self.order(
            protocol.BeginGeneration(
                generation=number,
                plan=plan,
                nodes=[[node, len(list(ranks))] for node, ranks in groupby(assignment)],
                source=source,
                store=list(self.agent.address),
                copy_every=state.copy_every,
                save_only=save_only,
                author=self.agent.node,
                injected=sorted(state.injected),
            )
        )

    async def set_replica_peers(self) -> None:
        """Tell the replica servers of all nodes where the others are. Nodes without ranks keep copies, too."""
        servers = {node: self.state.members[node].replica_server for node in self.state.nodes()}
        await asyncio.to_thread(replica_index.set_peers, servers, self.agent.token, self.agent.run.checkpoint.memory_copies)

    def end_stopped(self, step: int) -> None:
        """End the run, which was asked to stop, after this step, whose state needs no saving."""
        run, reason = self.agent.run, self.agent.stopping or "asked to stop"
        self.agent.emit(Stopped(step=step, reason=reason, saved=run.resumable))
        self.end(protocol.stop_code(run))

    def end(self, code: int, reason: str | None = None, rank: int | None = None, traceback: str = "") -> None:
        """End the run: tell all other nodes, then this one."""
        if reason is not None:
            self.agent.emit(WorkerFailed(rank=rank, reason=reason, traceback=traceback))
        outcome = protocol.Outcome(
            code=code, reason=reason, rank=rank, traceback=traceback, recorded=True, nodes=[*self.state.members]
        )
        for member in self.state.members.values():
            if member.channel is not None:
                member.channel.post(codec.encode(protocol.Done(term=self.term, outcome=outcome)))
        asyncio.get_running_loop().call_later(0.05, self.agent.finish, outcome)
        self.agent.outcome = outcome


def _by_node(assignment: Sequence[int], names: Mapping[int, str | None]) -> dict[int, dict[str, str]]:
    """The processes that each node keeps, by rank."""
    kept: dict[int, dict[str, str]] = {}
    for rank, node in enumerate(assignment):
        if (name := names.get(rank)) is not None:
            kept.setdefault(node, {})[str(rank)] = name
    return kept


def copy_every(run: Run, plan: Plan, assignment: Sequence[int]) -> int | None:
    """Steps between two replicas of the state in host memory, as the run file says; None: no replicas. By default they are taken after every
    step, if the loss of a rank or node would lose state and memory is plentiful."""
    if run.checkpoint.memory_every is not None and run.command.program is None:
        return run.checkpoint.memory_every
    need = _default_replica_bytes(run, plan, assignment)
    return 1 if need is not None and need <= shm_slots.default_room() else None


def no_room_for_replicas(run: Run, plan: Plan, assignment: Sequence[int]) -> str | None:
    """A sentence, if the loss of a rank or node would lose state and there is too little memory for replicas that nobody asked for."""
    need, room = _default_replica_bytes(run, plan, assignment), shm_slots.default_room()
    if run.checkpoint.memory_every is not None or need is None or need <= room:
        return None
    since = "the last checkpoint" if run.checkpoint.save else "the first"
    return (
        f"The state is not copied into host memory, because copies of {plan.parameters / 1e6:,.1f} M parameters take "
        f"{need / 2**20:,.0f} MiB on a node, and there is room for {room / 2**20:,.0f}: a lost rank costs all steps since {since}. "
        "To copy all the same, set checkpoint.memory_every; a container may need more shared memory (--shm-size)."
    )


def _default_replica_bytes(run: Run, plan: Plan, assignment: Sequence[int]) -> float | None:
    """Memory of a node for replicas that nobody asked for; None: they are not needed."""
    if run.command.program is not None or run.resilience.restarts == 0:
        return None
    copies = run.checkpoint.memory_copies
    # Replicas differ between synchronizations, and processes of the XLA engine do not survive a generation.
    reused = run.optimizer.sync_every == 1 and run.engine.name == "torch"
    replicated = copies == 1 and reused and replicated_elsewhere(plan.layout, assignment)
    if replicated:
        return None
    nodes, slots = len(set(assignment)), len(shm_slots.slots_for(run, plan.layout))
    # Each node holds the replicas of its own ranks and of its neighbors'.
    return slots * (plan.trained or plan.parameters) * BYTES_PER_PARAMETER * min(nodes, 1 + copies) / nodes
