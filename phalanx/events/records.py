"""What happened in a run, as typed records. One line of events.jsonl is one record; docs/run-directory.md is the contract.

Training and launching emit them; the display, the summary and embedding programs read them.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from phalanx.events.event import Event
from phalanx.events.failure_records import (
    ControllerChanged,
    Corrupted,
    FailureNoticed,
    FaultInjected,
    NotFinite,
    Recovered,
    Rewound,
    Straggling,
    StrangerRefused,
)

__all__ = [  # noqa: RUF022 - in the order of the file
    "Event", "ControllerChanged", "Corrupted", "FailureNoticed", "FaultInjected", "NotFinite", "Recovered", "Rewound", "Straggling",
    "StrangerRefused",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted(Event):
    """A launch of the run: the first of a directory, or a resumption."""

    kind: ClassVar[str] = "run_started"
    version: str
    ranks: int
    device: str
    steps: int
    parameters: int
    micro_batch: int
    accumulation: int
    layout: dict[str, Any]
    compute: str
    promise: dict[str, Any] | None = None
    """What the plan expects: seconds of a step with `low` and `high` (P10, P90) and their `split`, tokens_per_second, `memory` by
    component and total_memory in bytes of the fullest rank, mfu, days, price. None: nothing is promised."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStarted(Event):
    """A rank is running."""

    kind: ClassVar[str] = "worker_started"
    rank: int
    host: str
    pid: int
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlaced(Event):
    """What a rank holds of the model and what was really done to it, read off the placed tensors and modules."""

    kind: ClassVar[str] = "model_placed"
    rank: int
    applied: dict[str, str]
    """By technique, in words."""
    parameters: int
    """Bytes on this rank."""
    gradients: int
    optimizer: int
    """Bytes of states and master weights in the memory of device and host."""
    files: int = 0
    """Bytes of those in files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAccounted(Event):
    """What one step of this launch cost a rank in messages and memory."""

    kind: ClassVar[str] = "step_accounted"
    step: int
    rank: int
    sent: dict[str, dict[str, int]]
    """Bytes that the rank sent, by technique and collective."""
    memory: dict[str, int]
    """Bytes at the step's peak: "parameters", "gradients", "optimizer", "activations"."""
    flops: dict[str, int] = field(default_factory=dict)
    """Floating-point operations of matrix products and attention: "all", and of those "repeated" by recomputation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimed(Event):
    """What one of the early steps of this launch was made of on a rank."""

    kind: ClassVar[str] = "step_timed"
    step: int
    rank: int
    seconds: float
    """Of the step on this rank."""
    parts: dict[str, float]
    """Seconds that add up to it: "compute" (launching too), "tensor", "context", "expert" and "data" (waiting for messages of that
    technique), "bubble" (for another pipeline stage), "optimizer", "loading" (waiting for the batch), "other"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored(Event):
    """State was read from a checkpoint; training goes on after `step`."""

    kind: ClassVar[str] = "restored"
    step: int
    path: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsLoaded(Event):
    """The run begins from given weights, those of model.from, instead of drawn ones."""

    kind: ClassVar[str] = "weights_loaded"
    path: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Event):
    """An optimizer step was taken."""

    kind: ClassVar[str] = "step"
    step: int
    """Counts from 1."""
    loss: float
    """Mean over the target tokens of the whole global batch, in nats."""
    tokens: int
    """Target tokens in this step's batch."""
    samples: int
    """Position in the data after this step: sequences consumed since the beginning of the run."""
    batch_digest: str
    """Checksum of the token ids of the whole global batch, in order: equal wherever the same tokens were seen."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    seconds: float
    tokens_per_second: float
    flops_per_second: float
    mfu: float | None
    memory: int
    """Largest of all ranks: device bytes at peak on GPUs, resident bytes on CPUs."""
    expert_load: float | None = None
    """Mixture of experts: load of the fullest expert over the mean, in the layer where that is worst, over the last 20 steps
    of this launch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSkipped(Event):
    """Loss or gradient was not finite, or far outside the usual: no rank changed anything. The data position moves on."""

    kind: ClassVar[str] = "step_skipped"
    step: int
    samples: int
    loss: float
    grad_norm: float
    in_a_row: int
    reason: str = "not finite"
    """Or "spike"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated(Event):
    """Held-out loss after `step`."""

    kind: ClassVar[str] = "evaluated"
    step: int
    loss: float
    """Mean over the held-out target tokens that were read, of all sources together."""
    tokens: int
    seconds: float
    perplexity: float | None = None
    """exp(loss)."""
    sources: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same by source: {name: {"loss", "perplexity", "tokens"}}."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved(Event):
    """A checkpoint is complete."""

    kind: ClassVar[str] = "saved"
    step: int
    path: str
    bytes: int
    seconds: float
    """From the moment it holds until it was complete."""
    stall: float = 0.0
    """Seconds of those that training stood still for it."""
    write_seconds: float = 0.0
    """Seconds of those that writing took, behind training where the save is asynchronous."""
    bytes_per_second: float = 0.0
    """Of the writing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveFailed(Event):
    """There is no checkpoint of this step; earlier ones are untouched, and the run goes on."""

    kind: ClassVar[str] = "save_failed"
    step: int
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported(Event):
    """A checkpoint is there for transformers too, and says what the model in training said."""

    kind: ClassVar[str] = "exported"
    step: int
    path: str
    seconds: float
    """From when the checkpoint was complete."""
    difference: float
    """Of the logits of a fixed prompt from the model's in training: the largest, as a part of the largest logit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFailed(Event):
    """There is no export of this step; its checkpoint is untouched, and the run goes on."""

    kind: ClassVar[str] = "export_failed"
    step: int
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied(Event):
    """A copy of the state is whole in host memory, outside the workers."""

    kind: ClassVar[str] = "copied"
    step: int
    bytes: int
    seconds: float
    """From the moment it holds until it was whole."""
    stall: float
    """Seconds of those that training stood still for it."""
    peer: bool
    """Every rank's part is on a second node too."""
    passed_over: int = 0
    """Copies that were due before it and left out, as the one before them was still under way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Uploaded(Event):
    """A checkpoint of the run directory is complete at checkpoint.url as well."""

    kind: ClassVar[str] = "uploaded"
    step: int
    url: str
    bytes: int
    seconds: float
    """From its first byte until it was complete there."""
    skipped: list[int] = field(default_factory=list)
    """Earlier steps that were saved while another was on its way, and are not uploaded any more."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadFailed(Event):
    """A checkpoint is in the run directory but not at checkpoint.url; the run goes on, and the next will be tried."""

    kind: ClassVar[str] = "upload_failed"
    step: int
    url: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDamaged(Event):
    """A checkpoint was passed over when the newest valid one was looked for."""

    kind: ClassVar[str] = "checkpoint_damaged"
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned(Event):
    """Something a person should know; the run goes on."""

    kind: ClassVar[str] = "warned"
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailed(Event):
    """The rank that failed first, and why."""

    kind: ClassVar[str] = "worker_failed"
    rank: int | None
    reason: str
    traceback: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped(Event):
    """The run was told to stop and has saved; it can be resumed."""

    kind: ClassVar[str] = "stopped"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished(Event):
    """All steps are done."""

    kind: ClassVar[str] = "finished"
    step: int


