"""Typed records of what happened in a run. One line of events.jsonl is one record; docs/run-directory.md is the contract.

Training and the control plane write them; the dashboard, the run summary and embedding programs read them.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from phalanx.spec.layout import SavedLayout
from phalanx.spec.plan import SavedPromise


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Base class of all records."""

    kind: ClassVar[str] = "event"
    time: float = field(default=0.0)
    """Seconds since 1970, set when the record is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted(Event):
    """One launch of the run: the first in its directory, or a resumption."""

    kind: ClassVar[str] = "run_started"
    version: str
    ranks: int
    device: str
    steps: int
    parameters: int
    micro_batch: int
    accumulation: int
    layout: SavedLayout
    compute: str
    promise: SavedPromise | None = None
    """What the plan expects, or None: `seconds` of a step with `low` and `high` (P10, P90) and their `split`, `tokens_per_second`, `memory`
    in bytes by component and `total_memory` of the fullest rank, `mfu`, `days`, `price`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerStarted(Event):
    """The process of a rank is running."""

    kind: ClassVar[str] = "worker_started"
    rank: int
    host: str
    pid: int
    device: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelPlaced(Event):
    """The part of the model on one rank, and the techniques applied to it, read from the actual tensors and modules."""

    kind: ClassVar[str] = "model_placed"
    rank: int
    applied: dict[str, str]
    """Technique to a short description."""
    parameters: int
    """Bytes on this rank; so are the next three fields."""
    gradients: int
    optimizer: int
    """Optimizer states and master weights in device and host memory."""
    files: int = 0
    """Optimizer states in files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAccounted(Event):
    """Communication, memory and FLOPs of one step on one rank."""

    kind: ClassVar[str] = "step_accounted"
    step: int
    rank: int
    sent: dict[str, dict[str, int]]
    """Bytes sent by this rank, by technique and collective."""
    memory: dict[str, int]
    """Bytes at the peak of the step: "parameters", "gradients", "optimizer", "activations"."""
    flops: dict[str, int] = field(default_factory=dict)
    """Floating-point operations of matrix products and attention: "all", and the part that recomputation "repeated"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimed(Event):
    """Where the time of one early step went on one rank."""

    kind: ClassVar[str] = "step_timed"
    step: int
    rank: int
    seconds: float
    """Duration of the step on this rank."""
    parts: dict[str, float]
    """Seconds that add up to the step: "compute" (with kernel launches), "tensor", "context", "expert" and "data" (blocked in collectives
    of that technique), "bubble" (waiting for another pipeline stage), "optimizer", "loading" (waiting for the batch), "other"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored(Event):
    """The state was read from a checkpoint; training continues after `step`."""

    kind: ClassVar[str] = "restored"
    step: int
    path: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsLoaded(Event):
    """The run starts from the weights of model.from instead of initialized ones."""

    kind: ClassVar[str] = "weights_loaded"
    path: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Event):
    """One optimizer step."""

    kind: ClassVar[str] = "step"
    step: int
    """Counts from 1."""
    loss: float
    """Mean over the target tokens of the global batch, in nats."""
    tokens: int
    """Target tokens of the global batch."""
    samples: int
    """Position in the data after this step: sequences consumed since the start of the run."""
    batch_digest: str
    """Checksum of the token ids of the global batch, in order. Equal digests mean equal batches."""
    learning_rate: float
    grad_norm: float
    """Before clipping."""
    seconds: float
    tokens_per_second: float
    flops_per_second: float
    mfu: float | None
    memory: int
    """Maximum over all ranks: peak device bytes on GPUs, resident bytes on CPUs."""
    expert_load: float | None = None
    """Load of the fullest expert divided by the mean, in the worst layer, over the last 20 steps of this launch. None without experts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSkipped(Event):
    """A step without an update: loss or gradient was not finite, or a spike. The position in the data advances."""

    kind: ClassVar[str] = "step_skipped"
    step: int
    samples: int
    loss: float
    grad_norm: float
    in_a_row: int
    reason: str = "not finite"
    """"not finite" or "spike"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated(Event):
    """Held-out loss after `step`."""

    kind: ClassVar[str] = "evaluated"
    step: int
    loss: float
    """Mean over the held-out target tokens of all sources."""
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
    """From the snapshot until the checkpoint was complete."""
    stall: float = 0.0
    """Seconds for which training was blocked."""
    write_seconds: float = 0.0
    """Seconds spent writing, in the background if the save is asynchronous."""
    bytes_per_second: float = 0.0
    """Write throughput."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveFailed(Event):
    """The checkpoint of this step could not be written. Earlier checkpoints are untouched and the run continues."""

    kind: ClassVar[str] = "save_failed"
    step: int
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported(Event):
    """A checkpoint was exported for transformers, and the export reproduces the logits of the model in training."""

    kind: ClassVar[str] = "exported"
    step: int
    path: str
    seconds: float
    """From the complete checkpoint to the complete export."""
    difference: float
    """Largest difference of the logits of a fixed prompt, relative to the largest logit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportFailed(Event):
    """The checkpoint of this step was not exported. The checkpoint is untouched and the run continues."""

    kind: ClassVar[str] = "export_failed"
    step: int
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Copied(Event):
    """A replica of the state is complete in host memory, outside the workers."""

    kind: ClassVar[str] = "copied"
    step: int
    bytes: int
    seconds: float
    """From the snapshot until the replica was complete."""
    stall: float
    """Seconds for which training was blocked."""
    peer: bool
    """A second node has a replica of every part, too."""
    skipped: int = 0
    """Replicas skipped before this one because the previous one was still being written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Uploaded(Event):
    """A checkpoint of the run directory is complete at checkpoint.url, too."""

    kind: ClassVar[str] = "uploaded"
    step: int
    url: str
    bytes: int
    seconds: float
    """From the first byte until the upload was complete."""
    skipped: list[int] = field(default_factory=list)
    """Earlier steps that are not uploaded because this one is newer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UploadFailed(Event):
    """A checkpoint could not be uploaded to checkpoint.url. The run continues; the next checkpoint is tried again."""

    kind: ClassVar[str] = "upload_failed"
    step: int
    url: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointDamaged(Event):
    """A damaged checkpoint was skipped in the search for the newest valid one."""

    kind: ClassVar[str] = "checkpoint_damaged"
    path: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Warned(Event):
    """Something the user should know. The run continues."""

    kind: ClassVar[str] = "warned"
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerFailed(Event):
    """The failure that ends the run: the rank that failed first, and why."""

    kind: ClassVar[str] = "worker_failed"
    rank: int | None
    reason: str
    traceback: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailureNoticed(Event):
    """A failure was detected. `recovered` follows, or the run ends."""

    kind: ClassVar[str] = "failure_noticed"
    number: int
    """Counts the failures of a launch from 1. `recovered` refers to it."""
    cause: str
    """"died", "hung", "failed", "node lost", "connection lost" or "corrupt"."""
    message: str
    """Which rank or node, where, since when."""
    rank: int | None = None
    node: int | None = None
    step: int | None = None
    """Last complete step."""
    traceback: str = ""
    """Traceback or stack of the failed rank, if there is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recovered(Event):
    """The first step after failures, or after nodes joined, is complete."""

    kind: ClassVar[str] = "recovered"
    failures: list[int]
    """Numbers of the failures; empty if nodes joined."""
    action: str
    """"restart", "spare", "shrink" or "grow"."""
    generation: int
    ranks: int
    layout: SavedLayout
    source: str
    """Origin of the state: "live" (survivors), "memory" (replicas), "disk" (checkpoint) or "beginning" (step 0)."""
    step: int
    """Step that training continued from."""
    steps_lost: int
    """Complete steps that had to be repeated."""
    noticed: float
    """Time of detection, in seconds since 1970; so are the next three fields."""
    decided: float
    restarted: float
    """All ranks of the new generation had restored the state."""
    first_step: float
    seconds: float
    """From `noticed` to `first_step`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControllerChanged(Event):
    """The node of the controller was lost and another node took over."""

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
    """Compute time of this rank divided by the median of the others."""
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Corrupted(Event):
    """Replicas that must be equal differ. The step was not applied."""

    kind: ClassVar[str] = "corrupted"
    step: int
    rank: int | None
    """The rank with the wrong values; None if that is unknown."""
    what: str
    """"weights", "optimizer" or "gradients"."""
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NotFinite(Event):
    """Where a loss or gradient first became infinite or NaN."""

    kind: ClassVar[str] = "not_finite"
    step: int
    rank: int | None
    """None if the repeated step was finite."""
    layer: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Rewound(Event):
    """The run rolled back to a good checkpoint after bad steps and skips the data since."""

    kind: ClassVar[str] = "rewound"
    step: int
    """Step it rolled back from."""
    to_step: int
    """Step it rolled back to."""
    skipped_samples: list[int]
    """First skipped sample, and the first sample after the skipped ones."""
    path: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StrangerRefused(Event):
    """A connection without the token of this run was refused."""

    kind: ClassVar[str] = "stranger_refused"
    address: str
    node: int
    reason: str
    count: int = 1
    """Refusals since the last such record; records are rate-limited."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultInjected(Event):
    """A fault of --chaos is about to happen."""

    kind: ClassVar[str] = "fault_injected"
    fault: str
    """The fault as written on the command line."""
    rank: int | None
    node: int | None
    step: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped(Event):
    """The run was asked to stop and has saved; it can be resumed."""

    kind: ClassVar[str] = "stopped"
    step: int
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished(Event):
    """All steps are complete."""

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


_RENAMED_FIELDS = {"copied": {"passed_over": "skipped"}, "rewound": {"to": "to_step", "left_out": "skipped_samples"}}
"""Kind to {old field name: new one}, for run directories of earlier versions."""


def encode(event: Event) -> str:
    """One line of JSON. Floats that JSON lacks become the strings "nan", "inf" and "-inf"."""
    return json.dumps({"event": event.kind} | {key: plain(value) for key, value in asdict(event).items()}, allow_nan=False)


def decode(line: str) -> Event | None:
    """Parse one line; None for a kind that this version does not know. Unknown fields are ignored."""
    table = json.loads(line)
    kind = table.pop("event", "")
    record = KINDS.get(kind)
    if record is None:
        return None
    renamed = _RENAMED_FIELDS.get(kind, {})
    types = {field.name: str(field.type) for field in fields(record)}
    values = {renamed.get(key, key): value for key, value in table.items()}
    return record(**{key: _number(value) if "float" in types[key] else value for key, value in values.items() if key in types})


def plain(value: Any) -> Any:
    """Convert a value, or a nested table, to what JSON can represent."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _number(inner) for key, inner in value.items()}
    return float(value) if isinstance(value, str) else value
