"""The messages between `comparison/compare_step` and the process of a trainer, `comparison/trainer_process`: one JSON object per line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from phalanx.spec.json_value import JsonObject

PHALANX, PHALANX_XLA = "phalanx", "phalanx-xla"
"""Names of Phalanx among the trainers, with the torch engine and with the XLA engine."""
ON_JAX = (PHALANX_XLA, "jax")
"""Trainers that compute with JAX."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerJob:
    """What a process runs. The first message to it."""

    trainer: str
    """A name of `comparison/compare_step.TRAINERS`."""
    run: str
    """The run file, as TOML."""
    plan: str
    """Phalanx's plan, as JSON. Every trainer takes device, threads, micro-batch and number format from it."""
    compile: bool
    """Whether a peer compiles its model; Phalanx obeys the run."""
    folder: str
    """An empty folder for what the trainer writes; the parent removes it."""
    parent: int
    """Process id of the parent, whose end ends the process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TakeSteps:
    """Take this many steps and measure each."""

    steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Built:
    """The trainer exists, with its initial weights."""

    version: str
    settings: str
    """What it computes with, in words."""
    compute: str
    """Its number format: fp32, bf16 or fp8."""
    token_losses: tuple[float, ...]
    """Losses of the tokens of one sequence, before the first step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """Consecutive steps of one trainer, while the others wait."""

    seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    """Time that all threads of the process computed."""
    losses: tuple[float, ...]
    memory: int
    """Peak since the first step: bytes of tensors on a GPU; resident bytes of the process on CPUs."""
    reserved: int | None
    """GPUs: peak of the bytes that torch holds, with what is cached and fragmented."""
    retries: int
    """GPUs: how often an allocation had to free cached memory first, which slows a step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failed:
    """The trainer cannot be built or cannot go on. The last message of a process."""

    reason: str
    out_of_memory: bool = False


Message = TrainerJob | TakeSteps | Built | Turn | Failed
_KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in (TrainerJob, TakeSteps, Built, Turn, Failed)}


def encode(message: Message) -> str:
    """A message as a line."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}) + "\n"


def decode(line: str) -> Message:
    """The message of a line."""
    table: JsonObject = json.loads(line)
    kind = _KINDS[str(table.pop("kind"))]
    values = {field.name: table[field.name] for field in fields(kind)}
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})  # type: ignore[arg-type]
