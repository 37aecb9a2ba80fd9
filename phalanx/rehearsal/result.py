"""The results of a rehearsal of one rank: memory, compute, and every collective with its ranks and the links that it crosses.
`rehearsal/op_tracker` records the collectives, `rehearsal/rehearse` makes the result; the command line shows it, programs read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch.distributed as dist

from phalanx.observe.counters import traffic

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Message:
    """One collective of this rank."""

    collective: str
    use: str
    """The dimension of the layout, or the technique, that needs it."""
    ranks: int
    tier: str
    """The slowest links that it crosses: "node", "island" (of fast links) or "across"."""
    bytes: int
    """Sent by this rank in a ring algorithm."""
    phase: str
    action: str

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("collective", "use", "ranks", "tier", "bytes", "phase", "action")}


@dataclass(slots=True)
class Messages:
    """All collectives of a rehearsal, in order."""

    node: int = 8
    """Number of devices of a host."""
    island: int = 8
    """Number of devices that share fast links."""
    all: list[Message] = field(default_factory=list)
    _groups: dict[int, tuple[int, str]] = field(default_factory=dict)

    def take(self, operation: str, args: tuple[Any, ...], phase: str, action: str) -> None:
        """Record an operation of torch.distributed."""
        counted = traffic(operation, args)
        if counted is None:
            return
        collective, use, group, size = counted
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
    """A message, and how often the whole step sends it."""

    message: Message
    times: int


def sums(messages: Iterable[Repeated]) -> dict[str, dict[str, int]]:
    """Bytes by use and collective."""
    by_use: dict[str, dict[str, int]] = {}
    for repeated in messages:
        message = repeated.message
        row = by_use.setdefault(message.use, {})
        row[message.collective] = row.get(message.collective, 0) + message.bytes * repeated.times
    return by_use


def by_tier(messages: Iterable[Repeated]) -> dict[str, int]:
    """Bytes by the slowest links that they cross."""
    tiers: Counter[str] = Counter()
    for repeated in messages:
        tiers[repeated.message.tier] += repeated.message.bytes * repeated.times
    return dict(tiers)


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in the program, and its operation."""

    phase: str
    module: str
    action: str
    operation: str

    def __str__(self) -> str:
        where = f" of {self.module}" if self.module else ""
        which = f", {self.action}" if self.action else ""
        return f"{self.phase}{where}{which} ({self.operation})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """The rehearsal of one rank."""

    rank: int
    ranks: int
    device: str
    applied: dict[str, str]
    """What was done on this rank, by technique, in words."""

    peak: int
    """Largest number of bytes in use in a step, as torch.cuda.max_memory_allocated counts them."""
    reserved: int
    """Bytes that the caching allocator reserves, including fragmentation; on CPUs the same as the peak."""
    fixed: dict[str, int]
    """Bytes outside the allocator: the driver's context, buffers of NCCL. Estimates."""
    capacity: int | None
    """Bytes of the device; None: unknown."""
    components: dict[str, int]
    """Bytes at the peak by purpose."""
    modules: tuple[tuple[str, int], ...]
    """Bytes at the peak by the module that allocated them, largest first."""
    at: Moment | None
    """Where the peak is."""
    host: int
    """Bytes of host memory of a GPU rank."""
    state: dict[str, int]
    """Bytes of parameters, gradients and optimizer between steps, as in the run's event `model_placed`."""

    messages: tuple[Repeated, ...]
    flops: dict[str, int]
    """Floating-point operations of a step by module, forward and backward."""
    repeated_flops: int
    """Floating-point operations of recomputed forwards."""
    micro_batches: int
    """Micro-batches of a step."""
    taken: int
    """Micro-batches that were rehearsed; the others do the same."""
    seconds: float

    no_room: Moment | None = None
    """The first allocation for which the device has no memory."""
    error: str | None = None
    """What would fail on the cluster."""
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    timeline: tuple[tuple[float, int], ...] = field(default=(), repr=False)
    """(fraction of the step, bytes) at selected times."""

    @property
    def fits(self) -> bool:
        """Whether the step runs on the device."""
        return self.error is None and self.no_room is None

    @property
    def in_use(self) -> int:
        """Bytes of the device in total."""
        return self.reserved + sum(self.fixed.values())

    @property
    def sent(self) -> dict[str, dict[str, int]]:
        """Bytes of a step by use and collective."""
        return sums(self.messages)

    @property
    def tiers(self) -> dict[str, int]:
        return by_tier(self.messages)

    def to_json(self, *, every_message: bool = False) -> dict[str, Any]:
        """Sizes are in GiB under names that end in _gib and by component and module, and in bytes elsewhere."""
        table = {
            "rank": self.rank,
            "ranks": self.ranks,
            "device": self.device,
            "peak_gib": self.peak / GIB,
            "reserved_gib": self.reserved / GIB,
            "fixed_gib": {name: size / GIB for name, size in self.fixed.items()},
            "in_use_gib": self.in_use / GIB,
            "capacity_gib": None if self.capacity is None else self.capacity / GIB,
            "fits": self.fits,
            "components": {name: size / GIB for name, size in self.components.items()},
            "modules": {name: size / GIB for name, size in self.modules},
            "peak_at": None if self.at is None else asdict(self.at),
            "host_gib": self.host / GIB,
            "state": self.state,
            "sent": self.sent,
            "tiers": self.tiers,
            "messages": sum(repeated.times for repeated in self.messages),
            "flops": {"all": sum(self.flops.values()), "repeated": self.repeated_flops, "modules": self.flops},
            "micro_batches": self.micro_batches,
            "taken": self.taken,
            "seconds": self.seconds,
            "no_room": None if self.no_room is None else asdict(self.no_room),
            "error": self.error,
            "assumed": list(self.assumed),
            "notes": list(self.notes),
        }
        if every_message:
            table["collectives"] = [repeated.message.to_json() | {"times": repeated.times} for repeated in self.messages]
        return table
