"""Why not another layout: the best candidate's neighbors in every dimension, the layouts that people expect, and other
number formats, each with the reason that its numbers give. `planning/planner` adds them to the search's result."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any, Literal, cast

import numpy as np

from phalanx.planning.cost.job_table import OFFLOAD, RECOMPUTE, SCHEDULES
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.rates import Rates
from phalanx.planning.report import PART_LABELS
from phalanx.planning.search.bounds import bytes_of, seconds_of
from phalanx.planning.search.candidate import Alternative, Candidate, candidates_of
from phalanx.planning.search.search import SAFE, judge
from phalanx.planning.search.space import Space, columns_of, compute_of, largest_divisor, layout_columns, pick
from phalanx.recovery.relayout import with_valid_settings
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.errors import RunError, toml
from phalanx.spec.layout import Layout, Schedule
from phalanx.spec.run import Run

_COMMUNICATION = ("tensor", "context", "expert", "data", "pipeline")
_SHORT = {"tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP", "expert_tensor": "ETP"}
_MODES = {"none": "no recomputation", "selective": "selective recomputation", "full": "full recomputation"}
_SAVINGS = ("recompute", "recompute_every", "offload")
_EQUAL = 0.01


@dataclass(frozen=True, slots=True)
class _Variant:
    """A layout to compare with the best."""

    name: str = field(compare=False)
    layout: Layout
    micro_batch: int
    savings: tuple[str | None, int | None, str | None] = (None, None, None)
    """recompute, recompute_every and offload; None: the fastest that fits."""

    def allows(self, mode: int, every: int, place: int) -> bool:
        """Whether the variant allows these savings, of which two are codes."""
        return all(
            want in (None, has) for want, has in zip(self.savings, (RECOMPUTE[mode], every, OFFLOAD[place]), strict=True)
        )


def neighbours(
    space: Space, rates: Rates, best: Candidate, as_process: Callable[[Candidate], Candidate] = lambda candidate: candidate
) -> tuple[Alternative, ...]:
    """Neighbors of the best candidate, each once: faster ones that the search was not free to take, slower ones, those that
    do not fit, those that are not legal. `as_process`: adds to a candidate's memory what a CPU process holds in addition,
    as in the best."""
    variants = [_by_engine(space, variant) for variant in _variants(space, best)]
    problems = {variant: _problem(space, variant) for variant in variants}
    legal = [variant for variant, problem in problems.items() if problem is None]
    # The same limit as in the search, which does not fill the whole device.
    limit = max(min(best.capacity, SAFE * space.hardware.gpu.memory), best.bytes)
    quicker: list[Alternative] = []
    slower: list[Alternative] = []
    large: list[Alternative] = []
    for variant, (judged, tight) in zip(legal, _judge(space, rates, legal, best, limit), strict=True):
        candidate = as_process(judged)
        fits = candidate.bytes <= limit
        reason = _reason(space, variant, candidate, best, tight) if fits else _too_large(candidate, limit)
        kind = large if not fits else quicker if candidate.seconds < (1 - _EQUAL) * best.seconds else slower
        kind.append(Alternative(candidate=candidate, name=variant.name, reason=reason))
    illegal = [
        Alternative(candidate=None, name=variant.name, reason=f"not legal: {problem}")
        for variant, problem in problems.items()
        if problem is not None
    ]
    return (*quicker, *slower, *large, *illegal)


def _variants(space: Space, best: Candidate) -> list[_Variant]:
    """Twice and half of each degree, other ZeRO stages, schedules and savings, and the plain layouts."""
    layout, micro = best.layout, best.micro_batch
    variants: list[_Variant] = []
    sparse = space.run.model.moe is not None
    for key in ("tensor", "pipeline", "context", *(("expert", "expert_tensor") if sparse else ())):
        degree = getattr(layout, key)
        for other in (2 * degree, degree // 2):
            if other >= 1 and (degree > 1 or key in ("tensor", "pipeline", "expert") or other > 1):
                variants += _resized(space, layout, key, other, micro)
    variants += _shardings(layout, micro)
    if layout.pipeline > 1:
        others = [cast(Schedule, schedule) for schedule in SCHEDULES if schedule != layout.schedule]
        variants += [_Variant(schedule, replace(layout, schedule=schedule, stages=None), micro) for schedule in others]
    offered = {(RECOMPUTE[mode], every, OFFLOAD[place]) for mode, every, place in _savings(space)}
    for mode, every in sorted({(mode, every) for mode, every, _ in offered if every in (1, 2)}):
        if (mode, every) != (best.recompute, best.recompute_every) and (mode, every, best.offload) in offered:
            name = _MODES[mode] + ("" if every == 1 else f" 1/{every}")
            variants.append(_Variant(name, layout, micro, (mode, every, best.offload)))
    if best.offload != "none" and any(place == "none" for *_, place in offered):
        variants.append(_Variant("nothing offloaded", layout, micro, (None, None, "none")))
    share = space.run.batch // layout.replicas
    for other in (2 * micro, micro // 2):
        if other >= 1 and share % other == 0:
            variants.append(_Variant(f"micro-batch {other}", layout, other))
    if layout.tensor > 1:
        toggled = replace(layout, sequence=not layout.sequence)
        variants.append(_Variant("no sequence parallelism" if layout.sequence else "sequence parallelism", toggled, micro))
    variants += _expected(space, layout, micro)
    if not space.run.model.is_builtin:  # how other degrees cut a custom module is known once they are tried
        same = ("tensor", "sequence", "pipeline", "context", "expert", "expert_tensor")
        variants = [
            variant for variant in variants if all(getattr(variant.layout, key) == getattr(layout, key) for key in same)
        ]
    return list(dict.fromkeys(variants))[:24]


def _resized(space: Space, layout: Layout, key: str, degree: int, micro: int) -> list[_Variant]:
    """The layout with another degree, compensated by the replicas."""
    name = f"{_SHORT[key]}{degree}" if degree > 1 else f"no {_SHORT[key]}"
    if key in ("expert", "expert_tensor"):
        return [_Variant(name, replace(layout, **{key: degree}), micro)]  # type: ignore[arg-type]
    old = getattr(layout, key)
    replicas = layout.replicas * old
    if replicas % degree:
        return []
    replicas //= degree
    shard = largest_divisor(replicas, layout.shard) if layout.shard < layout.replicas else replicas
    degrees: dict[str, Any] = {key: degree, "shard": shard, "data": replicas // shard}
    changed = with_valid_settings(layout, replace(layout, **degrees))
    if key == "context" and degree == 1:
        changed = replace(changed, context_method=space.run.layout.context_method)
    share = space.run.batch // replicas if space.run.batch % replicas == 0 else micro
    return [_Variant(name, changed, micro if share % micro == 0 else 1)]


def _shardings(layout: Layout, micro: int) -> list[_Variant]:
    if layout.replicas == 1:
        return []
    sharded = layout if layout.shard > 1 else replace(layout, data=1, shard=layout.replicas)
    stages = [stage for stage in (1, 2, 3) if stage != layout.zero] if layout.shard > 1 else [1, 3]
    variants = [_Variant(f"ZeRO-{stage}", replace(sharded, zero=stage), micro) for stage in stages]
    if layout.shard > 1:
        variants.append(_Variant("every replica whole", replace(layout, data=layout.replicas, shard=1, zero=3), micro))
    return variants


def _expected(space: Space, layout: Layout, micro: int) -> list[_Variant]:
    """What people try first: FSDP alone, and tensor groups that fill a node."""
    plain = Layout(data=1, shard=space.gpus, stage_split=layout.stage_split)
    variants = [_Variant("FSDP alone", plain, 1)] if space.gpus > 1 else []
    node = space.hardware.node
    if node > 1 and layout.tensor != node and layout.pipeline > 1:
        variants += _resized(space, layout, "tensor", node, micro)
    return variants


def _by_engine(space: Space, variant: _Variant) -> _Variant:
    """The variant with the way to exchange keys that its engine has."""
    layout = variant.layout
    if not space.on_xla or layout.context == 1 or space.takes(context=layout.context, context_method=layout.context_method):
        return variant
    return replace(variant, layout=replace(layout, context_method="gather"))


def _problem(space: Space, variant: _Variant) -> str | None:
    """Why a layout is not legal, in a few words."""
    run, layout = space.run, variant.layout
    findings = list(layout_findings(replace(run, layout=layout)))
    if findings:
        return findings[0].sentence.partition(": ")[0].removesuffix(".")
    if space.on_xla and not space.takes(**asdict(layout)):
        return 'the engine "xla" does not compute it'
    if layout.ranks != space.gpus:
        return f"{layout.ranks} ranks are not the {space.gpus} devices"
    if run.batch % layout.replicas:
        return f"the batch of {run.batch} sequences is not divisible by {layout.replicas} replicas"
    return None


def _judge(space: Space, rates: Rates, variants: list[_Variant], best: Candidate, limit: float) -> list[tuple[Candidate, bool]]:
    """The fastest of each variant that fits, or the variant with the best candidate's savings; and whether it would not fit
    with those."""
    used = (RECOMPUTE.index(best.recompute), best.recompute_every, OFFLOAD.index(best.offload))
    savings = list({*_savings(space), used})
    shape, at = (len(variants), len(savings)), savings.index(used)
    rows = [variant for variant in variants for _ in savings]
    columns = layout_columns([row.layout for row in rows], micro_batch=[row.micro_batch for row in rows])
    columns |= columns_of(_SAVINGS, savings * len(variants))
    total, seconds = bytes_of(space, columns).reshape(shape), seconds_of(space, rates, columns).reshape(shape)
    asked = np.array([[variant.allows(*saving) for saving in savings] for variant in variants], dtype=bool).reshape(shape)
    fitting = asked & (total <= limit)
    fastest = np.where(fitting, seconds, np.inf).argmin(axis=1)
    chosen = np.where(fitting.any(axis=1), fastest, np.where(asked[:, at], at, asked.argmax(axis=1)))
    made = candidates_of(space, rates, pick(columns, np.arange(len(variants)) * len(savings) + chosen), best.capacity)
    return list(zip(made, (total[:, at] > limit).tolist(), strict=True))


def _savings(space: Space) -> list[tuple[int, int, int]]:
    return list(zip(*(space.savings[name].tolist() for name in _SAVINGS), strict=True))


def _too_large(candidate: Candidate, limit: float) -> str:
    needs = f"needs {_sizes(candidate.bytes, 'of', candidate.capacity)}"
    return f"{needs}, of which plans fill at most {_size(limit)}" if candidate.fits else needs


def _reason(space: Space, variant: _Variant, candidate: Candidate, best: Candidate, tight: bool) -> str:
    """The reason in numbers. `tight`: with the best candidate's savings it would not fit."""
    slower = candidate.seconds / best.seconds - 1
    if abs(slower) <= _EQUAL:
        return f"as quick ({slower:+.1%}){_memory(candidate, best)}"
    phrases = ["quicker"] if slower < 0 else []
    if candidate.layout.tensor > space.hardware.island and best.layout.tensor <= space.hardware.island:
        phrases.append("leaves the island of fast links")
    if (saved := _extra_savings(candidate, best)) and variant.savings[0] is None:
        phrases.append(f"{'fits ' if tight else ''}with {saved}")
    phrases.append(_largest_saving(candidate, best) if slower < 0 else _largest_growth(candidate, best))
    return f"{', '.join(phrases)}; step {slower:+.0%}{_fixed_keys(space, candidate) if slower < 0 else ''}"


