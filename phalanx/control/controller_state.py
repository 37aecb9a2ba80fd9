"""What the controller knows: the nodes, the running generation of ranks, and what has happened and is not handled yet. Plain data.

The parts of the controller (`startup`, `watchdog`, `recover`) read and change this state. They reach the node they run on through
`NodeServices`, which `control/agent` provides, and the controller's own actions through `Control`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from phalanx.control import protocol
from phalanx.control.channel import Channel
from phalanx.control.election import Terms
from phalanx.control.store_server import KeyValueStore
from phalanx.events.heartbeat import Beat
from phalanx.events.records import Event
from phalanx.events.rundir import RunDir
from phalanx.recovery import state as policy
from phalanx.recovery.state import Failure, Node, NodeJoined, Situation, WorkerDied
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan
from phalanx.spec.run import Resilience, Run


@dataclass(slots=True)
class Member:
    """A node that has joined the run."""

    node: int
    name: str
    slots: int
    replica_server: tuple[str, int]
    channel: Channel | None
    """None: the controller's own node."""
    last_heard: float


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
    dead: dict[int, WorkerDied] = field(default_factory=dict)
    beats: dict[int, Beat] = field(default_factory=dict)
    """Newest heartbeat of each rank, on this machine's clock."""
    survivors: dict[int, protocol.SurvivorReport] = field(default_factory=dict)
    handed_off: dict[int, protocol.HandedOff] = field(default_factory=dict)
    restored: dict[int, int] = field(default_factory=dict)
    """Step that each rank has restored."""
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

    @property
    def ranks(self) -> int:
        return len(self.assignment)

    @property
    def living(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.dead]

    @property
    def step(self) -> int | None:
        """Newest complete step that any rank has reported."""
        reported = [report.step for report in self.survivors.values() if report.step is not None]
        beats = [beat.step for beat in self.beats.values()]
        return max([*beats, *reported, *self.restored.values(), *self.steps_of_dead], default=None)

    @property
    def corrupt_ranks(self) -> list[int]:
        """Ranks whose values differ from their replicas."""
        return [] if self.corruption is None else list(self.corruption.culprits)

    @property
    def valid_state_known(self) -> bool:
        """Whether it is known whose state is right. Wrong gradients were not applied: if only they differ, every state is right."""
        return self.corruption is None or bool(self.corrupt_ranks) or self.corruption.what == "gradients"

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
        usable = {rank: report for rank, report in self.survivors.items() if report.step is not None and rank in self.living}
        usable = (
            {rank: report for rank, report in usable.items() if rank not in self.corrupt_ranks}
            if self.valid_state_known
            else {}
        )
        if not usable:
            return None
        step = max(report.step or 0 for report in usable.values())
        newest = next(report for report in usable.values() if report.step == step)
        have = [rank for rank, report in usable.items() if report.step == step]
        can_apply = [rank for rank, report in usable.items() if report.step == step - 1 and report.prepared]
        return step, sorted(have + can_apply), newest

    def covers_all_stages(self, ranks: list[int]) -> bool:
        """Whether these ranks include one of each pipeline rank."""
        per_stage = self.ranks // self.plan.layout.pipeline
        return len({rank // per_stage for rank in ranks}) == self.plan.layout.pipeline


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
    events: list[policy.Event] = field(default_factory=list)
    """What happened and is not handled yet."""
    joined: set[int] = field(default_factory=set)
    """Nodes that joined and are not handled yet."""
    joined_during_recovery: set[int] = field(default_factory=set)
    history: tuple[Failure, ...] = ()
    failures: int = 0
    """Failures noticed so far in this launch."""
    dead: tuple[int, ...] = ()
    """Ranks without a process while the run waits for a node."""
    first_step: int = 0
    """Step that this launch began from."""
    recovery: RecoveryRecord | None = None
    """The recovery whose first step is not complete yet."""
    stop_requested: float | None = None
    """When the run was asked to stop."""
    saving: bool = False
    """The running generation only saves."""
    copy_every: int | None = None
    """Steps between two replicas of the state in host memory; None: no replicas."""
    joins: dict[int, protocol.Join] = field(default_factory=dict)
    begins: list[protocol.BeginGeneration] = field(default_factory=list)
    """Newest generations that joining nodes know of."""
    last_stall_end: float = field(default_factory=time.monotonic)
    """When this process last woke from being stopped or starved: silence before that is not the fault of others."""

    def situation(self, settings: Resilience, batch: int) -> Situation:
        """The input of `recovery/policy`."""
        assert self.generation is not None
        return Situation(
            wanted=self.wanted,
            layout=self.generation.plan.layout,
            assignment=self.generation.assignment,
            nodes=self.nodes(),
            history=self.history,
            dead=self.dead,
            first_step=self.first_step,
            restarts=settings.restarts,
            shrink=settings.shrink,
            continue_degraded=settings.continue_degraded,
            batch=batch,
        )

    def nodes(self) -> tuple[Node, ...]:
        return tuple(Node(member.node, member.slots) for _, member in sorted(self.members.items()))

    def replica_servers(self) -> list[tuple[str, int]]:
        return [member.replica_server for member in self.members.values()]

    def take_events(self) -> list[policy.Event]:
        """Everything that has happened since the last call."""
        events = [*self.events, *(NodeJoined(node) for node in sorted(self.joined))]
        self.events.clear()
        self.joined.clear()
        return events


class NodeServices(Protocol):
    """What a controller needs from the agent of the node it runs on."""

    run: Run
    plan: Plan
    rundir: RunDir
    node: int
    nodes: int
    name: str
    token: str
    address: tuple[str, int]
    terms: Terms
    stores: dict[int, KeyValueStore]
    last_begin: protocol.BeginGeneration | None
    stopping: str | None
    outcome: protocol.Outcome | None

    def emit(self, event: Event) -> None: ...
    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]: ...
    async def obey(self, order: protocol.Order) -> None: ...
    def finish(self, outcome: protocol.Outcome) -> None: ...


class Control(Protocol):
    """What the parts of the controller need from it."""

    state: ControllerState
    agent: NodeServices
    settings: Resilience
    term: int

    @property
    def leads(self) -> bool: ...
    @property
    def stalled(self) -> bool: ...
    def order(self, order: protocol.Order) -> None: ...
    async def until(self, condition: Callable[[], bool], seconds: float) -> bool: ...
    async def begin(
        self,
        plan: Plan,
        assignment: tuple[int, ...],
        names: dict[int, str | None],
        source: protocol.StateSource,
        *,
        save_only: bool = False,
    ) -> None: ...
    def end(self, code: int, reason: str | None = None, rank: int | None = None, traceback: str = "") -> None: ...
    async def stacks(self, ranks: list[int]) -> dict[int, str]: ...
