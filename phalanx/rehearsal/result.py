"""The results of a rehearsal of one rank: memory, compute, and every collective with its ranks and the links that it crosses; and how
`phalanx rehearse` prints them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from phalanx.rehearsal.extrapolate import StepProfile
from phalanx.rehearsal.ledger import ProgramLocation

GIB = 2**30
_MODULES = 8
"""Modules to print, the largest first."""
_AS_THEY_ARE = (
    *("rank", "ranks", "device", "fits", "state", "sent", "tiers", "micro_batches", "taken", "seconds"),
    *("error", "assumed", "notes"),
)
"""Attributes that `Rehearsal.to_json` takes over."""


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
    times: int = 1
    """How often the whole step sends it."""


def bytes_by_use(messages: Iterable[Message]) -> dict[str, dict[str, int]]:
    """Bytes of a step by use and collective."""
    by_use: dict[str, dict[str, int]] = {}
    for message in messages:
        row = by_use.setdefault(message.use, {})
        row[message.collective] = row.get(message.collective, 0) + message.bytes * message.times
    return by_use


def bytes_by_tier(messages: Iterable[Message]) -> dict[str, int]:
    """Bytes of a step by the slowest links that they cross."""
    tiers: Counter[str] = Counter()
    for message in messages:
        tiers[message.tier] += message.bytes * message.times
    return dict(tiers)


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
    modules: dict[str, int]
    """Bytes at the peak by the module that allocated them, largest first."""
    at: ProgramLocation | None
    """Where the peak is."""
    host: int
    """Bytes of host memory of a GPU rank."""
    state: dict[str, int]
    """Bytes of parameters, gradients and optimizer between steps, as in the run's event `model_placed`."""
    elements: int
    """Of parameters whose state is on this rank."""

    messages: tuple[Message, ...]
    flops: dict[str, int]
    """Floating-point operations of a step by module, forward and backward."""
    repeated_flops: int
    """Floating-point operations of recomputed forwards."""
    micro_batches: int
    """Micro-batches of a step."""
    taken: int
    """Micro-batches that were rehearsed; the others do the same."""
    seconds: float = 0.0

    no_room: ProgramLocation | None = None
    """The first allocation for which the device has no memory."""
    error: str | None = None
    """What would fail on the cluster."""
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    timeline: tuple[tuple[float, int], ...] = field(default=(), repr=False)
    """(fraction of the step, bytes) at selected times."""
    profile: StepProfile | None = field(default=None, repr=False)
    """What each layer does, if only some were rehearsed."""

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
        return bytes_by_use(self.messages)

    @property
    def tiers(self) -> dict[str, int]:
        return bytes_by_tier(self.messages)

    @property
    def message_count(self) -> int:
        return sum(message.times for message in self.messages)

    def to_json(self, *, every_message: bool = False) -> dict[str, Any]:
        """Sizes are in GiB under names that end in _gib and by component and module, and in bytes elsewhere."""
        table: dict[str, Any] = {name: getattr(self, name) for name in _AS_THEY_ARE}
        table |= {f"{name}_gib": getattr(self, name) / GIB for name in ("peak", "reserved", "in_use", "host")}
        table |= {
            "fixed_gib": _in_gib(self.fixed),
            "capacity_gib": None if self.capacity is None else self.capacity / GIB,
            "components": _in_gib(self.components),
            "modules": _in_gib(self.modules),
            "peak_at": None if self.at is None else self.at._asdict(),
            "messages": self.message_count,
            "flops": {"all": sum(self.flops.values()), "repeated": self.repeated_flops, "modules": self.flops},
            "no_room": None if self.no_room is None else self.no_room._asdict(),
        }
        if every_message:
            table["collectives"] = [asdict(message) for message in self.messages]
        return table


def _in_gib(sizes: dict[str, int]) -> dict[str, float]:
    return {name: size / GIB for name, size in sizes.items()}


def show(console: Console, rehearsal: Rehearsal) -> None:
    """Prints the verdict, then memory, messages, operations and what would fail."""
    style = "red" if not rehearsal.fits else "bold" if rehearsal.capacity is None else "bold green"
    console.print(verdict(rehearsal), style=style, soft_wrap=True)
    for technique, words in rehearsal.applied.items():
        console.print(f"  {technique}: {words}", style="dim", soft_wrap=True)
    if rehearsal.error is not None:
        console.print(f"would fail: {rehearsal.error}", style="red", soft_wrap=True)
    if rehearsal.no_room is not None:
        console.print(f"would run out of memory: {rehearsal.no_room}", style="red", soft_wrap=True)
    _show_memory(console, rehearsal)
    show_messages(console, rehearsal.messages)
    all_flops = sum(rehearsal.flops.values())
    again = f", {rehearsal.repeated_flops / max(all_flops, 1):.0%} of them repeated" if rehearsal.repeated_flops else ""
    console.print(f"operations of a step: {flops_text(all_flops)}{again}")
    taken = (
        f"{rehearsal.taken} of {rehearsal.micro_batches} micro-batches were taken through the program, in {rehearsal.seconds:.1f} s; "
        "the others do the same."
    )
    for sentence in (*(f"assumed: {assumption}" for assumption in rehearsal.assumed), *rehearsal.notes, taken):
        console.print(sentence, style="dim", soft_wrap=True)


