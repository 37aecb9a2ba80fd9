"""Where ranks lie, against the groups that the runtime makes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from planning_cases import cluster

from phalanx.parallel.mesh import Mesh
from phalanx.planning.placement import placement
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Place

LAYOUTS = [
    Layout(pipeline=2, data=2, shard=2, context=2, tensor=4),
    Layout(pipeline=4, data=1, shard=8, expert=4, expert_tensor=2),
    Layout(data=2, shard=4, tensor=8, sequence=True),
    Layout(pipeline=3, data=4, tensor=2),
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups_are_those_of_the_mesh(layout: Layout) -> None:
    found = placement(layout, cluster(layout.ranks))
    for rank in (0, layout.ranks // 2 + 1, layout.ranks - 1):
        mesh = Mesh(Place(rank=rank, ranks=layout.ranks), torch.device("meta"), layout)
        for group in found.groups:
            ranks = [other for other in range(layout.ranks) if _alike(mesh, other, group.name)]
            assert len(ranks) == group.size
            assert {b - a for a, b in pairwise(ranks)} == {group.stride}
            nodes = {other // found.node for other in ranks}
            assert len(nodes) <= group.nodes
            assert (group.reach == "node") <= (len(nodes) == 1)
            if group.one_rail:
                assert len({other % found.node for other in ranks}) == 1


def _alike(mesh: Mesh, other: int, axis: str) -> bool:
    """Whether another rank differs from this one along the axis only."""
    there = Mesh(Place(rank=other, ranks=mesh.ranks), torch.device("meta"), mesh.layout)
    expert = axis.startswith("expert")
    axes = (
        ("pipeline", "expert_replicate", "expert_shard", "expert", "expert_tensor")
        if expert
        else ("pipeline", "data", "shard", "context", "tensor")
    )
    return all(mesh.coordinate(one) == there.coordinate(one) for one in axes if one != axis)


def test_tensor_groups_are_neighbours_and_stages_farthest_apart() -> None:
    found = placement(Layout(pipeline=4, data=2, shard=2, tensor=8), cluster(128))
    by_name = {group.name: group for group in found.groups}
    assert (by_name["tensor"].stride, by_name["tensor"].reach) == (1, "node")
    assert by_name["pipeline"].stride == 32 == max(group.stride for group in found.groups)
    assert by_name["shard"].one_rail
    assert found.advice is None


def test_placement_advises_on_tensor_group_across_islands() -> None:
    found = placement(Layout(data=1, tensor=16), cluster(16))
    assert found.groups[0].reach == "network"
    assert found.advice is not None and "layout.tensor to at most 8" in found.advice
    wide = placement(Layout(data=1, tensor=16), cluster(72, node=4, island=72))
    assert wide.groups[0].reach == "network"  # 16 does not divide 72: some group would cross
    assert placement(Layout(data=1, tensor=8), cluster(72, node=4, island=72)).groups[0].reach == "island"
