"""From [cluster] to the machines that a run is planned for: a cluster of the catalogue, one built from its parts, one from
a user's file, or this machine. Everything that predicts calls `hardware`; what starts a run calls `mismatch` first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from phalanx.planning.machines.catalogue import FORMATS, GpuEntry, entry, find_gpu, gpu_entry, named_gpu, own_file
from phalanx.planning.machines.cluster import Failures, Hardware, with_measured
from phalanx.planning.machines.cpu import cpu_hardware
from phalanx.planning.machines.rates import NAMES
from phalanx.spec.errors import RunError, did_you_mean, noun, quote
from phalanx.spec.plan import Machine
from phalanx.spec.run import Run

_HOST_PART = 0.8
"""Fraction of a host link's nominal bandwidth that copies reach: 12.6 of 15.75 GB/s on PCIe 3, 25 of 31.5 on PCIe 4."""
_UNKNOWN = GpuEntry(
    key="",
    match="(?!)",
    peaks={"fp32": 15e12, "bf16": 100e12, "fp16": 100e12},
    memory=0.0,
    bandwidth=8e11,
    source="not in the catalogue",
    family="unknown",
    node="pcie4-box",
)
"""A GPU that the catalogue does not have, before the driver names it."""


def planned(run: Run) -> bool:
    """Whether [cluster] names machines to plan for; if not, the plan is for this machine."""
    cluster = run.cluster
    return any(key is not None for key in (cluster.name, cluster.gpu, cluster.gpus, cluster.node, cluster.network))


def hardware(run: Run, machine: Machine | None) -> Hardware:
    """The machines of [cluster], or `machine` where it names none. RunError where a name is not in the catalogue."""
    if planned(run):
        return _named(run)
    if machine is None:
        raise RunError(
            'The run file names no cluster to plan for: set cluster.name, such as cluster.name = "h100-8"; `phalanx clusters` lists them.'
        )
    device = run.cluster.device or ("cuda" if machine.gpus else "cpu")
    if device == "cpu":
        given = run.layout.ranks if run.layout.data is not None else run.cluster.cpu_ranks
        return cpu_hardware(machine, given, run.cluster.threads)
    if not machine.gpus:
        raise RunError(
            'cluster.device = "cuda" but this machine has no GPU that nvidia-smi lists; set cluster.device = "cpu", or name a cluster.'
        )
    return with_measured(_this_machine(machine), machine)


def mismatch(run: Run, machine: Machine) -> list[str]:
    """Sentences on why a run planned for other machines cannot be trained on this one; empty where it can."""
    if not planned(run):
        return []
    wanted = hardware(run, None)
    if wanted.device == "cpu":
        same, has = not machine.gpus and machine.cores >= wanted.gpus, f"{machine.cores} cores"
    else:
        keys = [known.key if (known := find_gpu(gpu.name)) else gpu.name for gpu in machine.gpus]
        same = len(keys) == wanted.gpus and set(keys) == {wanted.gpu.key}
        has = f"{len(keys)} × {keys[0]}" if keys else "no GPU"
    if same:
        return []
    return [
        f"The run is planned for {wanted.gpus:,} × {wanted.gpu.key} ({wanted.name}), but this machine has {has}: use `phalanx plan`, "
        "`phalanx rehearse` or `phalanx simulate`, or remove the keys name, gpu, gpus, node and network of [cluster] to train on "
        "this machine."
    ]


