"""The planner's answer as a frozen value. `planning/explain` fills it in; the dashboard's text, picture and page, and `--json`, render it.

A report holds candidates as the search judged them. What a person reads of a candidate (its name, the tables to paste, the keys that lead
to it, where it loses time) is computed here, so that every rendering says the same.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from phalanx.planning.cost.step_time import PARTS
from phalanx.planning.placement import Placement
from phalanx.planning.search.candidate import Alternative, Candidate
from phalanx.spec.errors import toml
from phalanx.spec.layout import Layout

PART_LABELS = {
    "compute": "computing", "launch": "kernel launches", "tensor": "tensor exchange", "context": "context exchange",
    "expert": "expert exchange", "data": "gradients and shards", "pipeline": "messages between stages", "bubble": "pipeline bubble",
    "optimizer": "optimizer", "offload": "offload", "other": "everything else",
}  # fmt: skip
"""Names of the parts of a step."""
MEMORY_LABELS = {
    "parameters": "parameters", "gradients": "gradients", "optimizer": "optimizer states", "activations": "activations", "logits": "logits",
    "gathered": "gathered parameters", "buffers": "message buffers", "fixed": "driver and fragmentation",
}  # fmt: skip
"""Names of the components of memory."""

_NOTICEABLE = 0.002
"""Fraction of a step below which a difference in one part is not listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSummary:
    """The planned model."""

    name: str
    parameters: int
    active: int
    """Parameters that one token goes through."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterSummary:
    """The machines that the plan is for."""

    name: str
    device: Literal["cpu", "cuda", "tpu"]
    gpu: str
    gpus: int
    nodes: int
    memory: float
    """Bytes of one device."""
    price: float | None
    """US dollars of a device-hour."""
    failures: float | None
    """Interruptions per device-hour; None: no rate is known."""
    sources: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSummary:
    """The size of the planned training."""

    batch: int
    sequence_length: int
    steps: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PartChange:
    """How much longer (or, below zero, shorter) one part of the step takes in another candidate than in the best."""

    part: str
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """The best layout of a run on a cluster, the layouts it was compared with, and the reasons."""

    model: ModelSummary
    cluster: ClusterSummary
    train: TrainSummary
    aim: Literal["time", "price"]
    best: Candidate
    runners_up: tuple[Candidate, ...]
    """The next layouts, fastest first."""
    why: tuple[str, ...]
    """Sentences: why the best is the best."""
    alternatives: tuple[Alternative, ...]
    """Layouts that a reader may expect, each with the reason why it is not the best."""
    curve: tuple[Candidate, ...]
    """The trade-off of memory against time, least memory first."""
    considered: int
    """Legal layouts that the search covered."""
    fitting: int
    timed: int
    """Layouts that were timed one by one."""
    seconds: float
    """CPU time of the search."""
    assumptions: tuple[str, ...]
    placement: Placement
    placement_lines: tuple[str, ...]
    """Sentences: which groups of ranks share a node, an island or a rail."""
    scaling: tuple[Candidate, ...] = ()
    """The fastest layout on fewer and on more devices; empty where nobody asked."""

    def to_json(self) -> dict[str, Any]:
        """The object that `phalanx plan --json` prints: numbers, strings, lists and dicts alone."""
        return {
            "model": asdict(self.model),
            "cluster": asdict(self.cluster) | {"sources": list(self.cluster.sources)},
            "train": asdict(self.train),
            "aim": self.aim,
            "best": candidate_json(self.best),
            "others": [self._compared(other) for other in self.runners_up],
            "why": list(self.why),
            "why_not": [
                {
                    "name": other.name,
                    "reason": other.reason,
                    "option": None if other.candidate is None else self._compared(other.candidate),
                }
                for other in self.alternatives
            ],
            "curve": [candidate_json(candidate) for candidate in self.curve],
            "considered": self.considered,
            "fitting": self.fitting,
            "timed": self.timed,
            "seconds": self.seconds,
            "assumed": list(self.assumptions),
            "placement": asdict(self.placement) | {"lines": list(self.placement_lines)},
            "words": PART_LABELS | {name: MEMORY_LABELS[name] for name in ("gathered", "buffers", "fixed")},
        } | ({"scaling": [candidate_json(candidate) for candidate in self.scaling]} if self.scaling else {})

    def _compared(self, other: Candidate) -> dict[str, Any]:
        changes = [
            {"part": change.part, "words": PART_LABELS[change.part], "seconds": change.seconds}
            for change in part_changes(self.best, other)
        ]
        return candidate_json(other) | {"beside": changes, "change": keys_to_change(self.best, other)}


@dataclass(frozen=True, kw_only=True, slots=True)
class WhatIf:
    """The same run on a changed cluster."""

    name: str
    """Such as "twice the devices"."""
    sentence: str
    faster: float
    """Tokens per second on the changed cluster, over those on the given one; 0 where nothing fits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolveReport:
    """The smallest cluster, the largest model or the best batch, with the plan that the answer rests on."""

    what: Literal["gpus", "model", "batch"]
    value: int
    """Devices, parameters or sequences."""
    sentence: str
    plan: PlanReport
    tried: tuple[tuple[int, float], ...]
    """(value, tokens per second) of the other values that were tried."""
    what_if: tuple[WhatIf, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "what": self.what,
            "value": self.value,
            "sentence": self.sentence,
            "tried": [list(pair) for pair in self.tried],
            "what_if": [asdict(change) for change in self.what_if],
            "plan": self.plan.to_json(),
        }


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """One candidate as numbers, strings, lists and dicts."""
    return {
        "name": candidate.name,
        "layout": asdict(candidate.layout),
        "ranks": candidate.layout.ranks,
        "toml": run_file_tables(candidate),
        "micro_batch": candidate.micro_batch,
        "accumulation": candidate.accumulation,
        "compute": candidate.compute,
        "compiled": candidate.compiled,
        "recompute": candidate.recompute,
        "recompute_every": candidate.recompute_every,
        "offload": candidate.offload,
        "memory": dict(candidate.memory),
        "bytes": candidate.bytes,
        "fullest": candidate.fullest,
        "capacity": candidate.capacity,
        "fits": candidate.fits,
        "low": candidate.low,
        "high": candidate.high,
        "split": {part: candidate.split.get(part, 0.0) for part in PARTS},
        "pieces": dict(candidate.pieces),
        "goodput": candidate.goodput,
        "save_every": candidate.save_every,
        "ranges": {name: list(ends) for name, ends in candidate.ranges.items()},
        "seconds": candidate.seconds,
        "days": candidate.days,
        "expected_days": candidate.expected_days,
        "gpu_hours": candidate.gpu_hours,
        "price": candidate.price,
        "energy": candidate.energy,
        "tokens_per_second": candidate.tokens_per_second,
        "mfu": candidate.mfu,
    }


