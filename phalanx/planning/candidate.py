"""One way of laying a run out, with what it would cost; and what a search came to. `planning/search` makes them, everything that
shows, compares, simulates or obeys a plan reads them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from phalanx.spec.layout import Layout
from phalanx.spec.run import Memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """Every choice made, and its promise."""

    layout: Layout
    micro_batch: int
    accumulation: int
    compute: Literal["fp32", "bf16", "fp16", "fp8"]
    recompute: Literal["none", "selective", "full"]
    recompute_every: int
    """Every so manieth block is."""
    offload: Literal["none", "cpu", "nvme"]

    memory: dict[str, float]
    """Bytes of the fullest rank by component: parameters, gradients, optimizer, activations, logits, gathered, buffers, fixed."""
    fullest: int
    """Pipeline rank that it is."""
    capacity: float
    """Bytes of the device."""

    seconds: float
    """Of a step."""
    low: float
    """P10 …"""
    high: float
    """… and P90 of it."""
    split: dict[str, float]
    """Seconds of a step by planning.times.PARTS."""
    pieces: dict[str, float]
    """forward, input, weight, head, hop, tail of planning.times.Times: what a simulation of the step starts from."""

    tokens_per_second: float
    mfu: float | None
    days: float
    """Of the whole run without failures."""
    goodput: float
    """Part of the time that counts, failures and saving considered."""
    save_every: float | None
    """Seconds between checkpoints that make it so; None: nothing fails."""
    price: float | None
    """Of the whole run, in US dollars, failures considered; None: no price is known."""
    energy: float | None
    """Joules of the whole run; None: no power is known."""

    compiled: bool = False
    """Whether blocks are."""

    @property
    def bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def fits(self) -> bool:
        return self.bytes <= self.capacity

    def traded(self, memory: Memory) -> Memory:
        """The run file's table with what is recomputed and what leaves the device filled in."""
        return replace(memory, recompute=self.recompute, recompute_every=self.recompute_every, offload=self.offload)

    @property
    def expected_days(self) -> float:
        """With failures and saving."""
        return self.days / self.goodput


@dataclass(frozen=True, kw_only=True, slots=True)
class WhyNot:
    """A layout that somebody might have expected, and why it is not the winner."""

    option: Option | None
    """None: it is not legal."""
    name: str
    """Such as "TP16"."""
    reason: str
    """Such as "leaves the NVLink island, +38 % exposed communication"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What a search came to."""

    best: Option
    others: tuple[Option, ...]
    """Runners-up, each different in its layout, quickest first."""
    why_not: tuple[WhyNot, ...]
    considered: int
    """Legal candidates that were judged, most of them together: with others of the same degrees they are slower, or larger, than
    what was found."""
    fitting: int
    """Of those judged one by one, that fit."""
    seconds: float
    """CPU time that the search took."""
    timed: int = 0
    """Judged one by one."""
    assumed: tuple[str, ...] = ()
    """What the run file and the catalogue do not say, in sentences."""
    curve: tuple[Option, ...] = field(default=())
    """Trade-off of memory against time: the quickest at every memory, least memory first."""
