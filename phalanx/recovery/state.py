"""What a decision is made from and what it says: the situation of a run, what can happen to it, and what can be done about it.

Plain frozen values. The controller of a live run fills them in from what its agents say, a simulator from a model of the world;
`recovery/policy` reads both alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from phalanx.spec.layout import Layout


@dataclass(frozen=True, slots=True)
class Node:
    """A node that lives."""

    number: int
    slots: int
    """Ranks that it has room for, those that run on it included."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure, as it is remembered."""

    cause: str
    """"died", "hung", "node lost", "connection lost", "corrupt", "failed"."""
    rank: int | None
    step: int | None
    """The last step that was complete then; None where it is not known."""
    reason: str
    """In words; with `cause` and `step`, the first line tells whether two failures are the same."""
    node: int | None = None
    tried: str = ""
    """What was done about it: the action's name; empty where nothing was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """A run as it was when something happened to it."""

    wanted: Layout
    """What the run asked for, all degrees fixed."""
    layout: Layout
    """Of the running generation."""
    assignment: tuple[int, ...]
    """Node of each of its ranks."""
    nodes: tuple[Node, ...]
    """All that live, spare ones and returned ones included."""
    history: tuple[Failure, ...] = ()
    """Failures of this launch, without those that happen now."""
    dead: tuple[int, ...] = ()
    """Ranks that had no process any more before this happened: a run that waits has some."""
    begun: int = 0
    """The step that this launch began from."""
    restarts: int = 100
    """Failures within 1,000 new steps that are recovered from; one more ends the run."""
    shrink: bool = True
    """Go on with fewer ranks where there is no room for all."""
    continue_degraded: bool = False
    """Healthy replicas do not wait for a broken one."""
    batch: int | None = None
    """Sequences of a step. Where it is known, nobody asks about layouts whose replicas do not divide it: on thousands of ranks
    these are nearly all."""


# --- what happens ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerDied:
    """The process of a rank is gone, or was ended because it hung."""

    rank: int
    step: int | None
    """The last step that was complete; so with the others."""
    cause: str
    reason: str
    node_lives: bool = True
    """Its node can start another."""
    traceback: str = ""
    """Of the program's error, or the stack of one that hung."""
    final: bool = False
    """It said itself that the run cannot go on, as when nothing can be saved: no use in trying again."""


@dataclass(frozen=True, slots=True)
class NodeLost:
    """A node is gone with everything on it."""

    node: int
    step: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node is there, or has room again: a new one, one that returned, one that has started its broken worker again."""

    node: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    """Connections broke, but nobody died."""

    step: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Corrupt:
    """A rank holds other numbers than its replicas. It lives, but what it holds must not be gone on with."""

    rank: int | None
    """None where it cannot be told which is wrong: then nobody's numbers are believed."""
    step: int | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class EventBatch:
    """All that is known at the same time makes one decision."""

    events: tuple[Event, ...]


Event: TypeAlias = WorkerDied | NodeLost | NodeJoined | Disconnected | Corrupt | EventBatch


# --- what is done ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewGeneration:
    """Begin a new generation."""

    action: Literal["restart", "spare", "shrink", "grow"]
    layout: Layout
    assignment: tuple[int, ...]
    """Node of each new rank."""
    old: tuple[int | None, ...]
    """For each new rank the rank of the old generation whose process takes it, on the same node; None: a new process."""

    @property
    def fresh(self) -> tuple[int, ...]:
        """New ranks that need a new process."""
        return tuple(rank for rank, old in enumerate(self.old) if old is None)


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing fits now: halt, keep what lives, and decide again when a node comes."""

    reason: str
    dead: tuple[int, ...]
    """Ranks without a process: `Situation.dead` of the next decision."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """Give up."""

    story: str
    """Why, in words for a person."""


@dataclass(frozen=True, slots=True)
class NoChange:
    """Go on as before."""


Action: TypeAlias = NewGeneration | Wait | EndRun | NoChange