def _named(run: Run) -> Hardware:
    name = run.cluster.name
    base: Mapping[str, Any] = {}
    if name is not None:
        base = own_cluster(name) if name.endswith(".toml") else entry("clusters", name, "cluster.name")
    given = {key: value for key, value in asdict(run.cluster).items() if value is not None}
    chosen_by = {key: f"cluster.{key}" if key in given else key for key in ("gpu", "node", "network")}
    parts = {**base, **given}
    if (chosen := parts.get("gpu")) is None:
        raise RunError(
            '[cluster] names no GPU to plan for: set cluster.gpu, such as cluster.gpu = "h100-sxm", or cluster.name.'
        )
    gpu = chosen if isinstance(chosen, GpuEntry) else named_gpu(chosen, chosen_by["gpu"])
    if run.cluster.device not in (None, gpu.device):
        raise RunError(
            f'cluster.device = "{run.cluster.device}" but {gpu.name} is a "{gpu.device}" device: remove cluster.device.'
        )
    if run.precision.compute == "fp8" and gpu.device != "cpu" and gpu.peak("fp8") is None:
        raise RunError(f'precision.compute = "fp8" but {gpu.name} does not multiply in it: set precision.compute = "bf16".')
    # Another GPU than the named cluster's comes in its own usual node.
    usual = gpu.node if parts["gpu"] != base.get("gpu") else base.get("node", gpu.node)
    node = entry("nodes", run.cluster.node or usual, chosen_by["node"])
    gpus = parts.get("gpus", node["gpus"])
    built = _build(gpu, gpus, node, parts.get("network", node["network"]), chosen_by["network"])
    own_name = f"{gpus:,} × {gpu.key}" if name is None else base["name"]
    return replace(
        built,
        name=own_name if name is None or gpus == base["gpus"] else f"{own_name}, {gpus:,} devices",
        rails=base.get("rails", built.rails),
        storage=base["storage"] * 1e9 / -(-base["gpus"] // node["gpus"]) if "storage" in base else built.storage,
        price=base.get("price", built.price),
        failures=failure_rates(base["failures"]) if "failures" in base else built.failures,
        measured=tuple(base.get("measured", {}).items()),
        sources=(*((base["source"],) if "source" in base else ()), *built.sources),
    )


def _build(gpu: GpuEntry, gpus: int, node: Mapping[str, Any], network: str, asked_by: str) -> Hardware:
    here = min(node["gpus"], gpus)
    link, wire = entry("links", node["link"], "link"), entry("links", network, asked_by)
    host = entry("links", node["host_link"], "host_link")
    price = f"A device costs {gpu.price:.2f} US dollars an hour ({gpu.price_source})." if gpu.price is not None else None
    notes = [f"{thing['name']}: {thing['note']}." for thing in (node, link, wire) if "note" in thing]
    return Hardware(
        name=gpu.name,
        device=gpu.device,
        gpu=gpu,
        gpus=gpus,
        node=here,
        island=min(node["island"], gpus),
        island_bandwidth=link["bandwidth"] * 1e9,
        network=wire["bandwidth"] * 1e9 * node["nics"] / node["gpus"],
        rails=node["rails"],
        host_memory=node["host_memory"] * 2**30 * here / node["gpus"],
        host_bandwidth=host["bandwidth"] * 1e9 * _HOST_PART,
        storage=node["storage"] * 1e9,
        power=node["power"] / node["gpus"],
        price=gpu.price,
        failures=failure_rates(gpu.failures) if gpu.failures else None,
        family=gpu.family,
        full_node=node["gpus"],
        full_island=node["island"],
        sources=tuple(dict.fromkeys(filter(None, (gpu.source, node["source"], link["source"], wire["source"])))),
        assumed=tuple(filter(None, (price, *notes, f"{gpu.name}: {gpu.note}." if gpu.note else None))),
    )


def _this_machine(machine: Machine) -> Hardware:
    """The GPUs that the driver lists, with the memory that it reports and the usual links of such a GPU."""
    first = machine.gpus[0].name
    gpu = find_gpu(first) or replace(_UNKNOWN, key=first, name=first)
    node = entry("nodes", gpu.node, "node")
    gpu = replace(gpu, memory=float(min(card.memory for card in machine.gpus)))
    if machine.nodes > 1:
        here = len(machine.gpus) // machine.nodes
        node = {**node, "gpus": here, "island": min(here, node["island"])}
    built = _build(gpu, len(machine.gpus), node, node["network"], "network")
    assumed = [f"Links are those of {node['name']}."] if len(machine.gpus) > 1 else []
    if gpu.family == "unknown":
        assumed.append(
            f"{first} is not in the catalogue: {gpu.peaks['bf16'] / 1e12:.0f} TFLOP/s in bf16; `phalanx bench` measures it."
        )
    return replace(
        built,
        name="this machine" if machine.nodes == 1 else f"{machine.nodes} hosts",
        host_memory=machine.memory / machine.nodes,
        price=None,  # it is there already
        failures=None,
        assumed=tuple(assumed),
    )


def failure_rates(name: str) -> Failures:
    """A failure table of the catalogue, as rates per device-hour."""
    table = entry("failures", name, "failures")
    hours = table["observed"]["gpus"] * table["observed"]["days"] * 24
    return Failures(
        rates=tuple((component, count / hours) for component, count in table["components"].items()), source=table["source"]
    )


_NUMBER = (int, float)
_KEYS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "node", "network", "failures", "source", "note"), (str,)),
    **dict.fromkeys(("storage", "price"), _NUMBER),
    "gpu": (str, dict),
    "gpus": (int,),
    "rails": (bool,),
    "measured": (dict,),
}
_GPU: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("name", "match", "device", "family", "node", "price_source", "failures", "source", "note"), (str,)),
    **dict.fromkeys((*FORMATS, "memory", "bandwidth", "power", "price"), _NUMBER),
}
_DEVICES = ("cpu", "cuda", "tpu")


