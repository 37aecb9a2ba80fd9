"""The planner's answer: a search's result with the run, the cluster, and sentences on why the best candidate is the best. What
a person reads of a candidate is computed here, so that the dashboard's text, picture and page, and `--json`, say the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from phalanx.planning.cost.step_time import PARTS
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.placement import Placement, listed, placement
from phalanx.planning.search.bounds import NEAR
from phalanx.planning.search.candidate import Alternative, Candidate, SearchResult
from phalanx.spec.adapted_layers import trained_parameters
from phalanx.spec.errors import toml
from phalanx.spec.json_value import JsonObject
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run

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
_EQUAL = 0.03
"""Steps that differ by less count as equal: no published comparison of measured layouts resolves less."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport(SearchResult):
    """The best layout of a run on a cluster, the layouts it was compared with, and the reasons."""

    run: Run
    hardware: Hardware
    aim: Literal["time", "price"]
    why: tuple[str, ...]
    """Sentences: why the best is the best."""
    placement: Placement
    scaling: tuple[Candidate, ...] = ()
    """The fastest layout on fewer and on more devices; empty if it was not requested."""

    @property
    def model_name(self) -> str:
        model = self.run.model
        return model.preset or model.module or model.from_ or (model.custom_key if model.config else None) or "a model"

    @property
    def tokens(self) -> int:
        """Tokens of the whole run."""
        return self.run.steps * self.run.batch_tokens

    def to_json(self) -> dict[str, Any]:
        """The object that `phalanx plan --json` prints: numbers, strings, lists and dicts alone."""
        run, hardware = self.run, self.hardware
        return {
            "model": {
                "name": self.model_name,
                "parameters": run.model.parameters(),
                "active": run.model.active_parameters(),
                "trained": trained_parameters(run.model, run.lora),
            },
            "cluster": {
                "name": hardware.name,
                "device": hardware.device,
                "gpu": hardware.gpu.name,
                "gpus": hardware.gpus,
                "nodes": hardware.nodes,
                "memory": hardware.gpu.memory,
                "nics": hardware.nics,
                "network": hardware.network,
                "island_bandwidth": hardware.island_bandwidth,
                "price": hardware.price,
                "failures": None if hardware.failures is None else hardware.failures.rate,
                "sources": list(hardware.sources),
            },
            "train": {
                "batch": run.batch,
                "sequence_length": run.train.sequence_length,
                "steps": run.steps,
                "tokens": self.tokens,
            },
            "aim": self.aim,
            "best": candidate_json(self.best),
            "others": [self._compared(other) for other in self.runners_up],
            "why": list(self.why),
            "why_not": [
                {
                    "name": other.name,
                    "reason": other.reason,
                    "candidate": None if other.candidate is None else self._compared(other.candidate),
                }
                for other in self.alternatives
            ],
            "curve": [candidate_json(candidate) for candidate in self.curve],
            "considered": self.considered,
            "fitting": self.fitting,
            "timed": self.timed,
            "seconds": self.seconds,
            "assumed": list(self.assumptions),
            "placement": asdict(self.placement) | {"lines": self.placement.lines},
            "words": PART_LABELS | {name: MEMORY_LABELS[name] for name in ("gathered", "buffers", "fixed")},
        } | ({"scaling": [candidate_json(candidate) for candidate in self.scaling]} if self.scaling else {})

    def _compared(self, other: Candidate) -> dict[str, Any]:
        changes = [
            {"part": part, "words": PART_LABELS[part], "seconds": seconds}
            for part, seconds in part_changes(self.best, other).items()
        ]
        return candidate_json(other) | {"part_changes": changes, "change": keys_to_change(self.best, other)}


def report_of(run: Run, hardware: Hardware, result: SearchResult, *, aim: Literal["time", "price"] = "time") -> PlanReport:
    """The report of a search for this run on these machines."""
    searched = {item.name: getattr(result, item.name) for item in fields(SearchResult)}
    searched["alternatives"] = _distinct(result)
    assumptions = (*_module_assumptions(run), *result.assumptions, *hardware.assumed)
    searched["assumptions"] = tuple(dict.fromkeys(assumptions))
    return PlanReport(
        **searched,
        run=run,
        hardware=hardware,
        aim=aim,
        why=(*why(result, aim), *_fixed_keys(run, result)),
        placement=placement(result.best.layout, hardware),
    )


def _distinct(result: SearchResult) -> tuple[Alternative, ...]:
    """Each layout once, with its first reason: a neighbor of the best can also be one of the expected layouts."""
    seen: set[str | None] = {run_file_tables(result.best)}
    distinct = []
    for alternative in result.alternatives:
        tables = None if alternative.candidate is None else run_file_tables(alternative.candidate)
        if tables not in seen:
            distinct.append(alternative)
            seen |= {tables} - {None}
    return tuple(distinct)


def _fixed_keys(run: Run, result: SearchResult) -> list[str]:
    """The keys that the search was not free to choose."""
    default = asdict(Layout())
    keys = [key for key, value in asdict(run.layout).items() if value != default[key]]
    if not keys or result.considered <= 1:
        return []
    return [f"The search kept the [layout] of the run file ({', '.join(keys)}): --free searches all layouts and compares."]


