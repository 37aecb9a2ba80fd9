"""What to do when something happens to a run: a pure function of the situation. The live controller and the simulator call it.

The ladder, cheapest first: start a dead worker again where it was; move the ranks of a lost node to free places; go on with
fewer ranks on another layout; wait for a node. With more room than the layout uses, grow back towards what was wanted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal

from phalanx.recovery.history import failures, flatten, verdict
from phalanx.recovery.relayout import (
    Legal,
    assign_nodes,
    reassign,
    relayout,
    relayout_cost,
    retained_ranks,
    with_valid_settings,
)
from phalanx.recovery.state import (
    Action,
    Corrupt,
    Disconnected,
    Event,
    NewGeneration,
    NoChange,
    NodeJoined,
    NodeLost,
    Situation,
    Wait,
    WorkerDied,
)
from phalanx.spec.layout import Layout


def decide(situation: Situation, event: Event, legal: Legal) -> Action:
    """The action that answers an event, or several at once."""
    assert len(situation.assignment) == situation.layout.ranks, "every rank of the running generation has a node"
    end = verdict(situation, failures(situation, event))
    if end is not None:
        return end
    scene = _scene(situation, event)
    grown = _grow(scene, legal)
    if not (scene.dead or scene.homeless or scene.broken):
        return grown or NoChange()
    # One interruption is enough: where there is room for more, the run need not come back as small as it was.
    return _go_on(scene, legal) or grown or _same_layout(scene) or _shrink(scene, legal)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scene:
    """The situation after the event."""

    situation: Situation
    living: dict[int, int]
    """Slots of the living nodes."""
    dead: frozenset[int]
    """Old ranks without a process, or with one that is not to be gone on with."""
    places: dict[int, int]
    """Nodes of the old ranks that can run where they ran."""
    broken: bool
    """The generation is over though nobody died."""

    @property
    def slots(self) -> int:
        return sum(self.living.values())

    @property
    def homeless(self) -> list[int]:
        """Old ranks that cannot run where they ran."""
        return [rank for rank in range(self.situation.layout.ranks) if rank not in self.places]

    @property
    def survivors(self) -> dict[int, int]:
        """Nodes of the old ranks whose processes go on."""
        return {rank: node for rank, node in self.places.items() if rank not in self.dead}


def _scene(situation: Situation, event: Event) -> _Scene:
    events, assignment = list(flatten(event)), situation.assignment
    joined = {one.node for one in events if isinstance(one, NodeJoined)}
    lost = {one.node for one in events if isinstance(one, NodeLost)}
    lost |= {assignment[one.rank] for one in events if isinstance(one, WorkerDied) and not one.node_lives}
    # A node may be lost and back in the same breath: it has room then, but nothing of what ran on it.
    living = {node.number: node.slots for node in situation.nodes if node.number not in lost - joined}
    dead = set(situation.dead) | {one.rank for one in events if isinstance(one, WorkerDied)}
    for one in events:
        if isinstance(one, Corrupt):
            dead |= set(range(len(assignment))) if one.rank is None else {one.rank}
    dead |= {rank for rank, node in enumerate(assignment) if node in lost or node not in living}
    return _Scene(
        situation=situation,
        living=living,
        dead=frozenset(dead),
        places=retained_ranks(situation, living, dead),
        broken=any(isinstance(one, Disconnected) for one in events),
    )


def _grow(scene: _Scene, legal: Legal) -> NewGeneration | None:
    """A better layout than the running one, where there is room for it."""
    wanted, layout = scene.situation.wanted, scene.situation.layout
    if layout == wanted:
        return None
    best = relayout(wanted, scene.slots, legal, scene.situation.batch)
    return None if best is None or relayout_cost(wanted, best) >= relayout_cost(wanted, layout) else _go(scene, "grow", best)


def _go_on(scene: _Scene, legal: Legal) -> NewGeneration | None:
    """The healthy replicas by themselves, as many as may be, all in their own processes: nothing has to be started."""
    layout = scene.situation.layout
    replicas = layout.data or 1
    if not scene.situation.continue_degraded:
        return None
    inner = layout.shard * layout.context * layout.tensor
    survivors = scene.survivors
    living = Counter(rank // inner % replicas for rank in survivors)
    healthy = [replica for replica in range(replicas) if living[replica] == layout.ranks // replicas]
    if len(healthy) == replicas:
        return None
    for count in range(len(healthy), 0, -1):
        smaller = with_valid_settings(scene.situation.wanted, replace(layout, data=count))
        if legal(smaller):
            old = [rank for rank in range(layout.ranks) if rank // inner % replicas in healthy[:count]]
            return NewGeneration("shrink", smaller, tuple(survivors[rank] for rank in old), tuple(old))
    return None


def _same_layout(scene: _Scene) -> NewGeneration | None:
    """The same ranks again: survivors stay what they are, dead ones start where they were, homeless ones in free places."""
    layout, homeless = scene.situation.layout, scene.homeless
    taken = Counter(scene.places.values())
    free = {node: slots - taken[node] for node, slots in scene.living.items()}
    if sum(free.values()) < len(homeless):
        return None
    # The emptiest first, so that the ranks of a lost node stay together on a spare one.
    order = sorted(free, key=lambda node: (-free[node], node))
    places = assign_nodes(homeless, layout.tensor, {node: free[node] for node in order}, scene.places)
    ranks, survivors = range(layout.ranks), scene.survivors
    return NewGeneration(
        "spare" if homeless else "restart",
        layout,
        tuple(places[rank] for rank in ranks),
        tuple(rank if rank in survivors else None for rank in ranks),
    )


def _shrink(scene: _Scene, legal: Legal) -> NewGeneration | Wait:
    situation, dead = scene.situation, tuple(sorted(scene.dead))
    room = f"{len(scene.living)} node{'' if len(scene.living) == 1 else 's'} with {scene.slots} place{'' if scene.slots == 1 else 's'}"
    needs = f"the layout has {situation.layout.ranks} ranks, but what is left is {room}"
    if not situation.shrink:
        return Wait(f"{needs}, and resilience.shrink = false", dead)
    best = relayout(situation.wanted, scene.slots, legal, situation.batch)
    if best is None:
        return Wait(f"{needs}, and no layout of so few ranks can be run", dead)
    return _go(scene, "shrink", best)


def _go(scene: _Scene, action: Literal["shrink", "grow"], layout: Layout) -> NewGeneration:
    return NewGeneration(action, layout, *reassign(layout, scene.living, scene.survivors))