KINDS: dict[str, type[Event]] = {
    record.kind: record
    for record in (
        RunStarted, WorkerStarted, ModelPlaced, StepAccounted, StepTimed, Restored, WeightsLoaded, Step, StepSkipped, Evaluated,
        Saved, SaveFailed, Copied, Exported, ExportFailed, Uploaded, UploadFailed, CheckpointDamaged, Warned, WorkerFailed,
        FailureNoticed, Recovered, ControllerChanged, Straggling, Corrupted, NotFinite, Rewound, StrangerRefused, FaultInjected,
        Stopped, Finished,
    )
}  # fmt: skip


def encode(event: Event) -> str:
    """One line of JSON. Numbers that JSON lacks are written as the strings "nan", "inf" and "-inf"."""
    table = {"event": event.kind} | {key: plain(value) for key, value in asdict(event).items()}
    return json.dumps(table, allow_nan=False)


def decode(line: str) -> Event | None:
    """The record on a line, or None for a kind this version does not know."""
    table = json.loads(line)
    record = KINDS.get(table.pop("event", ""))
    if record is None:
        return None
    known = {f.name: str(f.type) for f in fields(record)}
    return record(**{key: _number(value) if "float" in known[key] else value for key, value in table.items() if key in known})


def plain(value: Any) -> Any:
    """A value as JSON can write it, tables included."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _number(inner) for key, inner in value.items()}
    return float(value) if isinstance(value, str) else value