def verdict(rehearsal: Rehearsal) -> str:
    """Whether the rank fits, as the first sentence of the report."""
    who = f"rank {rehearsal.rank} of {rehearsal.ranks:,} ({rehearsal.device})"
    unit, scale = unit_of(max(rehearsal.in_use, rehearsal.capacity or 0))
    used = f"{rehearsal.in_use / scale:,.1f}"
    if rehearsal.error is not None:
        return f"fails: {who}"
    if rehearsal.no_room is not None:
        unit, scale = unit_of(rehearsal.capacity or 0)
        return f"does not fit in {(rehearsal.capacity or 0) / scale:,.1f} {unit}: {who}"
    if rehearsal.capacity is None:
        return f"needs {used} {unit}: {who}; the memory of its device is not known, --memory sets it"
    return f"fits: {who} needs {used} of {rehearsal.capacity / scale:,.1f} {unit}"


_UNITS = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10))


def unit_of(size: float) -> tuple[str, float]:
    """A unit that suits a number of bytes, and its size."""
    return next(((name, scale) for name, scale in _UNITS if size >= scale), _UNITS[-1])


def flops_text(count: float) -> str:
    for name, scale in (("PFLOP", 1e15), ("TFLOP", 1e12), ("GFLOP", 1e9)):
        if count >= scale:
            return f"{count / scale:,.1f} {name}"
    return f"{count / 1e6:,.1f} MFLOP"


def _show_memory(console: Console, rehearsal: Rehearsal) -> None:
    unit, scale = unit_of(rehearsal.peak)
    table = Table("memory at the peak", unit, box=None, header_style="bold", pad_edge=False)
    table.columns[1].justify = "right"

    def row(name: str, size: int, style: str | None = None) -> None:
        table.add_row(name, f"{size / scale:,.2f}", style=style)

    for name, size in rehearsal.components.items():
        row(name, size)
    row("peak", rehearsal.peak, "bold")
    if rehearsal.reserved != rehearsal.peak:
        row("reserved by the allocator", rehearsal.reserved)
    for name, size in rehearsal.fixed.items():
        row(f"{name} (estimate)", size)
    if rehearsal.capacity is not None:
        row("the device has", rehearsal.capacity, "green" if rehearsal.fits else "red")
    if rehearsal.host:
        row("in the machine's memory", rehearsal.host)
    console.print(table)
    if rehearsal.at is not None:
        console.print(f"the peak is in {rehearsal.at}", soft_wrap=True)
    most = ", ".join(f"{name} {size / scale:,.2f}" for name, size in list(rehearsal.modules.items())[:_MODULES])
    console.print(f"made in ({unit}): {most}", style="dim", soft_wrap=True)


def show_messages(console: Console, messages: Sequence[Message]) -> None:
    """Prints what a device sends in a step, by use and by reach."""
    if not messages:
        return
    sent = bytes_by_use(messages)
    unit, scale = unit_of(max(max(kinds.values()) for kinds in sent.values()))
    table = Table("sent in a step", "collective", unit, box=None, header_style="bold", pad_edge=False)
    table.columns[2].justify = "right"
    for use, kinds in sent.items():
        for collective, size in kinds.items():
            table.add_row(use, collective, f"{size / scale:,.3f}")
    console.print(table)
    tiers = ", ".join(f"{name} {size / scale:,.2f}" for name, size in bytes_by_tier(messages).items())
    count = sum(message.times for message in messages)
    console.print(f"{count:,} messages; {unit} by the farthest that they reach: {tiers}", soft_wrap=True)


def write_trace(rehearsal: Rehearsal, path: Path) -> None:
    """Writes the memory of the step as a counter for Perfetto and chrome://tracing; a millisecond is a thousandth of the step."""
    events = [
        {"name": "memory", "ph": "C", "ts": part * 1e6, "pid": rehearsal.rank, "args": {"GiB": size / GIB}}
        for part, size in rehearsal.timeline
    ]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