def own_cluster(path: str) -> dict[str, Any]:
    """The checked contents of a user's cluster file, such as `cluster.name = "our-cluster.toml"` or what `phalanx bench`
    wrote: keys name, gpu (of the catalogue, or a table [gpu] like the catalogue's), gpus, node (default: the GPU's usual
    one), network, rails, storage (GB/s of all hosts together), price, failures, measured."""
    values = own_file(path, "cluster.name")
    problems = _problems(path, values, _KEYS, ("gpu", "gpus"))
    gpu = values.get("gpu")
    if isinstance(gpu, dict):
        problems += _problems(f"{path}, [gpu]", gpu, _GPU, ("memory", "bandwidth", "node"))
        if gpu.get("device", "cuda") not in _DEVICES:
            problems.append(f"{path}, [gpu]: device = {quote(gpu['device'])} is none of {', '.join(_DEVICES)}.")
        if not any(name in gpu for name in FORMATS):
            problems.append(f"{path}, [gpu] gives no peak: set one of {', '.join(FORMATS)}, in TFLOP/s.")
    measured = values.get("measured")
    if isinstance(measured, dict):
        problems += _problems(f"{path}, [measured]", measured, dict.fromkeys(NAMES, _NUMBER))
    if problems:
        raise RunError(problems)
    if isinstance(gpu, dict):
        unsaid = {"name": "own GPU", "match": "(?!)", "family": "unknown", "source": path}
        values["gpu"] = gpu_entry(gpu.get("name", "own"), unsaid | gpu)
    return {"name": path, "source": path} | values


def _problems(
    where: str, values: dict[str, Any], known: dict[str, tuple[type, ...]], needed: tuple[str, ...] = ()
) -> list[str]:
    problems = [f"{where}: {key} is missing: set it." for key in needed if key not in values]
    for key, value in values.items():
        if key not in known:
            problems.append(f"{where}: {key} is not a key of such a file{did_you_mean(known, key) or '.'}")
        elif not isinstance(value, known[key]) or (isinstance(value, bool) and bool not in known[key]):
            problems.append(f"{where}: {key} = {quote(value)} is {noun(value)}, which is not what belongs there.")
        elif not isinstance(value, bool) and isinstance(value, int | float) and not 0 < value < math.inf:
            problems.append(f"{where}: {key} = {quote(value)} must be above 0 and finite.")
    return problems
