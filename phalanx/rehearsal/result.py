"""The results of a rehearsal of one rank: memory, compute, and every collective with its ranks and the links that it crosses; and how
`phalanx rehearse` prints them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

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


_MODULES = 8


def show(console: Console, rehearsal: Rehearsal) -> None:
    """Prints memory, messages, operations and what would fail."""
    console.print(f"[bold]rank {rehearsal.rank} of {rehearsal.ranks:,}[/bold] ({rehearsal.device})", soft_wrap=True)
    for technique, words in rehearsal.applied.items():
        console.print(f"  {technique}: {words}", style="dim", soft_wrap=True)
    if rehearsal.error is not None:
        console.print(f"would fail: {rehearsal.error}", style="red", soft_wrap=True)
    if rehearsal.no_room is not None:
        console.print(f"would run out of memory: {rehearsal.no_room}", style="red", soft_wrap=True)
    _memory(console, rehearsal)
    _messages(console, rehearsal)
    all_flops = sum(rehearsal.flops.values())
    again = f", {rehearsal.repeated_flops / max(all_flops, 1):.0%} of them repeated" if rehearsal.repeated_flops else ""
    console.print(f"operations of a step: {all_flops / 1e12:,.1f} TFLOP{again}")
    for sentence in (*(f"assumed: {assumption}" for assumption in rehearsal.assumed), *rehearsal.notes):
        console.print(sentence, style="dim", soft_wrap=True)
    console.print(
        f"{rehearsal.taken} of {rehearsal.micro_batches} micro-batches were taken through the program, in {rehearsal.seconds:.1f} s; the others do "
        "the same.",
        style="dim",
        soft_wrap=True,
    )


def _memory(console: Console, rehearsal: Rehearsal) -> None:
    table = Table("memory at the peak", "GiB", box=None, header_style="bold", pad_edge=False)
    table.columns[1].justify = "right"
    for name, size in rehearsal.components.items():
        table.add_row(name, f"{size / GIB:,.2f}")
    table.add_row("peak", f"{rehearsal.peak / GIB:,.2f}", style="bold")
    if rehearsal.reserved != rehearsal.peak:
        table.add_row("reserved by the allocator", f"{rehearsal.reserved / GIB:,.2f}")
    for name, size in rehearsal.fixed.items():
        table.add_row(f"{name} (estimate)", f"{size / GIB:,.2f}")
    if rehearsal.capacity is not None:
        table.add_row("the device has", f"{rehearsal.capacity / GIB:,.2f}", style="green" if rehearsal.fits else "red")
    if rehearsal.host:
        table.add_row("in the machine's memory", f"{rehearsal.host / GIB:,.2f}")
    console.print(table)
    if rehearsal.at is not None:
        console.print(f"the peak is in {rehearsal.at}", soft_wrap=True)
    most = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in rehearsal.modules[:_MODULES])
    console.print(f"made in: {most}", style="dim", soft_wrap=True)


def _messages(console: Console, rehearsal: Rehearsal) -> None:
    if not rehearsal.messages:
        return
    table = Table("sent in a step", "collective", "GiB", box=None, header_style="bold", pad_edge=False)
    table.columns[2].justify = "right"
    for use, kinds in rehearsal.sent.items():
        for collective, size in kinds.items():
            table.add_row(use, collective, f"{size / GIB:,.3f}")
    console.print(table)
    tiers = ", ".join(f"{name} {size / GIB:,.2f}" for name, size in rehearsal.tiers.items())
    count = sum(repeated.times for repeated in rehearsal.messages)
    console.print(f"{count:,} messages; GiB by the farthest that they reach: {tiers}", soft_wrap=True)


def write_trace(rehearsal: Rehearsal, path: Path) -> None:
    """Writes the memory of the step as a counter for Perfetto and chrome://tracing; a millisecond is a thousandth of the step."""
    events = [
        {"name": "memory", "ph": "C", "ts": part * 1e6, "pid": rehearsal.rank, "args": {"GiB": size / GIB}}
        for part, size in rehearsal.timeline
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
