"""Input and output of `recovery/policy`, as frozen values: the situation of a run, the events that can happen to it, and the actions that
answer them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from phalanx.spec.layout import Layout
from phalanx.spec.run import Resilience

# What the error of a rank says when another rank, or the generation, went away.
_SECONDARY_ERRORS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Socket closed",
    "NCCL communicator was aborted",
    "Timed out waiting",
    "unexpected EOF",
    "Transport endpoint is not connected",
    "Bad file descriptor",
    " is over",  # "generation 3 is over"
    "no longer, met here",
)


def is_secondary_error(reason: str) -> bool:
    """Whether an error only says that another rank went away, and so explains nothing."""
    return any(words in reason for words in _SECONDARY_ERRORS)


@dataclass(frozen=True, slots=True)
class Failure:
    """One failure of this launch, as an event and later as a part of the history."""

    cause: str
    """"died", "hung" or "failed" (by its own error) of a rank; "node lost"; "connection lost", but no process died; "corrupt"."""
    rank: int | None
    """The rank that died, or whose state must be discarded because it is corrupt. None for other causes, and if it is unknown which rank
    is corrupt: then the state of all is discarded."""
    step: int | None
    """Last complete step; None if unknown."""
    reason: str
    """Its first line, with `cause` and `step`, decides whether two failures are the same."""
    node: int | None = None
    """The lost node. The node of a rank is filled in from the situation."""
    traceback: str = ""
    """Traceback of the error, or stack of a hung rank."""
    final: bool = False
    """The rank itself says that the run cannot continue, for example because nothing can be saved."""
    tried: str = ""
    """Name of the action that answered it; empty if none."""
    time: float = 0.0
    """When it was noticed, in seconds since 1970; 0: unknown."""

    @property
    def is_death(self) -> bool:
        """Whether the process of a rank has ended."""
        return self.cause in ("died", "hung", "failed")


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """A node joined, returned, or has free slots again."""

    node: int


@dataclass(frozen=True, slots=True)
class NodeLeaving:
    """A node goes away soon: its ranks still work and have their state, but it is not among `Situation.nodes` any more."""

    node: int


Event: TypeAlias = Failure | NodeJoined | NodeLeaving


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The run before the events."""

    wanted: Layout
    """Layout that the run asks for, with all degrees fixed."""
    layout: Layout
    """Layout of the running generation."""
    assignment: tuple[int, ...]
    """Node of each of its ranks."""
    nodes: Mapping[int, int]
    """Slots of every living node that stays, including spare and returned ones: the ranks that it can run, with those that it runs now."""
    history: tuple[Failure, ...] = ()
    """Earlier failures of this launch."""
    dead: tuple[int, ...] = ()
    """Ranks that already had no process, because the run waits for a node."""
    first_step: int = 0
    """Step that this launch began from."""
    settings: Resilience = field(default_factory=Resilience)
    counts_steps: bool = True
    """False: a program of the user's own, whose steps nobody knows. Time counts instead."""
    saves: bool = True
    """Whether the run saves checkpoints."""
    batch: int | None = None
    """Sequences per step. If given, layouts whose replicas do not divide it are skipped early: on thousands of ranks most do not."""


# --- actions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NewGeneration:
    """Begin a new generation."""

    action: Literal["restart", "spare", "shrink", "grow"]
    layout: Layout
    assignment: tuple[int, ...]
    """Node of each new rank."""
    old: tuple[int | None, ...]
    """For each new rank, the old rank whose process it takes over, on the same node; None: a new process."""


@dataclass(frozen=True, slots=True)
class Wait:
    """No layout fits: halt, keep the survivors, and decide again when a node joins."""

    reason: str
    dead: tuple[int, ...]
    """Ranks without a process, for the next `Situation.dead`."""


@dataclass(frozen=True, slots=True)
class EndRun:
    """Give up the run."""

    story: str
    """The reason, for people."""


Action: TypeAlias = NewGeneration | Wait | EndRun | None
"""None: continue as before."""
