"""What a rank sends in a rehearsal: every collective in order, with the ranks that take part and the links it crosses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from phalanx.observe.counters import traffic


@dataclass(frozen=True, slots=True)
class Message:
    """One kind of collective of this rank."""

    collective: str
    use: str
    """The dimension of the layout, or the technique, that it serves."""
    ranks: int
    tier: str
    """The farthest that it reaches: inside a node, inside an island of fast links, or across."""
    bytes: int
    """That this rank sends, counted as rings send."""
    phase: str
    action: str

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("collective", "use", "ranks", "tier", "bytes", "phase", "action")}


@dataclass(slots=True)
class Messages:
    """All of a step."""

    node: int = 8
    """Devices of a host."""
    island: int = 8
    """Devices that share the fast links."""
    all: list[Message] = field(default_factory=list)
    _groups: dict[int, tuple[int, str]] = field(default_factory=dict)

    def take(self, operation: str, args: tuple[Any, ...], phase: str, action: str) -> None:
        """Note an operation of torch's collectives."""
        found = traffic(operation, args)
        if found is None:
            return
        collective, use, group, size = found
        ranks, tier = self._group(group)
        self.all.append(Message(collective, use, ranks, tier, size, phase, action))

    def _group(self, group: dist.ProcessGroup) -> tuple[int, str]:
        key = id(group)
        if key not in self._groups:
            ranks = dist.get_process_group_ranks(group)
            self._groups[key] = len(ranks), self.tier(ranks)
        return self._groups[key]

    def tier(self, ranks: list[int]) -> str:
        for name, size in (("node", self.node), ("island", self.island)):
            if len({rank // size for rank in (min(ranks), max(ranks))}) == 1:
                return name
        return "across"


@dataclass(frozen=True, slots=True)
class Repeated:
    """A message, and how often it is sent in a step where it was seen once."""

    message: Message
    times: int


def sums(messages: Iterable[Repeated]) -> dict[str, dict[str, int]]:
    """Bytes by use and collective."""
    found: dict[str, dict[str, int]] = {}
    for one in messages:
        row = found.setdefault(one.message.use, {})
        row[one.message.collective] = row.get(one.message.collective, 0) + one.message.bytes * one.times
    return found


def by_tier(messages: Iterable[Repeated]) -> dict[str, int]:
    """Bytes by how far they go."""
    found: Counter[str] = Counter()
    for one in messages:
        found[one.message.tier] += one.message.bytes * one.times
    return dict(found)