def part_changes(best: Candidate, other: Candidate) -> tuple[PartChange, ...]:
    """Where another candidate loses or gains time against the best, the largest difference first."""
    changes = [PartChange(part, other.split.get(part, 0.0) - best.split.get(part, 0.0)) for part in PARTS]
    noticeable = [change for change in changes if abs(change.seconds) >= _NOTICEABLE * best.seconds]
    return tuple(sorted(noticeable, key=lambda change: -abs(change.seconds)))


def run_file_tables(candidate: Candidate) -> str:
    """The tables to paste into the run file to get this candidate, whatever a later plan would choose."""
    lines = ["[layout]", *(f"{key} = {toml(value)}" for key, value in _layout_keys(candidate.layout).items())]
    lines += ["", "[train]", f"micro_batch = {candidate.micro_batch}"]
    lines += ["", "[precision]", f"compute = {toml(candidate.compute)}"]
    lines += ["", "[memory]", f"recompute = {toml(candidate.recompute)}"]
    lines += [f"recompute_every = {candidate.recompute_every}"] if candidate.recompute_every > 1 else []
    lines.append(f"offload = {toml(candidate.offload)}")
    lines += ["compile = true"] if candidate.compiled else []
    return "\n".join(lines)


def keys_to_change(best: Candidate, other: Candidate) -> str:
    """The keys to set on the command line to get another candidate where the run file has the best one's tables.

    Empty where a key would have to be removed, which no value on the command line does.
    """
    default = asdict(Layout())
    old, new = default | _layout_keys(best.layout), default | _layout_keys(other.layout)
    keys = {key: value for key, value in new.items() if value != old[key]}
    if "stages" in keys and keys["stages"] is None:
        if other.layout.pipeline == 1:
            return ""
        keys["stages"] = other.layout.stages_per_rank
    changes = {f"layout.{key}": value for key, value in keys.items()}
    for key in ("train.micro_batch", "memory.recompute", "memory.recompute_every", "memory.offload"):
        name = key.partition(".")[2]
        if getattr(other, name) != getattr(best, name):
            changes[key] = getattr(other, name)
    changes |= {"precision.compute": other.compute} if other.compute != best.compute else {}
    changes |= {"memory.compile": other.compiled} if other.compiled != best.compiled else {}
    return " ".join(f"{key}={value if isinstance(value, str) else toml(value)}" for key, value in changes.items())


def _layout_keys(layout: Layout) -> dict[str, Any]:
    """The keys of a layout that a run file has to give. `data` is always given: left out, it would be chosen anew."""
    default = asdict(Layout())
    degrees = {"zero": layout.shard, "context_method": layout.context, "schedule": layout.pipeline, "stages": layout.pipeline}
    unused = {key for key, degree in degrees.items() if degree == 1}
    return {
        key: value
        for key, value in asdict(layout).items()
        if value is not None and key not in unused and (value != default[key] or key == "data")
    }