def _fixed_keys(space: Space, candidate: Candidate) -> str:
    """The keys of the run file that kept the search from this candidate, as the end of a sentence."""
    usual, given, other = asdict(Layout()), asdict(space.run.layout), asdict(candidate.layout)
    keys = [f"layout.{key} = {toml(value)}" for key, value in given.items() if value not in (usual[key], other[key])]
    if (micro := space.run.train.micro_batch) not in (None, candidate.micro_batch):
        keys.append(f"train.micro_batch = {micro}")
    return f", but the run file has {', '.join(keys)}" if keys else ""


def _memory(candidate: Candidate, best: Candidate) -> str:
    """How its memory compares, as the end of a sentence."""
    more, both = candidate.bytes - best.bytes, _sizes(candidate.bytes, "instead of", best.bytes)
    if abs(more) < 0.01 * best.bytes:
        return " and about as large"
    return f", but takes {both}" if more > 0 else f" and takes {both}"


def _sizes(size: float, word: str, reference: float) -> str:
    """ "69.6 GiB instead of 73.3": the unit appears once where both have the same."""
    first, second = _size(size), _size(reference)
    number, _, unit = second.partition(" ")
    return f"{first} {word} {number if first.endswith(unit) else second}"


def _size(value: float) -> str:
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _extra_savings(candidate: Candidate, best: Candidate) -> str:
    savings = []
    if candidate.recompute != "none" and (candidate.recompute, candidate.recompute_every) != (
        best.recompute,
        best.recompute_every,
    ):
        part = "" if candidate.recompute_every == 1 else f" of 1/{candidate.recompute_every} of the blocks"
        savings.append(_MODES[candidate.recompute] + part)
    if candidate.offload not in ("none", best.offload):
        savings.append("optimizer states off the device")
    return " and ".join(savings)


