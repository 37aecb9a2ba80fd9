"""The machines that are really there, for `phalanx plan --on`: Slurm and Ray are asked what their nodes have, hosts with ssh are asked
themselves. Nothing is reserved."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from phalanx.host.process_tree import run_program
from phalanx.launch.launcher import launcher
from phalanx.launch.ray import connect
from phalanx.launch.slurm import fields
from phalanx.planning.machines import own_parts
from phalanx.planning.machines.catalogue import GpuEntry, gpus_of_type
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Gpu, Machine
from phalanx.spec.run import Run

_SECONDS = 60.0  # in which Slurm answers
_GRES = re.compile(r"\bgpu(?::(?P<type>[^:,(]*[^:,(\d][^:,(]*))?(?::(?P<count>\d+))?(?:\(|,|$)")
_UNUSABLE = ("DOWN", "DRAIN", "FAIL", "MAINT", "POWERED_DOWN", "NOT_RESPONDING", "FUTURE", "INVAL")
_RAY_TYPE = "accelerator_type:"


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeKind:
    """What a scheduler says about a node. Nodes of one kind are equal."""

    cores: int
    memory: int
    """Bytes."""
    gpus: int = 0
    gpu_type: str = ""
    """As the scheduler's owner calls it; empty: not said."""
    cpu: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCluster:
    """Machines to plan for."""

    machine: Machine
    nodes: int
    """Including spare ones."""
    notes: tuple[str, ...]
    """What was found, and what could not be found out, in sentences."""


def found_cluster(run: Run) -> FoundCluster:
    """The machines of the launcher that the run names. RunError if it does not answer, or has none that the run can use."""
    cluster = run.cluster
    if given := [key for key in ("name", "gpus", "node", "network") if getattr(cluster, key) is not None]:
        keys = ", ".join(f"cluster.{key}" for key in given)
        raise RunError(f"--on plans for the machines that are there, but {keys} names others: remove one of them.")
    if cluster.launcher == "slurm":
        return choose("Slurm", slurm_nodes(cluster.slurm, _scontrol("nodes"), _scontrol("partitions")), run)
    if cluster.launcher == "ray":
        connect(cluster.ray_address)
        import ray

        return choose("Ray", ray_nodes(ray.nodes()), run)
    started_by = launcher(run, "plan")
    machine = started_by.machine()
    return FoundCluster(machine=machine, nodes=started_by.nodes, notes=(f"{started_by.nodes} hosts were asked.",))


def choose(engine: str, nodes: Sequence[NodeKind], run: Run) -> FoundCluster:
    """The nodes that the run would get: as many as cluster.nodes of the kind with the most GPUs, else of the most frequent one."""
    usable = [node for node in nodes if node.gpus or run.cluster.device != "cuda"]
    if not usable:
        raise RunError(f"{engine} has no usable node{' with GPUs' if nodes else ''} for this run: see `{_LOOK[engine]}`.")
    kinds = Counter(usable)
    wanted = run.cluster.nodes if run.cluster.nodes > 1 or engine == "Slurm" else None
    enough = [kind for kind, count in kinds.items() if count >= (wanted or 1)]
    if not enough:
        raise RunError(
            f"cluster.nodes = {wanted}, but {engine} has {max(kinds.values())} usable nodes of one kind: lower it, or see `{_LOOK[engine]}`."
        )
    kind = max(enough, key=lambda kind: (kind.gpus if run.cluster.device != "cpu" else 0, kinds[kind]))
    count = wanted or kinds[kind]
    training = max(1, count - run.resilience.spares)
    with_gpus = kind.gpus if run.cluster.device != "cpu" else 0
    gpu, notes = _gpu(engine, kind.gpu_type, run) if with_gpus else (None, [])
    what = f"{kind.cores} cores and {kind.memory / 2**30:.1f} GiB" + (f", {with_gpus} × {gpu.key}" if gpu is not None else "")
    first = f"{engine} has {kinds[kind]} usable nodes with {what} each; planned for {training}."
    others = [f"{engine} has nodes of {len(kinds)} kinds; the others are not used."] if len(kinds) > 1 else []
    unsaid = "cores and links" if gpu is None else "links"
    return FoundCluster(
        machine=Machine(
            host=engine,
            cpu=kind.cpu or "unknown CPU",
            cores=kind.cores * training,
            memory=kind.memory * training,
            gpus=() if gpu is None else (Gpu(name=gpu.name, memory=int(gpu.memory)),) * (with_gpus * training),
            nodes=training,
        ),
        nodes=count,
        notes=(first, *others, *notes, f"{engine} does not tell the speed of {unsaid}: typical values are used."),
    )


_LOOK = {"Slurm": "sinfo -N -l", "Ray": "ray status"}


