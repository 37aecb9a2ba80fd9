"""From [cluster] to the machines that a run is planned for: a cluster of the catalogue, one built from its parts, one from
a user's file, or this machine. Everything that predicts calls `hardware`; what starts a run calls `mismatch` first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from phalanx.planning.machines import own_parts
from phalanx.planning.machines.catalogue import GpuEntry, entry, find_gpu
from phalanx.planning.machines.cluster import Failures, Hardware, with_measured
from phalanx.planning.machines.cpu import cpu_hardware
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Machine
from phalanx.spec.run import PARTS, Run

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
    return any(getattr(run.cluster, key) is not None for key in ("name", *PARTS))


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
        f"`phalanx rehearse` or `phalanx simulate`, or remove the keys name, {', '.join(PARTS)} of [cluster] to train on this machine."
    ]


def _named(run: Run) -> Hardware:
    cluster, name = run.cluster, run.cluster.name
    base: Mapping[str, Any] = {}
    if name is not None:
        base = own_parts.cluster(name, "cluster.name") if own_parts.is_file(name) else entry("clusters", name, "cluster.name")
    gpu = _device(run, base)
    # Another GPU than the named cluster's comes in its own usual node.
    other = cluster.gpu is not None and cluster.gpu != _key(base.get("gpu"))
    usual = gpu.node if other else base.get("node", gpu.node)
    node = own_parts.node(cluster.node or usual, "cluster.node", gpu.node) if cluster.node or isinstance(usual, str) else usual
    if cluster.gpus_per_node is not None:
        node = own_parts.resized(node, cluster.gpus_per_node)
    whole = base.get("gpus") or node["gpus"] * base.get("nodes", cluster.nodes)
    gpus = cluster.gpus or whole
    wire = own_parts.link(cluster.network or base.get("network", node["network"]), "cluster.network")
    nics = cluster.nics or base.get("nics", node["nics"])
    # A network that was chosen apart from its node has that node's number of ports, which few people expect.
    unsaid = (cluster.network or "network" in base) and nics == node["nics"] and cluster.nics is None and "nics" not in base
    built = _build(gpu, gpus, own_parts.with_ports(node, nics), wire, ports_of=node["name"] if unsaid else None)
    own_name = f"{gpus:,} × {gpu.key}" if name is None else base["name"]
    return replace(
        built,
        name=own_name if name is None or gpus == whole else f"{own_name}, {gpus:,} devices",
        rails=base.get("rails", built.rails),
        storage=base["storage"] * 1e9 / -(-whole // node["gpus"]) if "storage" in base else built.storage,
        price=base.get("price", built.price),
        failures=failure_rates(base["failures"]) if "failures" in base else built.failures,
        measured=tuple(base.get("measured", {}).items()),
        sources=(*((base["source"],) if "source" in base else ()), *built.sources),
    )


def _device(run: Run, base: Mapping[str, Any]) -> GpuEntry:
    """The device of [cluster], checked against what the run asks of it."""
    chosen = run.cluster.gpu or base.get("gpu")
    if chosen is None:
        raise RunError(
            '[cluster] names no GPU to plan for: set cluster.gpu, such as cluster.gpu = "h100-sxm", or cluster.name.'
        )
    gpu = chosen if isinstance(chosen, GpuEntry) else own_parts.gpu(chosen, "cluster.gpu" if run.cluster.gpu else "gpu")
    if run.cluster.device not in (None, gpu.device):
        raise RunError(
            f'cluster.device = "{run.cluster.device}" but {gpu.name} is a "{gpu.device}" device: remove cluster.device.'
        )
    if run.precision.compute == "fp8" and gpu.device != "cpu" and gpu.peak("fp8") is None:
        raise RunError(f'precision.compute = "fp8" but {gpu.name} does not multiply in it: set precision.compute = "bf16".')
    if not (gpu.node or run.cluster.node or "node" in base):
        raise RunError(f'cluster.gpu = "{chosen}" names no node that it is in: set cluster.node, or node in that file.')
    return gpu


def _key(gpu: str | GpuEntry | None) -> str | None:
    return gpu.key if isinstance(gpu, GpuEntry) else gpu


def _build(gpu: GpuEntry, gpus: int, node: Mapping[str, Any], wire: Mapping[str, Any], ports_of: str | None = None) -> Hardware:
    """`ports_of`: name of the node whose number of ports was taken although the network is another."""
    here = min(node["gpus"], gpus)
    link, host = own_parts.link(node["link"], "link"), own_parts.link(node["host_link"], "host_link")
    price = f"A device costs {gpu.price:.2f} US dollars an hour ({gpu.price_source})." if gpu.price is not None else None
    notes = [f"{thing['name']}: {thing['note']}." for thing in (node, link, wire) if "note" in thing]
    built = Hardware(
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
        nics=node["nics"],
    )
    told = _told(built, link, wire, ports_of)
    return replace(built, assumed=tuple(filter(None, (*told, price, *notes, f"{gpu.name}: {gpu.note}." if gpu.note else None))))


def _told(built: Hardware, link: Mapping[str, Any], wire: Mapping[str, Any], ports_of: str | None) -> Iterator[str]:
    """The sizes that a plan rests on: devices and their memory, links inside a node and ports out of it, each with its source."""
    gpu = built.gpu
    many = f"{built.nodes:,} node{'s' if built.nodes > 1 else ''} with {built.node} × {gpu.name}"
    yield f"{many}, {gpu.memory / 2**30:.1f} GiB each ({gpu.source})."
    if built.island > 1:
        around = "a node" if built.island <= built.node else f"an island of {built.island:,} devices"
        yield f"Inside {around} each device sends {_rate(built.island_bandwidth)}: {link['name']} ({link['source']})."
    if built.gpus > built.island:
        ports, whole = f"{built.nics} port{'s' if built.nics != 1 else ''} of {wire['name']}", wire["bandwidth"] * 1e9
        why = f" (as many as {ports_of} has; cluster.nics sets their number)" if ports_of else ""
        rates = f"{_rate(whole * (built.nics or 1))} in all, {_rate(built.network)} per device"
        yield f"A node has {ports}{why}: {rates} ({wire['source']})."


def _rate(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:.3g} GB/s"


def _this_machine(machine: Machine) -> Hardware:
    """The GPUs that the driver lists, with the memory that it reports and the usual links of such a GPU."""
    first = machine.gpus[0].name
    gpu = find_gpu(first) or replace(_UNKNOWN, key=first, name=first)
    node = entry("nodes", gpu.node, "node")
    gpu = replace(gpu, memory=float(min(card.memory for card in machine.gpus)))
    if machine.nodes > 1:
        here = len(machine.gpus) // machine.nodes
        node = {**node, "gpus": here, "island": min(here, node["island"])}
    built = _build(gpu, len(machine.gpus), node, own_parts.link(node["network"], "network"))
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
