"""A search's result in plain values, for programs, pictures and pages, with what a person asks about it: why this one, how sure is
that, what do the next ones cost more. `planning/answers` calls it; the dashboard shows what it returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from phalanx.planning.candidate import Found, Option
from phalanx.planning.explore import NEAR
from phalanx.planning.hardware import Hardware
from phalanx.planning.placement import Placement, placement
from phalanx.planning.times import PARTS
from phalanx.spec.dump import toml
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run

WORDS = {
    "compute": "computing", "launch": "kernel launches", "tensor": "tensor exchange", "context": "context exchange",
    "expert": "expert exchange", "data": "gradients and shards", "pipeline": "between stages", "bubble": "pipeline bubble",
    "optimizer": "optimizer", "offload": "offload", "other": "everything else",
}  # fmt: skip
"""What the parts of a step are called."""
_HELD = {"gathered": "gathered layers", "buffers": "message buffers", "fixed": "runtime and fragments"}
"""What components of memory are called whose names say too little."""

_ORDERS = {
    "1f1b": "", "interleaved-1f1b": "", "looped-bfs": "-bfs", "interleaved-zero-bubble": "-zb",
}  # fmt: skip
"""Schedules in short; the others by their names."""

_EQUAL = 0.03
"""Steps closer than this are called equal: no published comparison of measured layouts resolves less."""


def told(run: Run, hardware: Hardware, found: Found, *, aim: str = "time") -> dict[str, Any]:
    """Everything there is to say, in numbers, words, lists and dicts alone."""
    places = placement(found.best.layout, hardware)
    return {
        "model": {
            "name": run.model.preset or run.model.module or run.model.from_ or "a model",
            "parameters": run.model.parameters(),
            "active": run.model.active_parameters(),
        },
        "cluster": {
            "name": hardware.name,
            "device": hardware.device,
            "gpu": hardware.gpu.name or hardware.gpu.key,
            "gpus": hardware.gpus,
            "nodes": hardware.nodes,
            "memory": hardware.gpu.memory,
            "price": hardware.price,
            "failures": None if hardware.failures is None else hardware.failures.rate,
            "sources": list(hardware.sources),
        },
        "train": {
            "batch": run.batch,
            "sequence_length": run.train.sequence_length,
            "steps": run.steps,
            "tokens": run.steps * run.batch_tokens,
        },
        "aim": aim,
        "best": told_option(found.best),
        "others": [told_option(other) | _against(found.best, other) for other in found.others],
        "why": [*why(found, aim), *_kept(run, found)],
        "why_not": _why_not(found),
        "curve": [told_option(option) for option in found.curve],
        "considered": found.considered,
        "fitting": found.fitting,
        "timed": found.timed,
        "seconds": found.seconds,
        "assumed": list(dict.fromkeys((*_own_module(run), *found.assumed, *hardware.assumed))),
        "placement": places.table() | {"lines": placed(places)},
        "words": WORDS | _HELD,
    }


def _why_not(found: Found) -> list[dict[str, Any]]:
    """Each layout once, with its first reason: neighbours of the best may be what somebody has already named."""
    rows, seen = [], {pasted(found.best)}
    for one in found.why_not:
        option = None if one.option is None else told_option(one.option) | _against(found.best, one.option)
        if option is None or option["toml"] not in seen:
            rows.append({"name": one.name, "reason": one.reason, "option": option})
            seen |= set() if option is None else {option["toml"]}
    return rows


def _against(best: Option, other: Option) -> dict[str, Any]:
    return {"beside": beside(best, other), "change": change(best, other)}


def _kept(run: Run, found: Found) -> list[str]:
    """What the search was not free to choose."""
    usual = asdict(Layout())
    keys = [key for key, value in asdict(run.layout).items() if value != usual[key]]
    if not keys or found.considered <= 1:
        return []
    return [f"The run file's [layout] was kept ({', '.join(keys)}): --free searches all layouts, and compares."]


def _own_module(run: Run) -> list[str]:
    if run.model.module is None:
        return []
    return [f"What {run.model.module} computes is not known: it is judged as a decoder of the run file's sizes."]


def told_option(option: Option) -> dict[str, Any]:
    """One way of laying the run out. What follows from the step's time has its interval: as the step goes, so go they."""
    hours = 24 * option.expected_days * option.layout.ranks
    scale = {"low": option.low / option.seconds, "high": option.high / option.seconds}
    grows = {
        "seconds": option.seconds,
        "days": option.days,
        "expected_days": option.expected_days,
        "gpu_hours": hours,
        "price": option.price,
        "energy": option.energy,
    }
    shrinks = {"tokens_per_second": option.tokens_per_second, "mfu": option.mfu}
    ranges = {name: [value * scale["low"], value * scale["high"]] for name, value in grows.items() if value is not None}
    ranges |= {name: [value / scale["high"], value / scale["low"]] for name, value in shrinks.items() if value is not None}
    return {
        "name": short(option.layout),
        "layout": asdict(option.layout),
        "ranks": option.layout.ranks,
        "toml": pasted(option),
        "micro_batch": option.micro_batch,
        "accumulation": option.accumulation,
        "compute": option.compute,
        "compiled": option.compiled,
        "recompute": option.recompute,
        "recompute_every": option.recompute_every,
        "offload": option.offload,
        "memory": dict(option.memory),
        "bytes": option.bytes,
        "fullest": option.fullest,
        "capacity": option.capacity,
        "fits": option.fits,
        "low": option.low,
        "high": option.high,
        "split": {part: option.split.get(part, 0.0) for part in PARTS},
        "pieces": dict(option.pieces),
        "goodput": option.goodput,
        "save_every": option.save_every,
        "ranges": ranges,
        **grows,
        **shrinks,
    }


