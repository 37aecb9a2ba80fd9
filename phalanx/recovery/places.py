"""Which rank runs on which node, and what is lost with one. Called by `recovery/policy`, by whoever starts the first generation, and by
whoever says how often copies are made, live or simulated.

Ranks that are neighbours share a node where they can, tensor groups above all: they talk the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import chain

from phalanx.recovery.state import Node, Situation
from phalanx.spec.layout import Layout


def placed(layout: Layout, nodes: Sequence[Node]) -> tuple[int, ...]:
    """The node of each rank where nothing runs yet: nodes are filled in the given order, and spare ones are left at the end."""
    free = {node.number: node.slots for node in nodes}
    places = house(range(layout.ranks), layout.tensor, free, {})
    return tuple(places[rank] for rank in range(layout.ranks))


def house(ranks: Collection[int], tensor: int, free: Mapping[int, int], places: Mapping[int, int]) -> dict[int, int]:
    """Nodes for all of the ranks, which have room there in all.

    `free` are the nodes' slots, the nodes in the order of preference; `places` are the nodes of the ranks that have one.
    """
    homeless, found, last = set(ranks), dict(places), -1
    left = {node: slots for node, slots in free.items() if slots}
    assert len(homeless) <= sum(left.values()), "more ranks than slots"
    for group in sorted({rank // tensor for rank in homeless}):
        group_ranks = range(group * tensor, (group + 1) * tensor)
        members = [rank for rank in group_ranks if rank in homeless]
        # Where the rest of its tensor group is, then where its neighbours went, then wherever there is room for all of it.
        near = [found[rank] for rank in group_ranks if rank in found] + [last]
        whole = next((node for node in chain(near, left) if left.get(node, 0) >= len(members)), None)
        for rank in members:
            last = whole if whole is not None else next(node for node in chain(near, left) if node in left)
            found[rank] = last
            left[last] -= 1
            if not left[last]:
                del left[last]
    return found


def kept(situation: Situation, living: Mapping[int, int], dead: Collection[int]) -> dict[int, int]:
    """Ranks that can run where they ran, with their nodes: all of a living node, unless it has fewer slots than before."""
    places: dict[int, int] = {}
    taken: Counter[int] = Counter()
    # Those whose process lives come first: a dead one can be started anywhere.
    for rank in sorted(range(len(situation.assignment)), key=lambda rank: (rank in dead, rank)):
        node = situation.assignment[rank]
        if taken[node] < living.get(node, 0):
            places[rank] = node
            taken[node] += 1
    return places


def moved(
    layout: Layout, living: Mapping[int, int], survivors: Mapping[int, int]
) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Nodes of the ranks of another layout, and for each the old rank on that node whose process takes it, or None.

    A survivor keeps its number where its node has the same again.
    """
    on: dict[int, list[int]] = {node: [] for node in living}
    for rank in sorted(survivors):
        on[survivors[rank]].append(rank)
    chosen = _chosen(layout, living, on)
    places = house(range(layout.ranks), layout.tensor, {node: living[node] for node in chosen}, {})
    old: list[int | None] = [rank if survivors.get(rank) == places[rank] else None for rank in range(layout.ranks)]
    idle = {node: iter([rank for rank in ranks if rank >= layout.ranks or old[rank] is None]) for node, ranks in on.items()}
    for rank in range(layout.ranks):
        if old[rank] is None:
            old[rank] = next(idle[places[rank]], None)
    return tuple(places[rank] for rank in range(layout.ranks)), tuple(old)


def _chosen(layout: Layout, living: Mapping[int, int], on: Mapping[int, list[int]]) -> list[int]:
    """Nodes for a layout: those with the most survivors, so that their processes are kept; in the order of the survivors' ranks."""
    chosen, room = [], 0
    for node in sorted(living, key=lambda node: (-len(on[node]), node)):
        if room >= layout.ranks:
            break
        chosen.append(node)
        room += (
            living[node] // layout.tensor * layout.tensor
        )  # in whole tensor groups; where these never suffice, all nodes are taken
    return sorted(chosen, key=lambda node: (not on[node], on[node][:1], node))


def elsewhere(layout: Layout, assignment: Sequence[int]) -> bool:
    """Whether every rank's state is held by another rank too, on another node where there are several."""
    dense = _repeated(layout.data or 1, layout.shard * layout.context * layout.tensor, assignment)
    if layout.expert * layout.expert_tensor == 1:
        return dense
    within = layout.expert_shard * layout.expert * layout.expert_tensor
    return dense and _repeated(layout.expert_data // layout.expert_shard, within, assignment)


def _repeated(replicas: int, inner: int, assignment: Sequence[int]) -> bool:
    """The same of one kind of parameter, of which there are so many replicas, each on `inner` neighbouring ranks of a stage."""
    apart = len(set(assignment)) > 1
    for rank in range(len(assignment)):
        first = rank - rank // inner % replicas * inner
        others = (first + index * inner for index in range(replicas) if first + index * inner != rank)
        if not any(not apart or assignment[other] != assignment[rank] for other in others):
            return False
    return True
