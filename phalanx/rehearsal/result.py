"""What a rehearsal found out about one rank, as a plain value. `rehearsal/rehearse` makes it; the command line shows it, programs read it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from phalanx.rehearsal.message_log import Repeated, by_tier, sums

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Moment:
    """A place in the program, and what was asked for there."""

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
    """One rank's."""

    rank: int
    ranks: int
    device: str
    applied: dict[str, str]
    """What the layout's techniques did to this rank, in words."""

    peak: int
    """Bytes: the most that tensors and kernels have at once in a step, as torch.cuda.max_memory_allocated says."""
    reserved: int
    """Bytes that the allocator holds for it, fragments included; on CPUs the same as the peak."""
    fixed: dict[str, int]
    """Bytes beside the allocator's: the driver's context, buffers of links. Estimates."""
    capacity: int | None
    """Bytes of the device; None: not known."""
    components: dict[str, int]
    """Bytes at the peak by what they are for."""
    modules: tuple[tuple[str, int], ...]
    """Bytes at the peak by the module that they were made in, most first."""
    at: Moment | None
    """Where the peak is reached."""
    host: int
    """Bytes of the machine's memory that a GPU's rank takes besides."""
    state: dict[str, int]
    """Bytes of parameters, gradients and optimizer between steps, as the run's own record `model_placed` says."""

    messages: tuple[Repeated, ...]
    flops: dict[str, int]
    """Of a step by module, forward and backward."""
    repeated_flops: int
    """Those of forwards that are repeated for a backward."""
    micro_batches: int
    """Of a step."""
    taken: int
    """Micro-batches that were taken through the program; the others do what these do."""
    seconds: float

    no_room: Moment | None = None
    """The first place for which the device has no memory."""
    error: str | None = None
    """What would have failed on the cluster."""
    assumed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    timeline: tuple[tuple[float, int], ...] = field(default=(), repr=False)
    """(part of the step, bytes), thinned out."""

    @property
    def fits(self) -> bool:
        """Whether the step can be taken on the device."""
        return self.error is None and self.no_room is None

    @property
    def in_use(self) -> int:
        """Bytes of the device, all in all."""
        return self.reserved + sum(self.fixed.values())

    @property
    def sent(self) -> dict[str, dict[str, int]]:
        """Bytes of a step by use and collective."""
        return sums(self.messages)

    @property
    def tiers(self) -> dict[str, int]:
        return by_tier(self.messages)

    def to_json(self, *, every_message: bool = False) -> dict[str, Any]:
        """In GiB where a name ends so, in bytes elsewhere."""
        found = {
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
            "messages": sum(one.times for one in self.messages),
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
            found["collectives"] = [one.message.to_json() | {"times": one.times} for one in self.messages]
        return found