def short(layout: Layout) -> str:
    """The layout as people of this trade write it: PP16v8 ZeRO1×128 TP8+SP."""
    expert = f"EP{layout.expert}" + (f"×{layout.expert_tensor}" if layout.expert_tensor > 1 else "")
    order = _ORDERS.get(layout.schedule, f"-{layout.schedule}")
    # V-shaped schedules always have two stages of a rank.
    stages = f"v{layout.stages_per_rank}" if layout.stages_per_rank > 1 and layout.schedule not in ("zbv", "dualpipev") else ""
    method = "" if layout.context_method == "ring" else f"-{layout.context_method}"
    parts = [
        f"PP{layout.pipeline}{stages}{order}" if layout.pipeline > 1 else "",
        f"DP{layout.data}" if (layout.data or 1) > 1 else "",
        (f"FSDP{layout.shard}" if layout.zero == 3 else f"ZeRO{layout.zero}×{layout.shard}") if layout.shard > 1 else "",
        f"CP{layout.context}{method}" if layout.context > 1 else "",
        f"TP{layout.tensor}{'+SP' if layout.sequence else ''}" if layout.tensor > 1 else "",
        expert if layout.expert * layout.expert_tensor > 1 else "",
    ]
    return " ".join(part for part in parts if part) or "one device"


def pasted(option: Option) -> str:
    """What to write into the run file to get it, whatever a later plan would choose."""
    lines = ["[layout]", *(f"{key} = {toml(value)}" for key, value in _written(option.layout).items())]
    lines += ["", "[train]", f"micro_batch = {option.micro_batch}"]
    lines += ["", "[precision]", f"compute = {toml(option.compute)}"]
    lines += ["", "[memory]", f"recompute = {toml(option.recompute)}"]
    lines += [f"recompute_every = {option.recompute_every}"] if option.recompute_every > 1 else []
    lines.append(f"offload = {toml(option.offload)}")
    lines += ["compile = true"] if option.compiled else []
    return "\n".join(lines)


def _written(layout: Layout) -> dict[str, Any]:
    """The keys of a layout that have to be said; `data` left out would be chosen anew."""
    usual = asdict(Layout())
    return {
        key: value
        for key, value in asdict(layout).items()
        if value is not None and key not in _idle(layout) and (value != usual[key] or key == "data")
    }


def _idle(layout: Layout) -> set[str]:
    """Keys that mean nothing, as there is nobody to share with."""
    needed = {"zero": layout.shard, "context_method": layout.context, "schedule": layout.pipeline, "stages": layout.pipeline}
    return {key for key, degree in needed.items() if degree == 1}


def change(best: Option, other: Option) -> str:
    """The keys to set on the command line to get another layout where the run file has the best one's tables. Empty where a key would
    have to go, which no value does."""
    usual = asdict(Layout())
    old, new = usual | _written(best.layout), usual | _written(other.layout)
    keys = {key: value for key, value in new.items() if value != old[key]}
    if "stages" in keys and keys["stages"] is None:
        if other.layout.pipeline == 1:
            return ""
        keys["stages"] = other.layout.stages_per_rank
    found = {f"layout.{key}": value for key, value in keys.items()}
    for key in ("train.micro_batch", "memory.recompute", "memory.recompute_every", "memory.offload"):
        name = key.partition(".")[2]
        if getattr(other, name) != getattr(best, name):
            found[key] = getattr(other, name)
    found |= {"precision.compute": other.compute} if other.compute != best.compute else {}
    found |= {"memory.compile": other.compiled} if other.compiled != best.compiled else {}
    return " ".join(f"{key}={value if isinstance(value, str) else toml(value)}" for key, value in found.items())


