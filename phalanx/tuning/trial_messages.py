"""The messages between `tuning/trial_bench` and the processes of a trial, `tuning/trial_process`: one JSON object per line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields

from phalanx.spec.json_value import JsonObject


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialJob:
    """What to train. The first message to the process."""

    run: str
    """The run file, as TOML."""
    plan: str
    """Its plan, as JSON."""
    folder: str
    """An empty folder for what the trainer writes; the parent removes it."""
    parent: int
    """Process id of the parent, whose end ends the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeTurn:
    """Take this many steps and measure each."""

    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """All ranks have built their part of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialTurn:
    """Consecutive steps, as rank 0 measures them."""

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of one of the steps by part, where the trainer has timed one: keys of `planning/feedback.MEASURED_PARTS`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialLost:
    """A rank cannot go on. The last message."""

    reason: str
    out_of_memory: bool = False


Message = TrialJob | TakeTurn | Ready | TrialTurn | TrialLost
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (TrialJob, TakeTurn, Ready, TrialTurn, TrialLost)}


def encode(message: Message) -> bytes:
    """A message as a line."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message of a line."""
    table: JsonObject = json.loads(line)
    kind = _KINDS[str(table.pop("kind"))]
    values = {item.name: table[item.name] for item in fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})  # type: ignore[arg-type]