def _gpu(engine: str, gpu_type: str, run: Run) -> tuple[GpuEntry, list[str]]:
    """The entry of the catalogue for a scheduler's name of a GPU, and what was assumed."""
    if run.cluster.gpu is not None:
        return own_parts.gpu(run.cluster.gpu, "cluster.gpu"), []
    found = gpus_of_type(gpu_type) if gpu_type else []
    if not found:
        says = (
            f'calls its GPUs "{gpu_type}", which are not in the catalogue' if gpu_type else "does not tell the type of its GPUs"
        )
        raise RunError(f'{engine} {says}: set cluster.gpu, such as cluster.gpu = "h100-sxm"; `phalanx clusters` lists them.')
    if len(found) == 1:
        return found[0], []
    others = ", ".join(entry.key for entry in found[1:])
    return found[0], [f'{engine} calls its GPUs "{gpu_type}": {found[0].key} is assumed, not {others}; cluster.gpu says which.']


def slurm_nodes(options: Sequence[str], nodes: str, partitions: str) -> list[NodeKind]:
    """The nodes of the partition that these options of sbatch name, or of the default one, from what scontrol prints about all."""
    tables = [fields(line) for line in partitions.splitlines() if line.strip()]
    default = next((table["PartitionName"] for table in tables if table.get("Default") == "YES"), None)
    partition = _option(options, "--partition", "-p") or default
    if partition is not None and partition not in {table["PartitionName"] for table in tables}:
        known = ", ".join(table["PartitionName"] for table in tables)
        raise RunError(f"cluster.slurm: Slurm has no partition {partition}: choose one of {known}.")
    asked = _asked_gpus(options)
    found = []
    for line in nodes.splitlines():
        table = fields(line)
        state, within = table.get("State", ""), table.get("Partitions", "").split(",")
        if not table or any(word in state for word in _UNUSABLE) or (partition is not None and partition not in within):
            continue
        gpu_type, gpus = _gres(table.get("Gres", ""))
        if asked is not None and gpus < asked:
            continue
        found.append(
            NodeKind(
                cores=int(table["CPUTot"]),
                memory=int(table["RealMemory"]) * 2**20,
                gpus=gpus if asked is None else asked,
                gpu_type=gpu_type,
                cpu=table.get("Arch", ""),
            )
        )
    return found


def ray_nodes(nodes: Sequence[dict[str, Any]]) -> list[NodeKind]:
    """The living nodes of `ray.nodes()`. Ray measures how much memory was free when a node started: equal nodes get the least of them."""
    found, memory = [], dict[NodeKind, int]()
    for node in nodes:
        resources = node["Resources"]
        if node["Alive"] and resources.get("CPU", 0) >= 1:
            types = [name.removeprefix(_RAY_TYPE) for name in resources if name.startswith(_RAY_TYPE)]
            gpus = int(resources.get("GPU", 0))
            kind = NodeKind(cores=int(resources["CPU"]), memory=0, gpus=gpus, gpu_type=types[0] if gpus and types else "")
            found.append(kind)
            memory[kind] = min(memory.get(kind, sys.maxsize), int(resources.get("memory", 0)))
    return [replace(kind, memory=memory[kind]) for kind in found]


def _gres(text: str) -> tuple[str, int]:
    """Type and number of the GPUs of a node, from its generic resources, such as gpu:h100:8(S:0-1)."""
    if (match := _GRES.search(text)) is None:
        return "", 0
    return match["type"] or "", int(match["count"] or 1)


def _asked_gpus(options: Sequence[str]) -> int | None:
    """GPUs per node that options of sbatch ask for; None: they do not say."""
    per_node = _option(options, "--gpus-per-node", "--gpus-per-node")
    if per_node is not None:
        return int(per_node.rpartition(":")[2])
    gres = _option(options, "--gres", "--gres")
    return _gres(gres)[1] if gres is not None and "gpu" in gres else None


def _option(options: Sequence[str], long: str, short: str) -> str | None:
    """The value of an option, written as --partition=gpu, -p gpu or -pgpu, in one element or in two."""
    words = [word for option in options for word in option.split()]
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == long and equals:
            return value
        if word in (long, short):
            return words[index + 1] if index + 1 < len(words) else None
        if len(short) == 2 and word.startswith(short) and not word.startswith("--"):
            return word.removeprefix(short)
    return None


def _scontrol(what: str) -> str:
    try:
        done = run_program(["scontrol", "-o", "show", what], _SECONDS)
    except OSError as error:
        raise RunError(f"scontrol cannot be run ({error}): use a login node of the cluster.") from None
    if done.returncode:
        raise RunError(f"Slurm does not answer ({done.stderr.strip()}): see `scontrol ping`.")
    return done.stdout
