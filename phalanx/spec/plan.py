"""A run laid out on a machine. The planner writes it, the launcher and the trainer obey it, the display shows it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from phalanx.spec.layout import Layout


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """What a model comes to, counted from its shape or, for one's own module, from the module itself."""

    parameters: int
    active: int
    """Those that one token goes through; fewer than all where there are experts."""
    flops_per_token: float
    """Forward and backward of one token."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """What the plan expects of the run; the summary prints it beside what was measured."""

    seconds: float
    """Of a step."""
    low: float
    """P10 …"""
    high: float
    """… and P90 of it."""
    tokens_per_second: float
    memory: dict[str, float]
    """Bytes of the fullest rank, by component."""
    total_memory: float
    """All of them."""
    mfu: float | None = None
    days: float | None = None
    """Of the whole run without failures."""
    price: float | None = None
    """Of the whole run, in US dollars; None: no price is known."""
    split: dict[str, float] = field(default_factory=dict)
    """Seconds of a step by what they go to, such as "compute", "data", "bubble"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Every choice that the run file left open, made."""

    layout: Layout
    device: Literal["cpu", "cuda"]
    threads: int
    """CPU threads of each rank."""
    micro_batch: int
    """Sequences of one forward and backward on one rank."""
    accumulation: int
    """Forwards and backwards of one rank in one step."""
    compute: Literal["fp32", "bf16", "fp16", "fp8"]
    parameters: int
    flops_per_token: float
    peak_flops: float | None
    """Peak FLOP/s of all ranks together in the compute precision; None: unknown device, MFU cannot be told."""
    active: int | None = None
    """Parameters that one token goes through; None in plans of versions that knew no experts: all of them."""
    machine: str | None = None
    """What it was made for, in words: a run whose layout is left open keeps it where it goes on on the same."""
    promise: Promise | None = field(default=None, hash=False)
    """None: nothing is promised, as for one's own module, whose shape the equations do not know."""
    placement: dict[str, Any] | None = field(default=None, hash=False)
    """Which ranks share a node, a rail, a pipeline: `planning/placement` says what is in it. None in plans of older versions."""

    @property
    def ranks(self) -> int:
        return self.layout.ranks

    def to_json(self) -> str:
        return json.dumps(asdict(self) | {"ranks": self.ranks}, indent=2) + "\n"

    @staticmethod
    def from_json(text: str) -> Plan:
        table: dict[str, Any] = json.loads(text)
        table["layout"] = Layout.from_saved(table["layout"])
        if (promised := table.get("promise")) is not None:
            table["promise"] = Promise(**{f.name: promised[f.name] for f in fields(Promise) if f.name in promised})
        return Plan(**{f.name: table[f.name] for f in fields(Plan) if f.name in table})

    def explain(self) -> str:
        """The plan in a sentence or two."""
        ranks = f"{self.ranks} {'GPU' if self.device == 'cuda' else 'CPU'} rank{'s' if self.ranks > 1 else ''}"
        work = f"{self.accumulation} × micro-batch of {self.micro_batch}"
        some = self.active is not None and self.active < self.parameters
        active = f" ({(self.active or 0) / 1e6:,.2f} M active)" if some else ""
        return f"{self.parameters / 1e6:,.2f} M parameters{active} on {ranks}, {work} per rank and step, {self.compute}"
