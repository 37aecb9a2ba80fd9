"""Why not another layout: the winner's neighbours in every dimension and the layouts that people expect, each with the reason that
its numbers give. `planning/search` adds them to what it found."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from phalanx.planning.candidates import Space
from phalanx.planning.footprint import footprint
from phalanx.planning.option import Option, WhyNot
from phalanx.planning.options import options
from phalanx.planning.rates import Rates
from phalanx.planning.table import Columns
from phalanx.planning.time import step_times
from phalanx.planning.work import METHODS, OFFLOAD, RECOMPUTE, SCHEDULES
from phalanx.spec.check_layout import layout_findings
from phalanx.spec.layout import Layout, Schedule

_COMMUNICATION = ("tensor", "context", "expert", "data", "pipeline")
_WORDS = {
    "tensor": "tensor exchange", "context": "context exchange", "expert": "expert exchange", "data": "gradients and shards",
    "pipeline": "messages between stages", "launch": "kernel launches", "optimizer": "the optimizer", "offload": "offloading",
    "compute": "computing", "bubble": "the pipeline's bubble", "other": "waiting",
}  # fmt: skip
_SHORT = {"tensor": "TP", "pipeline": "PP", "context": "CP", "expert": "EP", "expert_tensor": "ETP"}
_MODES = {"none": "no recomputation", "selective": "selective recomputation", "full": "full recomputation"}
_EQUAL = 0.01


@dataclass(frozen=True, slots=True)
class _Variant:
    """A layout to compare the winner with."""

    name: str
    layout: Layout
    micro_batch: int
    recompute: str | None = None
    """None: whichever is the quickest that fits."""
    offload: str | None = None


def why_not(space: Space, rates: Rates, best: Option) -> tuple[WhyNot, ...]:
    """Neighbours of the winner that are not better, each once."""
    found: list[WhyNot] = []
    legal: list[_Variant] = []
    for variant in _variants(space, best):
        if (problem := _problem(space, variant)) is not None:
            found.append(WhyNot(option=None, name=variant.name, reason=f"not legal: {problem}"))
        else:
            legal.append(variant)
    judged = _judge(space, rates, legal, best)
    for variant, option in zip(legal, judged, strict=True):
        reason = _reason(space, variant, option, best)
        if reason is not None:
            found.append(WhyNot(option=option, name=variant.name, reason=reason))
    return tuple(sorted(found, key=lambda one: 2 if one.option is None else 0 if one.option.fits else 1))


def _variants(space: Space, best: Option) -> list[_Variant]:
    """Twice and half of each degree, other stages of ZeRO, other schedules, other savings, and the plain layouts."""
    layout, micro = best.layout, best.micro_batch
    found: list[_Variant] = []
    sparse = space.run.model.moe is not None
    for key in ("tensor", "pipeline", "context", *(("expert", "expert_tensor") if sparse else ())):
        degree = getattr(layout, key)
        for other in (2 * degree, degree // 2):
            if other >= 1 and (degree > 1 or key in ("tensor", "pipeline", "expert") or other > 1):
                found += _resized(space, layout, key, other, micro)
    found += _spreads(layout, micro)
    if layout.pipeline > 1:
        for schedule in SCHEDULES:
            if schedule != layout.schedule:
                found.append(_Variant(schedule, replace(layout, schedule=cast(Schedule, schedule), stages=None), micro))
    offered = {(RECOMPUTE[mode], OFFLOAD[place]) for mode, place in zip(*space.savings.values(), strict=True)}
    for mode in RECOMPUTE:
        if mode != best.recompute and (mode, best.offload) in offered:
            found.append(_Variant(_MODES[mode], layout, micro, recompute=mode, offload=best.offload))
    if best.offload != "none" and any(place == "none" for _, place in offered):
        found.append(_Variant("nothing offloaded", layout, micro, offload="none"))
    share = space.run.batch // layout.replicas
    for other in (2 * micro, micro // 2):
        if other >= 1 and share % other == 0:
            found.append(_Variant(f"micro-batch {other}", layout, other))
    if layout.tensor > 1:
        toggled = replace(layout, sequence=not layout.sequence)
        found.append(_Variant("no sequence parallelism" if layout.sequence else "sequence parallelism", toggled, micro))
    found += _expected(space, layout, micro)
    unique = {(one.layout, one.micro_batch, one.recompute, one.offload): one for one in reversed(found)}
    return [one for one in found if unique.get((one.layout, one.micro_batch, one.recompute, one.offload)) is one][:24]


def _resized(space: Space, layout: Layout, key: str, degree: int, micro: int) -> list[_Variant]:
    """Another degree; the replicas make up for it."""
    name = f"{_SHORT[key]}{degree}" if degree > 1 else f"no {_SHORT[key]}"
    if key in ("expert", "expert_tensor"):
        return [_Variant(name, replace(layout, **{key: degree}), micro)]  # type: ignore[arg-type]
    old = getattr(layout, key)
    replicas = layout.replicas * old
    if replicas % degree:
        return []
    replicas //= degree
    shard = min(layout.shard, replicas) if layout.shard < layout.replicas else replicas
    while replicas % shard:
        shard -= 1
    changed: dict[str, Any] = {key: degree, "shard": shard, "data": replicas // shard}
    if shard == 1:
        changed["zero"] = 3
    if key == "pipeline" and degree == 1:
        changed |= {"schedule": "1f1b", "stages": None}
    if key == "tensor" and degree == 1:
        changed["sequence"] = False
    if key == "context" and degree == 1:
        changed["context_method"] = space.run.layout.context_method
    share = space.run.batch // replicas if space.run.batch % replicas == 0 else micro
    return [_Variant(name, replace(layout, **changed), micro if share % micro == 0 else 1)]


def _spreads(layout: Layout, micro: int) -> list[_Variant]:
    found = []
    if layout.shard > 1:
        found = [_Variant(f"ZeRO-{stage}", replace(layout, zero=stage), micro) for stage in (1, 2, 3) if stage != layout.zero]
        whole = replace(layout, data=layout.replicas, shard=1, zero=3)
        found.append(_Variant("every replica whole", whole, micro))
    elif layout.replicas > 1:
        found = [
            _Variant(f"ZeRO-{stage}", replace(layout, data=1, shard=layout.replicas, zero=stage), micro) for stage in (1, 3)
        ]
    return found


def _expected(space: Space, layout: Layout, micro: int) -> list[_Variant]:
    """What people try first: everything sharded and nothing else, and tensor groups that fill a node."""
    plain = Layout(data=1, shard=space.gpus, cut=layout.cut)
    found = [_Variant("FSDP alone", plain, 1)] if space.gpus > 1 else []
    node = space.hardware.node
    if node > 1 and layout.tensor != node and layout.pipeline > 1:
        found += _resized(space, layout, "tensor", node, micro)
    return found


def _problem(space: Space, variant: _Variant) -> str | None:
    """Why a layout cannot be, in a few words."""
    run, layout = space.run, variant.layout
    findings = list(layout_findings(replace(run, layout=layout)))
    if findings:
        return findings[0].sentence.partition(": ")[0].removesuffix(".")
    if layout.ranks != space.gpus:
        return f"{layout.ranks} ranks are not the {space.gpus} devices"
    if run.batch % layout.replicas:
        return f"the batch of {run.batch} sequences is not divisible by {layout.replicas} replicas"
    return None


def _judge(space: Space, rates: Rates, variants: list[_Variant], best: Option) -> list[Option]:
    """The quickest of each that fits, or what it would take with the winner's savings."""
    if not variants:
        return []
    savings = list(zip(space.savings["recompute"].tolist(), space.savings["offload"].tolist(), strict=True))
    wanted = (RECOMPUTE.index(best.recompute), OFFLOAD.index(best.offload))
    rows = []
    for place, variant in enumerate(variants):
        for mode, offload in {*savings, wanted}:
            asked = variant.recompute in (None, RECOMPUTE[mode]) and variant.offload in (None, OFFLOAD[offload])
            if asked or (mode, offload) == wanted:
                rows.append((place, asked, mode, offload))
    columns = _columns([variants[place] for place, *_ in rows], rows)
    work = space.work(columns)
    total = np.broadcast_to(footprint(work).total, len(rows))
    seconds = np.broadcast_to(step_times(work, rates).step, len(rows))
    chosen = []
    for place, variant in enumerate(variants):
        mine = [i for i, row in enumerate(rows) if row[0] == place and row[1]]
        fitting = [i for i in mine if total[i] <= best.capacity]
        fallback = [i for i in mine if rows[i][2:] == wanted] or mine
        chosen.append(min(fitting, key=lambda i: seconds[i]) if fitting else fallback[0])
        assert variant.layout.ranks == space.gpus
    return options(space, rates, {name: column[chosen] for name, column in columns.items()}, best.capacity)


