"""Typed records of what happened in a run. One line of events.jsonl is one record; docs/run-directory.md is the contract."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, dataclass_transform

from phalanx.spec.json_value import Json
from phalanx.spec.layout import SavedLayout
from phalanx.spec.plan import Promise

KINDS: dict[str, type[Event]] = {}
"""Every kind of record by its name in events.jsonl, in the order of this file."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
@dataclass(frozen=True, kw_only=True)
class Event:
    """Base class of all records. A subclass is a frozen dataclass of its kind: `RunStarted` is written as "run_started"."""

    kind: ClassVar[str]
    time: float = 0.0
    """Seconds since 1970, set when the record is written."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, kw_only=True)(cls)
        cls.kind = re.sub(r"\B(?=[A-Z])", "_", cls.__name__).lower()
        KINDS[cls.kind] = cls


class RunStarted(Event):
    """One launch of the run: the first in its directory, or a resumption."""

    version: str
    ranks: int
    device: str
    steps: int
    parameters: int
    micro_batch: int
    accumulation: int
    layout: SavedLayout
    compute: str
    promise: Promise | None = None
    """What the plan expects of the run; None: nothing is promised."""
    program: list[str] = field(default_factory=list)
    """The program of `phalanx launch`, and its arguments. Steps, parameters and batch are 0 then."""
    adapters: int | None = None
    """Parameters of LoRA adapters, which alone are trained; None: all are."""
    saves: bool = True
    """Whether it saves checkpoints; False with `checkpoint.save = false`."""


class HostsChecked(Event):
    """The hosts of a run on several nodes were checked before the first step."""

    hosts: dict[str, str]
    """Host name of each node."""
    seconds: float
    links: dict[str, float]
    """Bytes/s in the slower direction between two nodes such as "0-1"; 0: they cannot connect. Empty if all nodes are on one machine."""
    round_trips: dict[str, float]
    """Seconds, of the same pairs."""
    flops: dict[str, float]
    """FLOP/s of the slowest device of each node."""
    rejected: int
    """Hosts that failed the check; each has a `host_rejected` record."""


class HostRejected(Event):
    """A host failed the check before the first step. The run starts without it, or ends."""

    node: int
    host: str
    message: str
    """What is wrong, with value, limit and remedy."""


class WorkerStarted(Event):
    """The process of a rank is running."""

    rank: int
    host: str
    pid: int
    device: str


class ModelPlaced(Event):
    """The part of the model on one rank, and the techniques applied to it, read from the actual tensors and modules."""

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


class StepCompiled(Event):
    """The XLA engine has compiled its step: once per launch, before the first step."""

    seconds: float
    """Of tracing and compiling."""
    flops: float
    """Of the matrix products of one device in a step."""
    arguments: int
    """Bytes of state and batch on one device; so are the next two."""
    donated: int
    """Of these, what the new state takes over."""
    temporary: int
    """What the step needs besides its arguments."""
    was_cached: bool = False
    """Whether an earlier start or another run had compiled it, so that it was read from the cache."""


class StepAccounted(Event):
    """Communication, memory and FLOPs of one step on one rank."""

    step: int
    rank: int
    sent: dict[str, dict[str, int]]
    """Bytes sent by this rank, by technique and collective."""
    memory: dict[str, int]
    """Bytes at the peak of the step: "parameters", "gradients", "optimizer", "activations"."""
    flops: dict[str, int] = field(default_factory=dict)
    """Floating-point operations of matrix products and attention: "all", and the part that recomputation "repeated"."""


class StepTimed(Event):
    """Where the time of one early step went on one rank."""

    step: int
    rank: int
    seconds: float
    """Duration of the step on this rank."""
    parts: dict[str, float]
    """Seconds that add up to the step: "compute" (with kernel launches), "tensor", "context", "expert" and "data" (blocked in collectives
    of that technique), "bubble" (waiting for another pipeline stage), "optimizer", "loading" (waiting for the batch), "other"."""


class Restored(Event):
    """The state was read from a checkpoint; training continues after `step`."""

    step: int
    path: str
    seconds: float


class DataOpened(Event):
    """What a launch reads."""

    documents: int
    """Documents of all sources, held-out ones included."""
    tokens: int
    """Training tokens in one epoch of all sources."""
    run_tokens: int
    """Tokens of all steps of the run."""
    parameters: int
    """Of the model."""


class SettingsChanged(Event):
    """The launch continues with other settings than those of the state that it starts from."""

    step: int
    """Step of that state."""
    changes: dict[str, list[Json]]
    """Key to [old value, new value]; null: not set."""


class WeightsLoaded(Event):
    """The run starts from the weights of model.from instead of initialized ones."""

    path: str
    seconds: float


class Step(Event):
    """One optimizer step."""

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
    preferred: float | None = None
    """DPO: fraction of the pairs whose chosen answer has gained more than the rejected one, relative to the reference. None otherwise."""
    reward: float | None = None
    """DPO: mean of beta times that gain. None otherwise."""


class StepSkipped(Event):
    """A step without an update: loss or gradient was not finite, or a spike. The position in the data advances."""

    step: int
    samples: int
    loss: float
    grad_norm: float
    in_a_row: int
    reason: str = "not finite"
    """"not finite" or "spike"."""


class ExpertLoads(Event):
    """Tokens that each expert of each layer received, every 20 steps. A model with more than 1,024 experts in all layers writes it less often, in
    proportion."""

    step: int
    """The last step that is counted."""
    steps: int
    """Steps that are counted: 20, or fewer at the beginning of a launch."""
    tokens: dict[str, list[int]]
    """Layer, such as "blocks.3", to the tokens of each of its experts, summed over all ranks."""


class Evaluated(Event):
    """Held-out loss after `step`."""

    step: int
    loss: float
    """Mean over the held-out target tokens of all sources."""
    tokens: int
    seconds: float
    perplexity: float | None = None
    """exp(loss)."""
    sources: dict[str, dict[str, float]] = field(default_factory=dict)
    """The same by source: {name: {"loss", "perplexity", "tokens"}}."""


class Sampled(Event):
    """Text generated after `step`; one record per prompt."""

    step: int
    prompt: str
    """An element of train.sample_prompts; empty: the beginning of a document."""
    text: str
    """What the model wrote, without the prompt."""
    tokens: int
    seconds: float


class Saved(Event):
    """A checkpoint is complete."""

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


class SaveFailed(Event):
    """The checkpoint of this step could not be written. Earlier checkpoints are untouched and the run continues."""

    step: int
    path: str
    reason: str


class Exported(Event):
    """A checkpoint was exported for transformers, and the export reproduces the logits of the model in training."""

    step: int
    path: str
    seconds: float
    """From the complete checkpoint to the complete export."""
    difference: float
    """Largest difference of the logits of a fixed prompt, relative to the largest logit."""


class ExportFailed(Event):
    """The checkpoint of this step was not exported. The checkpoint is untouched and the run continues."""

    step: int
    path: str
    reason: str


class Copied(Event):
    """A replica of the state is complete in host memory, outside the workers."""

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


class Uploaded(Event):
    """A checkpoint of the run directory is complete at checkpoint.url, too."""

    step: int
    url: str
    bytes: int
    seconds: float
    """From the first byte until the upload was complete."""
    skipped: list[int] = field(default_factory=list)
    """Earlier steps that are not uploaded because this one is newer."""


class UploadFailed(Event):
    """A checkpoint could not be uploaded to checkpoint.url. The run continues; the next checkpoint is tried again."""

    step: int
    url: str
    reason: str


class CheckpointDamaged(Event):
    """A damaged checkpoint was skipped in the search for the newest valid one."""

    path: str
    reason: str


class Warned(Event):
    """Something the user should know. The run continues."""

    message: str


class WorkerFailed(Event):
    """The failure that ends the run: the rank that failed first, and why."""

    rank: int | None
    reason: str
    traceback: str = ""


class FailureNoticed(Event):
    """A failure was detected. `recovered` follows, or the run ends."""

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


class Recovered(Event):
    """The first step after failures, or after nodes joined, is complete."""

    failures: list[int]
    """Numbers of the failures; empty if nodes joined."""
    action: str
    """"restart", "spare", "shrink" or "grow"."""
    generation: int
    ranks: int
    layout: SavedLayout
    source: str
    """Origin of the state: "live" (survivors), "memory" (replicas), "disk" (checkpoint), "beginning" (step 0) or "program" (its own)."""
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


class ControllerChanged(Event):
    """The node of the controller was lost and another node took over."""

    term: int
    node: int


class ClockAligned(Event):
    """A node's monotonic clock was compared with the controller's (`watch.timeline`)."""

    node: int
    reference: int
    """Node of the controller."""
    offset: float
    """Seconds to add to the node's clock to get that of the reference."""
    error: float
    """Seconds by which the offset can be wrong."""


