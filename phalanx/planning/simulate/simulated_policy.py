"""The live recovery policy, asked by a simulation: `recovery/policy.decide` on the state of a cluster of equal nodes.

A decision about thousands of ranks takes some milliseconds, and a simulation asks thousands of times. Nodes are equal, so what is decided
depends on how many there are and on what the struck one holds, not on which it is: each kind of situation is decided once, by the live
function, and remembered. What depends on the past (the same failure again, too many of them) is asked of the live functions each time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from phalanx.planning.simulate.simulated_faults import Fault
from phalanx.recovery.history import failures, updated_history, verdict
from phalanx.recovery.policy import decide
from phalanx.recovery.relayout import initial_assignment
from phalanx.recovery.state import (
    Action,
    Corrupt,
    Disconnected,
    Event,
    Failure,
    NewGeneration,
    Node,
    NodeJoined,
    NodeLost,
    Situation,
    Wait,
    WorkerDied,
)
from phalanx.spec.layout import Layout
from phalanx.spec.run import Resilience

_ENOUGH = 2
"""Free nodes."""


@dataclass(frozen=True, slots=True, eq=False)
class Ground:
    """A layout on nodes, which are numbered in the order in which ranks first come to them."""

    layout: Layout
    assignment: tuple[int, ...]
    held: tuple[tuple[int, int], ...]
    """Of each node: its ranks, and the replicas that these belong to."""

    @property
    def used(self) -> int:
        return len(self.held)


class Situations:
    """What does not change from run to run: the cluster's nodes, the wanted layout, and decisions already made."""

    def __init__(self, wanted: Layout, slots: int, legal: Callable[[Layout], bool], settings: Resilience, batch: int):
        self.wanted, self.slots, self.legal, self.settings, self.batch = wanted, slots, legal, settings, batch
        self.merge = True
        """Whether equal nodes are taken for each other; False: each is decided about by itself, for tests."""
        self.asked = 0
        """Decisions that were really made."""
        self._grounds: dict[tuple[Layout, tuple[int, ...]], Ground] = {}
        self.known: dict[object, tuple[Action, Ground | None]] = {}

    @cached_property
    def first(self) -> Ground:
        """The wanted layout, where nothing is lost."""
        nodes = range(-(-self.wanted.ranks // self.slots))
        return self.ground(self.wanted, initial_assignment(self.wanted, [Node(number, self.slots) for number in nodes]))

    def ground(self, layout: Layout, assignment: tuple[int, ...]) -> Ground:
        names: dict[int, int] = {}
        assignment = tuple(names.setdefault(node, len(names)) for node in assignment)
        key = layout, assignment
        if key not in self._grounds:
            inner, replicas = layout.shard * layout.context * layout.tensor, layout.data or 1
            ranks: list[list[int]] = [[] for _ in names]
            for rank, node in enumerate(assignment):
                ranks[node].append(rank)
            held = tuple((len(some), len({rank // inner % replicas for rank in some})) for some in ranks)
            self._grounds[key] = Ground(layout, assignment, held)
        return self._grounds[key]


class Policy:
    """The decisions of one simulated run. Devices are numbered by the ranks that run on them."""

    def __init__(self, situations: Situations, nodes: int):
        self._s = situations
        self.ground = situations.first
        self.free = nodes - self.ground.used
        """Living nodes that no rank is on."""
        self.holes: frozenset[int] = frozenset()
        """Nodes of the ground that are gone, while the run waits."""
        self._dead: tuple[int, ...] = ()
        self._history: tuple[Failure, ...] = ()
        self.begun = 0

    @property
    def layout(self) -> Layout:
        return self.ground.layout

    @property
    def waits(self) -> bool:
        return bool(self._dead)

    @property
    def living(self) -> int:
        """Nodes."""
        return self.ground.used - len(self.holes) + self.free

    def node_of(self, device: int) -> int:
        return self.ground.assignment[device]

    def fault(self, fault: Fault, step: int) -> Action:
        """What is done about a failure of a used device."""
        node, rank = self.node_of(fault.device), fault.device
        # The words name the true node and rank: by them the history tells failures apart.
        event = _event(fault, node, rank, step)
        asked = Situation(
            wanted=self._s.wanted, layout=self.ground.layout, assignment=self.ground.assignment, nodes=(), history=self._history,
            begun=self.begun, restarts=self._s.settings.restarts,
        )  # fmt: skip
        end = verdict(asked, failures(asked, event))
        if end is not None:
            self.holes |= {node} if fault.kind == "node" else set()
            return end
        if self._s.merge:
            held = self.ground.held[node]
            node = next(one for one, has in enumerate(self.ground.held) if has == held and one not in self.holes)
            rank = self.ground.assignment.index(node)
        lost = frozenset({node}) if fault.kind == "node" else frozenset()
        action = self._decide((fault.kind, rank), _event(fault, node, rank, step), lost)
        self._history = updated_history(asked, event, action)
        return action

    def joined(self) -> Action:
        """A node is back, or its broken worker."""
        self.free += 1
        return self._decide(("joined",), NodeJoined(self.ground.used + self._shown - 1), frozenset())

    def lose_idle(self) -> None:
        """A node that nothing ran on: nobody notices."""
        self.free -= 1

    def relaunched(self, step: int, nodes: int) -> Action | None:
        """The run was started anew, on so many nodes: what the launch begins with; None: all that was wanted."""
        self._history, self._dead, self.holes, self.begun = (), (), frozenset(), step
        whole = self._s.first
        self.ground, self.free = whole, max(0, nodes - whole.used)
        missing = whole.used - nodes
        if missing <= 0:
            return None
        # A launch on too few nodes is decided like the loss of the others.
        lost = frozenset(range(whole.used - missing, whole.used))
        return self._decide(("launch", nodes), Disconnected(step, "the run is started on fewer nodes"), lost)

    @property
    def _shown(self) -> int:
        """Free nodes that a decision is told of. Where all that was wanted runs, one of them takes whatever a single event makes homeless:
        how many more there are would only make many situations of one."""
        return min(self.free, _ENOUGH) if self._s.merge and self.layout == self._s.wanted and not self.holes else self.free

    def _situation(self, lost: frozenset[int]) -> Situation:
        gone = self.holes | lost
        numbers = [node for node in range(self.ground.used + self._shown) if node not in gone]
        return Situation(
            wanted=self._s.wanted, layout=self.ground.layout, assignment=self.ground.assignment,
            nodes=tuple(Node(number, self._s.slots) for number in numbers), dead=self._dead, begun=self.begun, restarts=10**9,
            shrink=self._s.settings.shrink, continue_degraded=self._s.settings.continue_degraded, batch=self._s.batch,
        )  # fmt: skip

    def _decide(self, what: tuple[object, ...], event: Event, lost: frozenset[int]) -> Action:
        key = (self.ground, self._shown, self.holes, self._dead, what)
        if key not in self._s.known:
            self._s.asked += 1
            action = decide(self._situation(lost), event, self._s.legal)
            after = self._s.ground(action.layout, action.assignment) if isinstance(action, NewGeneration) else None
            self._s.known[key] = action, after
        action, after = self._s.known[key]
        if after is not None:
            living = self.living - len(lost - self.holes)
            self.ground, self.holes, self._dead = after, frozenset(), ()
            self.free = living - after.used
        elif isinstance(action, Wait):
            self.holes, self._dead = self.holes | lost, action.dead
        return action


def _event(fault: Fault, node: int, rank: int, step: int) -> Event:
    """As the agents of a live run would tell it."""
    if fault.kind == "node":
        return NodeLost(node, step, f"node {node}: {fault.component} failed")
    if fault.kind == "worker":
        return WorkerDied(rank, step, "died", f"rank {rank} died: {fault.component}")
    if fault.kind == "corrupt":
        return Corrupt(rank, step, f"rank {rank} holds other numbers than its replicas: {fault.component}")
    return Disconnected(step, f"connections of node {node} broke: {fault.component}")