def placed(places: Placement) -> list[str]:
    """Who shares a node, a rail, a pipeline, in a few sentences."""
    if places.ranks <= places.node:
        return ["All ranks are on one node."] if places.ranks > 1 else []
    inside = [f"{one.name.replace('_', '-')} groups of {one.size}" for one in places.groups if one.reach == "node"]
    island = [f"{one.name.replace('_', '-')} groups of {one.size}" for one in places.groups if one.reach == "island"]
    outside = [
        f"{one.name.replace('_', '-')} groups of {one.size:,} span {one.nodes:,} nodes{' on one rail' if one.one_rail and places.rails else ''}"
        for one in places.groups
        if one.reach == "network"
    ]
    order = ", ".join(name for name in places.order if name in [one.name for one in places.groups])
    rail = f", on rail rank % {places.node}" if places.rails else ""
    said = [f"A rank is on node rank // {places.node}{rail}; ranks run through {order}, the first fastest."]
    if inside:
        said.append(f"Inside a node: {_listed(inside)}.")
    if island:
        said.append(f"Inside an island of {places.island:,} devices: {_listed(island)}.")
    if outside:
        said.append(f"Over the network: {_listed(outside)}.")
    return said + ([places.advice] if places.advice else [])


def beside(best: Option, other: Option) -> list[dict[str, Any]]:
    """Where another layout loses or gains time against the best, most first: part, its name in words, and seconds."""
    more = [(other.split.get(part, 0.0) - best.split.get(part, 0.0), part) for part in PARTS]
    telling = [(seconds, part) for seconds, part in more if abs(seconds) >= 0.002 * best.seconds]
    return [
        {"part": part, "words": WORDS[part], "seconds": seconds}
        for seconds, part in sorted(telling, key=lambda one: -abs(one[0]))
    ]


def why(found: Found, aim: str) -> list[str]:
    """Why this one, in a few sentences."""
    best = found.best
    most = {"time": "quickest", "price": "cheapest"}.get(aim, "best")
    said = [f"It is the {most} that fits, of {found.considered:,} legal layouts."]
    if any(other.seconds < best.seconds for other in found.others):
        said[0] = f"It is the simplest of those as quick as the quickest that fits, of {found.considered:,} legal layouts."
    if any(other.seconds < best.seconds / NEAR for other in found.others) and best.layout == Layout(data=best.layout.data):
        said[0] = (
            f"It is what `phalanx train` takes here: replicas, as none of {found.considered:,} legal layouts is clearly better."
        )
    if found.considered <= 1:
        said = [f"It is the run file's own layout, judged as it stands{'' if best.fits else '; it does not fit'}."]
    said.append(f"Of a step, {_shares(best)}; the fullest rank uses {best.bytes / best.capacity:.0%} of its memory.")
    if not found.others:
        return said
    near = [other for other in found.others if other.seconds <= (1 + _EQUAL) * best.seconds]
    if near:
        names = _listed([short(other.layout) for other in near[:3]])
        said.append(
            f"{names} {'are' if len(near) > 1 else 'is'} within {_EQUAL:.0%} of it, which no prediction resolves: a few steps of each would tell."
        )
    else:
        behind = found.others[0].seconds / best.seconds - 1
        said.append(f"The next, {short(found.others[0].layout)}, takes {behind:.1%} longer{lost(best, found.others[0])}.")
    return said


def _shares(option: Option) -> str:
    """What a step's time goes to: computing, and the three largest of the other parts that show in whole percents."""
    share = {part: seconds / option.seconds for part, seconds in option.split.items()}
    others = sorted((part for part in share if part != "compute"), key=lambda part: -share[part])[:3]
    said = [f"{share[part]:.0%} {WORDS[part]}" for part in others if share[part] >= 0.005]
    return ", ".join([f"{share.get('compute', 0.0):.0%} is {WORDS['compute']}", *said])


def lost(best: Option, other: Option) -> str:
    """What another layout loses most of its time to, as the end of a sentence."""
    losses = [one for one in beside(best, other) if one["seconds"] > 0]
    return f", most of it {losses[0]['words']}" if losses else ""


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
