"""Faults of a simulated run, and the decisions of the live recovery policy about them, on a cluster of equal nodes: a decision depends on the
number of nodes and on what the failed node holds, not on which node it is. So `recovery/policy.decide`, which takes milliseconds, decides each
kind of situation once. What depends on earlier failures (repeated failures, too many failures) is decided each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from phalanx.planning.machines.cluster import Failures
from phalanx.recovery.policy import decide, failures, updated_history, verdict
from phalanx.recovery.relayout import initial_assignment
from phalanx.recovery.state import Action, Event, Failure, NewGeneration, NodeJoined, Situation, Wait
from phalanx.spec.layout import Layout
from phalanx.spec.run import Resilience

FaultKind = Literal["node", "worker", "connection", "corrupt"]
"""What a supervisor sees: a lost node, a dead process on a healthy node, broken connections, a replica that differs."""

_COMPONENTS: tuple[tuple[FaultKind, tuple[str, ...]], ...] = (
    ("corrupt", ("corrupt", "sdc", "silent")),
    ("worker", ("software", "bug", "collective", "dependency", "restart")),
    ("connection", ("switch", "cable", "network", "link", "fabric", "ici")),
)
"""Parts of component names for each kind. Any other component, such as a GPU, costs its whole node: the node is removed and repaired."""

_PROCESS_DETECTION = 0.1
"""Seconds until a supervisor notices that one of its processes is gone."""

_HANG_STEPS = 8
"""The live watchdog inspects a step that takes this many times the usual time."""

_ENOUGH_SPARES = 2
"""Free nodes that a decision is shown while the wanted layout runs."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One failure of a device in use."""

    component: str
    kind: FaultKind
    device: int
    """The rank that runs on the device."""


def fault_kind(component: str) -> FaultKind:
    """The kind of fault that a component causes."""
    name = component.lower()
    return next((kind for kind, words in _COMPONENTS if any(word in name for word in words)), "node")


def detection_seconds(kind: FaultKind, settings: Resilience, step: float) -> float:
    """Seconds until the supervisors notice a fault of this kind; `step`: seconds of a step."""
    if kind == "connection":  # no process is gone: all ranks wait until the hang detector reacts
        return max(settings.hang, _HANG_STEPS * step)
    return {"node": settings.heartbeat, "worker": _PROCESS_DETECTION, "corrupt": 0.0}[kind]


def mean_detection_seconds(failures: Failures, settings: Resilience, step: float) -> float:
    """Mean over the components, weighted by how often each fails."""
    weighted = sum(rate * detection_seconds(fault_kind(component), settings, step) for component, rate in failures.rates)
    return weighted / failures.rate if failures.rate else 0.0


@dataclass(frozen=True, slots=True, eq=False)
class PlacedLayout:
    """A layout on nodes. Nodes are numbered in the order in which ranks first use them."""

    layout: Layout
    assignment: tuple[int, ...]
    node_contents: tuple[tuple[int, int], ...]
    """For each node: the number of its ranks, and of the replicas that they belong to."""

    @property
    def used(self) -> int:
        return len(self.node_contents)