def _module_assumptions(run: Run) -> Iterator[str]:
    """What is known of a custom module, and what is not."""
    size = run.model.measured
    if run.model.is_builtin:
        return
    name = run.model.module or run.model.custom_key
    if size is None:
        yield f"The planner does not know what {name} computes: it assumes a decoder of the sizes in the run file."
        return
    counted = f"{name} was built without memory: {size.parameters:,} parameters"
    if size.activations is None:
        yield f"{counted}, about {size.flops_per_token:,.0f} FLOPs per token. Its step could not be traced ({size.untraced or 'no reason is known'})."
        yield "Its activations are estimated from the number of parameters."
        return
    rank = " on each tensor rank" if run.layout.tensor > 1 else ""
    flops = f"{size.traced_flops_per_token or 0:,.0f} FLOPs per token (for MFU {size.flops_per_token:,.0f}, 6 per weight)"
    yield f"{counted}, {flops}, {size.activations:,.0f} bytes of activations per token{rank}."
    yield (
        f"How fast the kernels of {name} are is not known: its FLOPs count like matrix products, and the bytes that it keeps like memory traffic."
    )
    yield "A custom module is not cut into stages, sequences or experts, and tensor parallelism is as layout.tensor and layout.sequence say."


def why(result: SearchResult, aim: Literal["time", "price"]) -> list[str]:
    """Why the best candidate is the best, in a few sentences."""
    best, others, considered = result.best, result.runners_up, f"{result.considered:,} legal layouts"
    first = f"It is the {'fastest' if aim == 'time' else 'cheapest'} that fits, of {considered}."
    if any(other.seconds < best.seconds for other in others):
        first = f"It is the simplest layout among the fastest that fit, of {considered}."
    if any(other.seconds < best.seconds / NEAR for other in others) and best.layout == Layout(data=best.layout.data):
        first = f"It is the layout that `phalanx train` uses here: replicas, because none of {considered} is clearly better."
    if result.considered <= 1:
        first = f"It is the layout of the run file, evaluated without a search{'' if best.fits else '; it does not fit'}."
    sentences = [
        first,
        f"Of a step, {_largest_parts(best)}; the fullest rank uses {best.bytes / best.capacity:.0%} of its memory.",
    ]
    if not others:
        return sentences
    near = [other.name for other in others if other.seconds <= (1 + _EQUAL) * best.seconds]
    if near:
        sentences.append(
            f"{listed(near[:3])} {'are' if len(near) > 1 else 'is'} within {_EQUAL:.0%} of it, which no prediction resolves: a few steps of each "
            "would tell."
        )
    else:
        behind = others[0].seconds / best.seconds - 1
        sentences.append(f"The next, {others[0].name}, takes {behind:.1%} longer{largest_loss(best, others[0])}.")
    return sentences


def _largest_parts(candidate: Candidate) -> str:
    """The share of computing in a step, and of the three largest other parts that show in whole percents."""
    share = {part: seconds / candidate.seconds for part, seconds in candidate.split.items()}
    others = sorted((part for part in share if part != "compute"), key=lambda part: -share[part])[:3]
    shown = [f"{share[part]:.0%} {PART_LABELS[part]}" for part in others if share[part] >= 0.005]
    return ", ".join([f"{share['compute']:.0%} is {PART_LABELS['compute']}", *shown])


def part_changes(best: Candidate, other: Candidate) -> dict[str, float]:
    """How many seconds longer (or, below zero, shorter) the parts of the step take in another candidate than in the best, the largest
    difference first."""
    changes = {part: other.split[part] - best.split[part] for part in PARTS}
    noticeable = {part: seconds for part, seconds in changes.items() if abs(seconds) >= _NOTICEABLE * best.seconds}
    return dict(sorted(noticeable.items(), key=lambda change: -abs(change[1])))


def largest_loss(best: Candidate, other: Candidate) -> str:
    """The part that another candidate loses most time to, as the end of a sentence."""
    part = next((part for part, seconds in part_changes(best, other).items() if seconds > 0), None)
    return f", most of it {PART_LABELS[part]}" if part else ""


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """One candidate as numbers, strings, lists and dicts."""
    derived = ("name", "bytes", "fits", "expected_days", "gpu_hours")
    return asdict(candidate) | {
        **{name: getattr(candidate, name) for name in derived},
        "ranks": candidate.layout.ranks,
        "toml": run_file_tables(candidate),
        "ranges": {name: list(ends) for name, ends in candidate.ranges.items()},
    }


def run_file_tables(candidate: Candidate) -> str:
    """The tables to paste into the run file to get this candidate, whatever a later plan would choose."""
    lines = ["[engine]", 'name = "xla"', ""] if candidate.engine == "xla" else []
    lines += ["[layout]", *(f"{key} = {toml(value)}" for key, value in layout_keys(candidate.layout).items())]
    lines += ["", "[train]", f"micro_batch = {candidate.micro_batch}"]
    lines += ["", "[precision]", f"compute = {toml(candidate.compute)}"]
    lines += ["", "[memory]", f"recompute = {toml(candidate.recompute)}"]
    lines += [f"recompute_every = {candidate.recompute_every}"] if candidate.recompute_every > 1 else []
    if candidate.engine == "xla":
        return "\n".join(lines)
    lines.append(f"offload = {toml(candidate.offload)}")
    lines += [f"compile = {toml(candidate.compiled)}"] if candidate.compiled or candidate.compute != "fp32" else []
    return "\n".join(lines)


def keys_to_change(best: Candidate, other: Candidate) -> str:
    """The keys to set on the command line to get another candidate where the run file has the best one's tables. Empty where a key
    would have to be removed, which no value on the command line does."""
    default = asdict(Layout())
    old, new = default | layout_keys(best.layout), default | layout_keys(other.layout)
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


def layout_keys(layout: Layout) -> JsonObject:
    """The keys of a layout that a run file has to set. `data` is always set, because the planner would choose its default."""
    default = asdict(Layout())
    degrees = {"zero": layout.shard, "context_method": layout.context, "schedule": layout.pipeline, "stages": layout.pipeline}
    unused = {key for key, degree in degrees.items() if degree == 1}
    return {
        key: value
        for key, value in asdict(layout).items()
        if value is not None and key not in unused and (value != default[key] or key == "data")
    }
