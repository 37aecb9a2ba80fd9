"""Which layout fits the nodes that are left, and which rank runs on which node. Called by `recovery/policy`, by the controller for the first
generation, and by the code that decides how often replicas are made, live or simulated.

The global batch and the order of the tokens do not depend on the layout, so the run can continue on any legal one. Neighboring ranks
share a node if possible, tensor groups above all: they communicate most.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from operator import attrgetter

from phalanx.spec.errors import divisors
from phalanx.spec.layout import Layout

Legal = Callable[[Layout], bool]
"""Whether a layout can be run: it divides the batch, heads, experts, …, its pipeline has a schedule, and it fits in memory."""


_DEGREES = attrgetter("tensor", "context", "expert", "expert_tensor", "pipeline", "shard")


def relayout(wanted: Layout, ranks: int, legal: Legal, batch: int | None = None) -> Layout | None:
    """The best legal layout on at most `ranks` ranks, and never on more than wanted; None if there is none.

    Best means, in this order:
    1. the most ranks;
    2. the fewest changes among tensor, context, pipeline, expert and expert_tensor, which are never raised; then the smallest
       changes, by the product of the ratios; then those that leave tensor alone, then context, expert, expert_tensor and pipeline:
       a shorter pipeline has smaller bubbles, and tensor groups stay on a node;
    3. `shard` as near to the wanted one as possible, by ratio; of two equally near degrees the larger, which needs less memory;
    4. `data` takes the remaining ranks.
    With enough replicas only `data` changes. Settings of a degree of 1 are reset: `sequence` with tensor, `zero` with shard, `schedule`,
    `schedule_file` and `stages` with pipeline. A schedule file is valid for one number of ranks only.

    `batch`: sequences per step, which the replicas must divide; numbers of ranks without such replicas are skipped.
    """
    most = min(ranks, wanted.ranks)
    for count in range(most, 0, -1) if batch is None else _counts(wanted, most, batch):
        for layout in sorted(_layouts(wanted, count, batch), key=lambda layout: relayout_cost(wanted, layout)):
            if legal(layout):
                return layout
    return None


def _counts(wanted: Layout, most: int, batch: int) -> list[int]:
    """Numbers of ranks for which some layout has replicas that divide the batch, largest first."""
    replicas = [number for number in divisors(batch) if number <= most]
    inner = {
        pipeline * tensor * context
        for pipeline in range(1, wanted.pipeline + 1)
        for tensor in range(1, wanted.tensor + 1)
        for context in range(1, wanted.context + 1)
    }
    return sorted({degree * number for degree in inner for number in replicas if degree * number <= most}, reverse=True)


def relayout_cost(wanted: Layout, layout: Layout) -> tuple[float, ...]:
    """Sort key of layouts, the best first."""
    *ratios, shard = (max(pair) / min(pair) for pair in zip(_DEGREES(wanted), _DEGREES(layout), strict=True))
    return -layout.ranks, sum(ratio != 1 for ratio in ratios), math.prod(ratios), *ratios, shard, -layout.shard


def with_valid_settings(wanted: Layout, layout: Layout) -> Layout:
    """A layout with the wanted settings that are still valid for its degrees."""
    piped, same = layout.pipeline > 1, layout.pipeline == wanted.pipeline
    return replace(
        layout,
        zero=wanted.zero if layout.shard > 1 else 3,
        sequence=wanted.sequence and layout.tensor > 1,
        schedule=wanted.schedule if piped else "1f1b",
        schedule_file=wanted.schedule_file if same else None,
        stages=wanted.stages if piped else None,
    )


def _layouts(wanted: Layout, count: int, batch: int | None) -> Iterator[Layout]:
    """All layouts of `count` ranks that raise no degree but `data` and `shard`."""
    for pipeline in _up_to(wanted.pipeline, count):
        stage = count // pipeline
        for tensor in _up_to(wanted.tensor, stage):
            for context in _up_to(wanted.context, stage // tensor):
                replicas = stage // tensor // context
                if batch is not None and batch % replicas:
                    continue
                for shard in divisors(replicas):
                    degrees = replace(
                        wanted, pipeline=pipeline, data=replicas // shard, shard=shard, context=context, tensor=tensor
                    )
                    for expert, expert_tensor in _experts(wanted, stage):
                        yield with_valid_settings(wanted, replace(degrees, expert=expert, expert_tensor=expert_tensor))


def _experts(wanted: Layout, stage: int) -> Iterator[tuple[int, int]]:
    """Degrees (expert, expert_tensor) whose product divides the ranks of a stage."""
    for expert in _up_to(wanted.expert, stage):
        for expert_tensor in _up_to(wanted.expert_tensor, stage // expert):
            yield expert, expert_tensor


def _up_to(most: int, number: int) -> list[int]:
    return [1] if most == 1 else [degree for degree in divisors(number) if degree <= most]


def initial_assignment(layout: Layout, nodes: Mapping[int, int]) -> tuple[int, ...]:
    """The node of each rank of a new run: nodes, with these slots, are filled in their order, so that spare nodes remain at the end."""
    places = assign_nodes(range(layout.ranks), layout.tensor, nodes, {})
    return tuple(places[rank] for rank in range(layout.ranks))


def assign_nodes(ranks: Collection[int], tensor: int, free: Mapping[int, int], places: Mapping[int, int]) -> dict[int, int]:
    """Assign nodes to `ranks`, in addition to `places`, the nodes of ranks that have one.

    `free`: free slots by node, in the order of preference. There must be enough.
    """
    unassigned, assigned, last = set(ranks), dict(places), -1
    left = {node: slots for node, slots in free.items() if slots}
    assert len(unassigned) <= sum(left.values()), "more ranks than slots"
    for group in sorted({rank // tensor for rank in unassigned}):
        group_ranks = range(group * tensor, (group + 1) * tensor)
        members = [rank for rank in group_ranks if rank in unassigned]
        # First the node of its tensor group, then that of its neighbors, then any with enough slots for the group.
        near = [assigned[rank] for rank in group_ranks if rank in assigned] + [last]
        whole = next((node for node in chain(near, left) if left.get(node, 0) >= len(members)), None)
        for rank in members:
            last = whole if whole is not None else next(node for node in chain(near, left) if node in left)
            assigned[rank] = last
            left[last] -= 1
            if not left[last]:
                del left[last]
    return assigned


def retained_ranks(assignment: Sequence[int], living: Mapping[int, int], dead: Collection[int]) -> dict[int, int]:
    """Ranks that can stay on their node: all ranks of a living node, unless it has fewer slots than before."""
    places: dict[int, int] = {}
    taken: Counter[int] = Counter()
    # Living ranks first: a dead one can be started anywhere.
    for rank in sorted(range(len(assignment)), key=lambda rank: (rank in dead, rank)):
        node = assignment[rank]
        if taken[node] < living.get(node, 0):
            places[rank] = node
            taken[node] += 1
    return places


def reassign(
    layout: Layout, living: Mapping[int, int], survivors: Mapping[int, int]
) -> tuple[tuple[int, ...], tuple[int | None, ...]]:
    """Nodes of the ranks of another layout, and for each the old rank on that node whose process it takes over, or None.

    A survivor keeps its rank if its node has that rank again.
    """
    on: dict[int, list[int]] = {node: [] for node in living}
    for rank in sorted(survivors):
        on[survivors[rank]].append(rank)
    chosen = _choose_nodes(layout, living, on)
    places = assign_nodes(range(layout.ranks), layout.tensor, {node: living[node] for node in chosen}, {})
    old: list[int | None] = [rank if survivors.get(rank) == places[rank] else None for rank in range(layout.ranks)]
    idle = {node: iter([rank for rank in ranks if rank >= layout.ranks or old[rank] is None]) for node, ranks in on.items()}
    for rank in range(layout.ranks):
        if old[rank] is None:
            old[rank] = next(idle[places[rank]], None)
    return tuple(places[rank] for rank in range(layout.ranks)), tuple(old)


def _choose_nodes(layout: Layout, living: Mapping[int, int], on: Mapping[int, list[int]]) -> list[int]:
    """Choose nodes for a layout: those with the most survivors, to reuse their processes; in the order of the survivors' ranks."""
    chosen, room = [], 0
    for node in sorted(living, key=lambda node: (-len(on[node]), node)):
        if room >= layout.ranks:
            break
        chosen.append(node)
        # In whole tensor groups; if these never suffice, all nodes are used.
        room += living[node] // layout.tensor * layout.tensor
    return sorted(chosen, key=lambda node: (not on[node], on[node][:1], node))


def replicated_elsewhere(layout: Layout, assignment: Sequence[int]) -> bool:
    """Whether another rank, on another node if there are several, also has the state of every rank."""
    dense = _repeated(layout.data or 1, layout.shard * layout.context * layout.tensor, assignment)
    if layout.expert * layout.expert_tensor == 1:
        return dense
    within = layout.expert_shard * layout.expert * layout.expert_tensor
    return dense and _repeated(layout.expert_data // layout.expert_shard, within, assignment)


def _repeated(replicas: int, inner: int, assignment: Sequence[int]) -> bool:
    """The same for parameters with `replicas` replicas, each on `inner` neighboring ranks of a stage."""
    apart = len(set(assignment)) > 1
    for rank in range(len(assignment)):
        first = rank - rank // inner % replicas * inner
        others = (first + index * inner for index in range(replicas) if first + index * inner != rank)
        if not any(not apart or assignment[other] != assignment[rank] for other in others):
            return False
    return True
