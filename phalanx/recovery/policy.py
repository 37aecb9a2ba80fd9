"""What to do when something happens to a run: a pure function of the situation. The live controller and the simulator call it.

The ladder, cheapest first: restart a dead worker on its node; move the ranks of a lost node to free slots; continue with fewer ranks on
another layout; wait for a node. With more slots than the layout uses, grow back towards the wanted layout.
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
    """The action that answers an event. `legal`: whether a layout can be run."""
    assert len(situation.assignment) == situation.layout.ranks, "every rank of the running generation has a node"
    end = verdict(situation, failures(situation, event))
    if end is not None:
        return end
    aftermath = _aftermath(situation, event)
    grown = _grow(aftermath, legal)
    if not (aftermath.dead or aftermath.displaced or aftermath.broken):
        return grown or NoChange()
    # If the run is interrupted anyway, it grows at once rather than twice.
    return _continue_degraded(aftermath, legal) or grown or _same_layout(aftermath) or _shrink(aftermath, legal)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Aftermath:
    """The situation after the event."""

    situation: Situation
    living: dict[int, int]
    """Living nodes and their slots."""
    dead: frozenset[int]
    """Old ranks without a process, or with one whose state must be discarded."""
    places: dict[int, int]
    """Old ranks that can stay on their node, and that node."""
    broken: bool
    """The generation is over although no process died."""

    @property
    def slots(self) -> int:
        return sum(self.living.values())

    @property
    def displaced(self) -> list[int]:
        """Old ranks that cannot stay on their node."""
        return [rank for rank in range(self.situation.layout.ranks) if rank not in self.places]

    @property
    def survivors(self) -> dict[int, int]:
        """Old ranks whose processes continue, and their nodes."""
        return {rank: node for rank, node in self.places.items() if rank not in self.dead}


def _aftermath(situation: Situation, event: Event) -> _Aftermath:
    events, assignment = list(flatten(event)), situation.assignment
    joined = {item.node for item in events if isinstance(item, NodeJoined)}
    lost = {item.node for item in events if isinstance(item, NodeLost)}
    lost |= {assignment[item.rank] for item in events if isinstance(item, WorkerDied) and not item.node_lives}
    # A node may be lost and joined in one batch: it has slots then, but nothing of what ran on it.
    living = {node.number: node.slots for node in situation.nodes if node.number not in lost - joined}
    dead = set(situation.dead) | {item.rank for item in events if isinstance(item, WorkerDied)}
    for item in events:
        if isinstance(item, Corrupt):
            dead |= set(range(len(assignment))) if item.rank is None else {item.rank}
    dead |= {rank for rank, node in enumerate(assignment) if node in lost or node not in living}
    return _Aftermath(
        situation=situation,
        living=living,
        dead=frozenset(dead),
        places=retained_ranks(situation, living, dead),
        broken=any(isinstance(item, Disconnected) for item in events),
    )


def _grow(aftermath: _Aftermath, legal: Legal) -> NewGeneration | None:
    """A layout that is nearer to the wanted one than the running layout, if the slots allow it."""
    wanted, layout = aftermath.situation.wanted, aftermath.situation.layout
    if layout == wanted:
        return None
    best = relayout(wanted, aftermath.slots, legal, aftermath.situation.batch)
    return (
        None
        if best is None or relayout_cost(wanted, best) >= relayout_cost(wanted, layout)
        else _new_generation(aftermath, "grow", best)
    )


def _continue_degraded(aftermath: _Aftermath, legal: Legal) -> NewGeneration | None:
    """The largest legal number of healthy replicas, all in their own processes: nothing has to be started."""
    layout = aftermath.situation.layout
    replicas = layout.data or 1
    if not aftermath.situation.continue_degraded:
        return None
    inner = layout.shard * layout.context * layout.tensor
    survivors = aftermath.survivors
    living = Counter(rank // inner % replicas for rank in survivors)
    healthy = [replica for replica in range(replicas) if living[replica] == layout.ranks // replicas]
    if len(healthy) == replicas:
        return None
    for count in range(len(healthy), 0, -1):
        smaller = with_valid_settings(aftermath.situation.wanted, replace(layout, data=count))
        if legal(smaller):
            old = [rank for rank in range(layout.ranks) if rank // inner % replicas in healthy[:count]]
            return NewGeneration("shrink", smaller, tuple(survivors[rank] for rank in old), tuple(old))
    return None


def _same_layout(aftermath: _Aftermath) -> NewGeneration | None:
    """The same layout again: survivors keep their rank, dead ranks restart on their node, displaced ranks on free slots."""
    layout, displaced = aftermath.situation.layout, aftermath.displaced
    taken = Counter(aftermath.places.values())
    free = {node: slots - taken[node] for node, slots in aftermath.living.items()}
    if sum(free.values()) < len(displaced):
        return None
    # The emptiest node first, so that the ranks of a lost node stay together on a spare node.
    order = sorted(free, key=lambda node: (-free[node], node))
    places = assign_nodes(displaced, layout.tensor, {node: free[node] for node in order}, aftermath.places)
    ranks, survivors = range(layout.ranks), aftermath.survivors
    return NewGeneration(
        "spare" if displaced else "restart",
        layout,
        tuple(places[rank] for rank in ranks),
        tuple(rank if rank in survivors else None for rank in ranks),
    )


def _shrink(aftermath: _Aftermath, legal: Legal) -> NewGeneration | Wait:
    situation, dead = aftermath.situation, tuple(sorted(aftermath.dead))
    room = f"{len(aftermath.living)} node{'' if len(aftermath.living) == 1 else 's'} with {aftermath.slots} place{'' if aftermath.slots == 1 else 's'}"
    needs = f"the layout has {situation.layout.ranks} ranks, but what is left is {room}"
    if not situation.shrink:
        return Wait(f"{needs}, and resilience.shrink = false", dead)
    best = relayout(situation.wanted, aftermath.slots, legal, situation.batch)
    if best is None:
        return Wait(f"{needs}, and no layout of so few ranks can be run", dead)
    return _new_generation(aftermath, "shrink", best)


def _new_generation(aftermath: _Aftermath, action: Literal["shrink", "grow"], layout: Layout) -> NewGeneration:
    return NewGeneration(action, layout, *reassign(layout, aftermath.living, aftermath.survivors))
