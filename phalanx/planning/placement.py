"""Placement of ranks on nodes: which groups share a node, an island of fast links, or a rail. It is written into the plan and
shown.

Ranks are numbered by the layout's degrees, `tensor` fastest and `pipeline` slowest, so a group is a first rank, a size and a
stride. A rank is on node rank // node. Its rail, the network card and switch of its position in the node, is rank % node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.search.space import largest_divisor
from phalanx.spec.layout import Layout

Reach = Literal["node", "island", "network"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The groups of one dimension; all have the same shape."""

    name: str
    size: int
    stride: int
    """Distance from a rank to the next of its group."""
    reach: Reach
    """The farthest link that its messages use."""
    nodes: int
    """Nodes that a group spans."""
    one_rail: bool
    """Its ranks have the same position in their nodes, so that messages between nodes stay on one rail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """The placement of all ranks of a plan."""

    ranks: int
    node: int
    """Ranks per node."""
    island: int
    """Ranks that share the fast links."""
    rails: bool
    """The cluster's switches are wired by rails."""
    order: tuple[str, ...]
    """Dimensions in the order of ranks, that of neighboring ranks first."""
    groups: tuple[Ranks, ...]
    advice: str | None
    """What a better layout would be; None: no advice."""

    @property
    def lines(self) -> list[str]:
        """Which groups share a node, an island and a rail, in a few sentences."""
        if self.ranks <= self.node:
            return ["All ranks are on one node."] if self.ranks > 1 else []
        order = ", ".join(name for name in self.order if name in [group.name for group in self.groups])
        rail = f", on rail rank % {self.node}" if self.rails else ""
        lines = [f"A rank is on node rank // {self.node}{rail}; ranks run through {order}, the first fastest."]
        places = {
            "node": "Inside a node",
            "island": f"Inside an island of {self.island:,} devices",
            "network": "Over the network",
        }
        for reach, place in places.items():
            if groups := [self._described(group) for group in self.groups if group.reach == reach]:
                lines.append(f"{place}: {listed(groups)}.")
        return lines + ([self.advice] if self.advice else [])

    def _described(self, group: Ranks) -> str:
        label = f"{group.name.replace('_', '-')} groups of {group.size:,}"
        if group.reach != "network":
            return label
        return f"{label} span {group.nodes:,} nodes{' on one rail' if group.one_rail and self.rails else ''}"


def listed(names: Sequence[str]) -> str:
    """The names in a sentence: "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


ORDER = ("tensor", "context", "shard", "data", "pipeline")


def placement(layout: Layout, hardware: Hardware) -> Placement:
    """The placement of a layout on a cluster."""
    groups = []
    for names in (ORDER, ("expert_tensor", "expert")):
        stride = 1
        for name in names:
            size = getattr(layout, name) or 1
            if size > 1:
                groups.append(_ranks(name, size, stride, hardware))
            stride *= size
    return Placement(
        ranks=layout.ranks,
        node=hardware.node,
        island=hardware.island,
        rails=hardware.rails,
        order=ORDER,
        groups=tuple(groups),
        advice=_advice(layout, hardware, groups),
    )


def _ranks(name: str, size: int, stride: int, hardware: Hardware) -> Ranks:
    span = (size - 1) * stride + 1

    def inside(room: int) -> bool:
        """Whether no group crosses from one of these to the next: groups begin at multiples of their span."""
        return span <= room and room % (size * stride) == 0

    reach: Reach = "node" if inside(hardware.node) else "island" if inside(hardware.island) else "network"
    nodes = 1 if reach == "node" else min(size, -(-size * stride // hardware.node))
    return Ranks(name=name, size=size, stride=stride, reach=reach, nodes=nodes, one_rail=stride % hardware.node == 0)


def _advice(layout: Layout, hardware: Hardware, groups: list[Ranks]) -> str | None:
    """Tensor groups communicate most and pipelines least, so the order of ranks should keep tensor groups together."""
    by_name = {group.name: group for group in groups}
    tensor, expert = by_name.get("tensor"), by_name.get("expert")
    if tensor is not None and tensor.reach == "network":
        whole = "" if hardware.island % tensor.size == 0 or tensor.size > hardware.island else ", which they do not divide"
        return (
            f"No order keeps tensor groups of {tensor.size} together: an island has {hardware.island} devices{whole}. "
            f"Set layout.tensor to at most {largest_divisor(hardware.island, layout.tensor)}."
        )
    if expert is not None and expert.reach == "network" and layout.expert * layout.expert_tensor <= hardware.island:
        return f"Experts' groups of {expert.size} cross islands of {hardware.island} devices, though they would fit into one."
    return None