def _largest_saving(candidate: Candidate, best: Candidate) -> str:
    less = {part: best.split[part] - candidate.split[part] for part in candidate.split}
    part = max(less, key=lambda name: less[name])
    return f"-{less[part] / best.seconds:.0%} for {PART_LABELS[part]}"


def _largest_growth(candidate: Candidate, best: Candidate) -> str:
    more = {part: candidate.split[part] - best.split[part] for part in candidate.split}
    sent = sum(candidate.split[part] for part in _COMMUNICATION), sum(best.split[part] for part in _COMMUNICATION)
    part = max(more, key=lambda name: more[name])
    if part == "bubble":
        return f"bubble {candidate.split[part] / candidate.seconds:.0%} instead of {best.split[part] / best.seconds:.0%}"
    if part in _COMMUNICATION and sent[0] > sent[1] > 0.01 * best.seconds and sent[0] < 3 * sent[1]:
        return f"+{sent[0] / sent[1] - 1:.0%} exposed communication ({PART_LABELS[part]})"
    if part in _COMMUNICATION and sent[0] > sent[1]:
        shares = sent[0] / candidate.seconds, sent[1] / best.seconds
        return f"exposed communication {shares[0]:.0%} of the step instead of {shares[1]:.0%} ({PART_LABELS[part]})"
    return f"+{more[part] / best.seconds:.0%} for {PART_LABELS[part]}"