class Straggling(Event):
    """A rank is persistently slower than the others, which wait for it."""

    rank: int
    node: int | None
    step: int
    factor: float
    """Compute time of this rank divided by the median of the others."""
    message: str


class Corrupted(Event):
    """Replicas that must be equal differ. The step was not applied."""

    step: int
    rank: int | None
    """The rank with the wrong values; None if that is unknown."""
    what: str
    """"weights", "optimizer" or "gradients"."""
    message: str


class NotFinite(Event):
    """Where a loss or gradient first became infinite or NaN."""

    step: int
    rank: int | None
    """None if the repeated step was finite."""
    layer: str
    message: str


class Rewound(Event):
    """The run rolled back to a good checkpoint after bad steps and skips the data since."""

    step: int
    """Step it rolled back from."""
    to_step: int
    """Step it rolled back to."""
    skipped_samples: list[int]
    """First skipped sample, and the first sample after the skipped ones."""
    path: str


class StrangerRefused(Event):
    """A connection without the token of this run was refused."""

    address: str
    node: int
    reason: str
    count: int = 1
    """Refusals since the last such record; records are rate-limited."""


class FaultInjected(Event):
    """A fault of --chaos is about to happen."""

    fault: str
    """The fault as written on the command line."""
    rank: int | None
    node: int | None
    step: int | None


