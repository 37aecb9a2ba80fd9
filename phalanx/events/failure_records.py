"""Records of what goes wrong in a run, and of what was done about it. Read and written through `events/records`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from phalanx.events.event import Event


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureNoticed(Event):
    """Something broke. What was done about it follows as `recovered`, or the run ends."""

    kind: ClassVar[str] = "failure_noticed"
    number: int
    """Counts the failures of a launch from 1; `recovered` names those that it ends."""
    cause: str
    """"died", "hung", "node lost", "connection lost", "corrupt", "failed"."""
    message: str
    """In words: who, where, since when."""
    rank: int | None = None
    node: int | None = None
    step: int | None = None
    """The last step that was complete then."""
    traceback: str = ""
    """Stack of the culprit, where there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered(Event):
    """The run goes on: the first step after failures, or after nodes came or went, is done."""

    kind: ClassVar[str] = "recovered"
    failures: list[int]
    """Numbers of the failures; empty where nodes have come."""
    action: str
    """"restart", "spare", "shrink", "grow"."""
    generation: int
    ranks: int
    layout: dict[str, Any]
    source: str
    """Where the state came from: "live", "memory", "disk", "beginning"."""
    step: int
    """The step that was gone on from."""
    steps_lost: int
    """Complete steps that had to be taken again."""
    noticed: float
    """Seconds since 1970, like the three that follow."""
    decided: float
    restarted: float
    """All ranks of the new generation had the state."""
    first_step: float
    seconds: float
    """From noticed to the first step done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerChanged(Event):
    """The node that decides was lost, and another decides now."""

    kind: ClassVar[str] = "controller_changed"
    term: int
    node: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggling(Event):
    """A rank is persistently slower than the others, which wait for it."""

    kind: ClassVar[str] = "straggling"
    rank: int
    node: int | None
    step: int
    factor: float
    """Its working time over the others' median."""
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrupted(Event):
    """Replicas that must be equal are not: the step was not applied."""

    kind: ClassVar[str] = "corrupted"
    step: int
    rank: int | None
    """The guilty one; None where it cannot be told."""
    what: str
    """"weights", "optimizer" or "gradients"."""
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NotFinite(Event):
    """Where a loss or gradient that is not finite first appeared."""

    kind: ClassVar[str] = "not_finite"
    step: int
    rank: int | None
    """None where repeating the step showed nothing."""
    layer: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewound(Event):
    """After bad steps the run went back to a good state and leaves out the data since."""

    kind: ClassVar[str] = "rewound"
    step: int
    """The step that it went back from."""
    to: int
    """The step that it went back to."""
    left_out: list[int]
    """First sample that is left out, and the first that is not."""
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StrangerRefused(Event):
    """Somebody without this run's token spoke to one of its processes, and was sent away."""

    kind: ClassVar[str] = "stranger_refused"
    address: str
    node: int
    reason: str
    count: int = 1
    """Refusals since the last such record; they are told once in a while."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultInjected(Event):
    """A fault that --chaos asked for happens now."""

    kind: ClassVar[str] = "fault_injected"
    fault: str
    """As it was written."""
    rank: int | None
    node: int | None
    step: int | None