def _columns(variants: list[_Variant], rows: list[tuple[int, bool, int, int]]) -> Columns:
    def column(values: list[int]) -> Any:
        return np.array(values, dtype=np.int64)

    layouts = [one.layout for one in variants]
    degrees = ("pipeline", "data", "shard", "context", "tensor", "zero", "expert", "expert_tensor")
    found = {name: column([getattr(layout, name) for layout in layouts]) for name in degrees}
    return found | {
        "sequence_parallel": column([int(layout.sequence) for layout in layouts]),
        "method": column([METHODS.index(layout.context_method) for layout in layouts]),
        "schedule": column([SCHEDULES.index(layout.schedule) for layout in layouts]),
        "stages": column([layout.stages_per_rank if layout.pipeline > 1 else 1 for layout in layouts]),
        "micro_batch": column([one.micro_batch for one in variants]),
        "recompute": column([row[2] for row in rows]),
        "offload": column([row[3] for row in rows]),
    }


def _reason(space: Space, variant: _Variant, option: Option, best: Option) -> str | None:
    """In numbers; None where it is the winner itself, or as good."""
    if not option.fits:
        return f"needs {option.bytes / 2**30:.0f} GiB of {option.capacity / 2**30:.0f}"
    slower = option.seconds / best.seconds - 1
    if slower <= _EQUAL:
        return f"as quick within {max(abs(slower), 0.001):.1%}, but no simpler" if abs(slower) <= _EQUAL else None
    said = []
    if option.layout.tensor > space.hardware.island and best.layout.tensor <= space.hardware.island:
        said.append("leaves the island of fast links")
    if option.recompute != best.recompute and variant.recompute is None and option.recompute != "none":
        said.append(f"fits only with {_MODES[option.recompute]}")
    if option.offload != best.offload and option.offload != "none":
        said.append("fits only with optimizer states off the device")
    said.append(_grown(option, best))
    return f"{', '.join(said)}; step +{slower:.0%}"


def _grown(option: Option, best: Option) -> str:
    """What of the step has grown most."""
    more = {part: option.split[part] - best.split[part] for part in option.split}
    sent = sum(option.split[part] for part in _COMMUNICATION), sum(best.split[part] for part in _COMMUNICATION)
    part = max(more, key=lambda name: more[name])
    if part == "bubble":
        return f"bubble {option.split[part] / option.seconds:.0%} instead of {best.split[part] / best.seconds:.0%}"
    if part in _COMMUNICATION and sent[1] > 0.01 * best.seconds and sent[0] < 3 * sent[1]:
        return f"+{sent[0] / sent[1] - 1:.0%} exposed communication ({_WORDS[part]})"
    if part in _COMMUNICATION:
        shares = sent[0] / option.seconds, sent[1] / best.seconds
        return f"exposed communication {shares[0]:.0%} of the step instead of {shares[1]:.0%} ({_WORDS[part]})"
    return f"+{more[part] / best.seconds:.0%} for {_WORDS[part]}"