_FORMATS: tuple[Literal["bf16", "fp8"], ...] = ("bf16", "fp8")


def other_formats(run: Run, hardware: Hardware, best: Candidate) -> tuple[Alternative, ...]:
    """On GPUs, for runs in bf16 or fp8: the same layout and micro-batch in other number formats and with compiled blocks,
    fastest first. A search keeps the run file's own, or the defaults, as both change the arithmetic."""
    if best.engine == "xla":
        return ()
    mine = compute_of(run, hardware), best.compiled
    if hardware.device != "cuda" or mine[0] not in _FORMATS or not run.model.is_builtin:
        return ()
    judged: list[Candidate] = []
    for compute, compiled in product(_FORMATS, (False, True)):
        if (compute, compiled) == mine or hardware.gpu.peak(compute) is None:
            continue
        other = replace(
            run,
            layout=best.layout,
            train=replace(run.train, micro_batch=best.micro_batch),
            precision=replace(run.precision, compute=compute),
            memory=replace(run.memory, compile=compiled),
        )
        if any(True for _ in layout_findings(other)):
            continue
        with suppress(RunError):
            judged.append(judge(other, hardware, best.capacity))
    return tuple(
        Alternative(
            candidate=candidate,
            name=f"{candidate.compute}, {'compiled blocks' if candidate.compiled else 'blocks not compiled'}",
            reason=_format_reason(candidate, best),
        )
        for candidate in sorted(judged, key=lambda candidate: candidate.seconds)
    )


def _format_reason(candidate: Candidate, best: Candidate) -> str:
    longer = candidate.seconds / best.seconds - 1
    saved = "" if candidate.recompute == best.recompute else f", with {candidate.recompute} recomputation"
    if not candidate.fits:
        return f"needs {candidate.bytes / 2**30:.1f} GiB of {candidate.capacity / 2**30:.1f}"
    if abs(longer) <= _EQUAL:
        return f"as quick ({longer:+.1%}){saved}"
    phrase = "quicker" if longer < 0 else "slower"
    if longer < 0 and candidate.compute != best.compute:
        phrase += ", but in coarser numbers" if candidate.compute == "fp8" else ", and in finer numbers"
    elif longer < 0:
        phrase += ", but not the default with tensor parallelism" if candidate.compiled and best.layout.tensor > 1 else ""
    elif candidate.compute == "fp8" and not candidate.compiled:
        phrase += ", because rounding to fp8 takes separate passes"
    return f"{phrase}; step {longer:+.0%}{saved}"