class DecisionCache:
    """What all simulated runs share: the cluster's nodes, the wanted layout, and the decisions made so far."""

    def __init__(self, wanted: Layout, slots: int, legal: Callable[[Layout], bool], settings: Resilience, batch: int):
        self.wanted, self.slots, self.legal, self.settings, self.batch = wanted, slots, legal, settings, batch
        self.merge_equal_nodes = True
        """False: each node is decided about by itself. Tests compare both."""
        self.decided = 0
        """Calls of the live policy."""
        self._placed: dict[tuple[Layout, tuple[int, ...]], PlacedLayout] = {}
        self.decisions: dict[object, tuple[Action, PlacedLayout | None]] = {}

    @cached_property
    def initial(self) -> PlacedLayout:
        """The wanted layout on healthy nodes."""
        nodes = range(-(-self.wanted.ranks // self.slots))
        return self.place(self.wanted, initial_assignment(self.wanted, dict.fromkeys(nodes, self.slots)))

    def place(self, layout: Layout, assignment: tuple[int, ...]) -> PlacedLayout:
        numbers: dict[int, int] = {}
        assignment = tuple(numbers.setdefault(node, len(numbers)) for node in assignment)
        key = layout, assignment
        if key not in self._placed:
            inner, replicas = layout.shard * layout.context * layout.tensor, layout.data or 1
            ranks: list[list[int]] = [[] for _ in numbers]
            for rank, node in enumerate(assignment):
                ranks[node].append(rank)
            contents = tuple((len(own), len({rank // inner % replicas for rank in own})) for own in ranks)
            self._placed[key] = PlacedLayout(layout, assignment, contents)
        return self._placed[key]


class SimulatedPolicy:
    """The state of one simulated cluster and the decisions about it. A device has the number of the rank that runs on it."""

    def __init__(self, cache: DecisionCache, nodes: int):
        self._cache = cache
        self.placed = cache.initial
        self.free = nodes - self.placed.used
        """Healthy nodes without ranks."""
        self.missing: frozenset[int] = frozenset()
        """Lost nodes of the layout, while the run waits for others."""
        self._dead: tuple[int, ...] = ()
        self._history: tuple[Failure, ...] = ()
        self.first_step = 0

    @property
    def layout(self) -> Layout:
        return self.placed.layout

    @property
    def waiting(self) -> bool:
        return bool(self._dead)

    @property
    def healthy(self) -> int:
        """Number of healthy nodes."""
        return self.placed.used - len(self.missing) + self.free

    def on_fault(self, fault: Fault, step: int) -> Action:
        """Decides what to do about a failure of a device in use."""
        rank = fault.device
        node = self.placed.assignment[rank]
        # The message names the true node and rank: the history tells failures apart by it.
        event = _event(fault, node, rank, step)
        situation = replace(self._situation(), history=self._history)
        end = verdict(situation, failures(situation, [event]))
        if end is not None:
            self.missing |= {node} if fault.kind == "node" else set()
            return end
        if self._cache.merge_equal_nodes:
            contents = self.placed.node_contents[node]
            node = next(n for n, other in enumerate(self.placed.node_contents) if other == contents and n not in self.missing)
            rank = self.placed.assignment.index(node)
        lost = frozenset({node}) if fault.kind == "node" else frozenset()
        action = self._decide((fault.kind, rank), _event(fault, node, rank, step), lost)
        self._history = updated_history(situation, [event], action)
        return action

    def on_join(self) -> Action:
        """Decides what to do with a node that has returned."""
        self.free += 1
        return self._decide(("joined",), NodeJoined(self.placed.used + self._visible_free - 1), frozenset())

    def on_relaunch(self, step: int, nodes: int) -> Action | None:
        """Decides what a new launch on `nodes` nodes does; None if the wanted layout fits."""
        self._history, self._dead, self.missing, self.first_step = (), (), frozenset(), step
        whole = self._cache.initial
        self.placed, self.free = whole, max(0, nodes - whole.used)
        missing = whole.used - nodes
        if missing <= 0:
            return None
        # A launch on too few nodes is decided like the loss of the missing ones.
        lost = frozenset(range(whole.used - missing, whole.used))
        return self._decide(
            ("launch", nodes), Failure("connection lost", None, step, "the run is started on fewer nodes"), lost
        )

    @property
    def _visible_free(self) -> int:
        """Free nodes that a decision is shown. While the wanted layout runs, one free node can replace whatever a single event takes:
        the exact number would only multiply the cached situations."""
        whole = self.layout == self._cache.wanted and not self.missing
        return min(self.free, _ENOUGH_SPARES) if whole and self._cache.merge_equal_nodes else self.free

    def _situation(self) -> Situation:
        """Without nodes and history."""
        return Situation(
            wanted=self._cache.wanted, layout=self.layout, assignment=self.placed.assignment, nodes={}, dead=self._dead,
            first_step=self.first_step, settings=self._cache.settings, batch=self._cache.batch,
        )  # fmt: skip

    def _decide(self, kind: tuple[object, ...], event: Event, lost: frozenset[int]) -> Action:
        key = (self.placed, self._visible_free, self.missing, self._dead, kind)
        if key not in self._cache.decisions:
            self._cache.decided += 1
            gone, numbers = self.missing | lost, range(self.placed.used + self._visible_free)
            nodes = {number: self._cache.slots for number in numbers if number not in gone}
            unlimited = replace(self._cache.settings, restarts=10**9)
            action = decide(replace(self._situation(), nodes=nodes, settings=unlimited), [event], self._cache.legal)
            after = self._cache.place(action.layout, action.assignment) if isinstance(action, NewGeneration) else None
            self._cache.decisions[key] = action, after
        action, after = self._cache.decisions[key]
        if after is not None:
            healthy = self.healthy - len(lost - self.missing)
            self.placed, self.missing, self._dead = after, frozenset(), ()
            self.free = healthy - after.used
        elif isinstance(action, Wait):
            self.missing, self._dead = self.missing | lost, action.dead
        return action


def _event(fault: Fault, node: int, rank: int, step: int) -> Event:
    """The event that the agents of a live run would report."""
    if fault.kind == "node":
        return Failure("node lost", None, step, f"node {node}: {fault.component} failed", node)
    if fault.kind == "worker":
        return Failure("died", rank, step, f"rank {rank} died: {fault.component}")
    if fault.kind == "corrupt":
        return Failure("corrupt", rank, step, f"rank {rank} holds other numbers than its replicas: {fault.component}")
    return Failure("connection lost", None, step, f"connections of node {node} broke: {fault.component}")