class RequestStarted(Event):
    """Ranks of the running job will carry out a request, such as that of `phalanx profile`."""

    request: str
    """Identifies the request; its other records have the same."""
    what: str
    """"profile" or "memory"."""
    step: int
    """The first step of it, the same on all these ranks."""
    steps: int
    ranks: list[int]


class RequestFailed(Event):
    """A request was refused or not carried out. Training continues."""

    request: str
    what: str
    rank: int | None
    """None: all ranks that have not answered yet."""
    reason: str


class Profiled(Event):
    """A rank has written the profile of some of its steps."""

    request: str
    what: str
    """"profile" (a trace of torch.profiler) or "memory" (allocations)."""
    step: int
    """The first step of it."""
    steps: int
    rank: int
    host: str
    path: str
    """In the run directory, as that host sees it."""
    bytes: int
    seconds: float
    """Of one of these steps, in the mean, with the cost of recording."""
    top: dict[str, float]
    """The largest parts: of a profile, kernel or operator to its seconds in one step; of memory, place to its bytes."""


class Stopped(Event):
    """The run was asked to stop. If it has saved, it can be resumed."""

    step: int
    reason: str
    saved: bool = True
    """False with `checkpoint.save = false`."""


class Finished(Event):
    """All steps are complete."""

    step: int


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
    if "promise" in types:
        values["promise"] = Promise.from_saved(values.get("promise"))
    return record(**{key: _number(value) if "float" in types[key] else value for key, value in values.items() if key in types})


def plain(value: Any) -> Any:
    """Convert a value, or a nested table, to what JSON can represent."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _number(inner) for key, inner in value.items()}
    return float(value) if isinstance(value, str) else value
