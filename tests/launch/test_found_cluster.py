"""From what schedulers print about their nodes to the machines that a run is planned for."""

from __future__ import annotations

from typing import Any

import pytest

from phalanx.launch.found_cluster import NodeKind, choose, ray_nodes, slurm_nodes
from phalanx.planning.machines.catalogue import find_gpu, gpus, gpus_of_type
from phalanx.planning.planner import plan
from phalanx.planning.request import PlanRequest
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads

PARTITIONS = """\
PartitionName=debug AllowGroups=ALL Default=YES MaxTime=01:00:00 Nodes=login[1-2] State=UP
PartitionName=gpu AllowGroups=ALL Default=NO MaxTime=UNLIMITED Nodes=dgx[1-4] State=UP
"""
# As Slurm 22.05 prints them, shortened.
NODE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=56 CPUAlloc=0 CPUEfctv=112 CPUTot={cores} CPULoad=0.10 AvailableFeatures=(null) "
    "Gres={gres} NodeAddr={name} RealMemory={memory} AllocMem=0 Sockets=2 State={state} ThreadsPerCore=1 Partitions={partition} "
    "Reason=none [root@2026-11-17]"
)
NODES = "\n".join(
    NODE.format(name=name, cores=cores, gres=gres, memory=memory, state=state, partition=partition)
    for name, cores, gres, memory, state, partition in [
        ("login1", 8, "(null)", 16000, "IDLE", "debug"),
        ("login2", 8, "(null)", 16000, "MIXED", "debug"),
        ("dgx1", 112, "gpu:h100:8(S:0-1)", 2000000, "IDLE", "gpu"),
        ("dgx2", 112, "gpu:h100:8(S:0-1)", 2000000, "ALLOCATED", "gpu,long"),
        ("dgx3", 112, "gpu:h100:8(S:0-1)", 2000000, "IDLE+DRAIN", "gpu"),
        ("dgx4", 112, "gpu:h100:8(S:0-1)", 2000000, "DOWN*", "gpu"),
    ]
)
DGX = NodeKind(cores=112, memory=2000000 << 20, gpus=8, gpu_type="h100", cpu="x86_64")


@pytest.mark.parametrize(
    "options", [["--partition=gpu"], ["-p gpu"], ["-p", "gpu"], ["-pgpu"], ["--time=5", "--partition", "gpu"]]
)
def test_nodes_of_a_partition(options: list[str]) -> None:
    assert slurm_nodes(options, NODES, PARTITIONS) == [DGX, DGX], "neither drained ones nor lost ones"


def test_default_partition_and_wrong_ones() -> None:
    assert [node.cores for node in slurm_nodes([], NODES, PARTITIONS)] == [8, 8]
    with pytest.raises(RunError, match="no partition gpus: choose one of debug, gpu"):
        slurm_nodes(["--partition=gpus"], NODES, PARTITIONS)


@pytest.mark.parametrize(
    ("option", "gpus"),
    [
        ("--gpus-per-node=4", 4),
        ("--gres=gpu:2", 2),
        ("--gres=gpu:h100:2", 2),
        ("--gpus-per-node=h100:4", 4),
        ("--gpus-per-node=9", None),
    ],
)
def test_gpus_that_sbatch_is_asked_for(option: str, gpus: int | None) -> None:
    found = slurm_nodes(["--partition=gpu", option], NODES, PARTITIONS)
    assert {node.gpus for node in found} == ({gpus} if gpus else set())


@pytest.mark.parametrize(
    ("gres", "gpu_type", "count"),
    [
        ("gpu:8", "", 8),
        ("gpu:a100:4(S:0)", "a100", 4),
        ("gpu:nvidia_a100-sxm4-80gb:8(S:0-1),nvme:1", "nvidia_a100-sxm4-80gb", 8),
        ("license:2,gpu:2", "", 2),
        ("gpu", "", 1),
        ("(null)", "", 0),
    ],
)
def test_generic_resources(gres: str, gpu_type: str, count: int) -> None:
    (node,) = slurm_nodes(
        [], NODE.format(name="a", cores=4, gres=gres, memory=1, state="IDLE", partition="p"), "PartitionName=p Default=YES"
    )
    assert (node.gpu_type, node.gpus) == (gpu_type, count)


@pytest.mark.parametrize(
    ("text", "first", "certain"),
    [
        ("h100", "h100-sxm", True),
        ("H100", "h100-sxm", True),
        ("A100-80G", "a100-sxm-80gb", False),
        ("A100", "a100-sxm-80gb", False),
        ("nvidia_a100-sxm4-40gb", "a100-sxm-40gb", True),
        ("nvidia_h100_80gb_hbm3", "h100-sxm", True),
        ("L4", "l4", True),
        ("AMD-Instinct-MI300X-OAM", "mi300x", True),
    ],
)
def test_types_of_gpus(text: str, first: str, certain: bool) -> None:
    found = gpus_of_type(text)
    assert found[0].key == first and (len(found) == 1) == certain


def test_catalogue_finds_its_own_names() -> None:
    assert all(find_gpu(entry.name) is entry for entry in gpus())


RUN = """
model = "llama3-8b"
[train]
batch = 512
sequence_length = 8192
tokens = 1_000_000_000
[cluster]
launcher = "slurm"
nodes = {nodes}
[resilience]
spares = {spares}
"""


def test_plan_for_the_nodes_that_are_there() -> None:
    run = loads(RUN.format(nodes=3, spares=1))
    small = NodeKind(cores=8, memory=16 << 30)
    found = choose("Slurm", [small, DGX, DGX, DGX, DGX], run)
    assert (found.nodes, found.machine.nodes, len(found.machine.gpus), found.machine.cores) == (3, 2, 16, 224)
    assert found.notes[0].startswith(
        "Slurm has 4 usable nodes with 112 cores and 1953.1 GiB, 8 × h100-sxm each; planned for 2."
    )
    assert any("2 kinds" in note for note in found.notes) and any("speed of links" in note for note in found.notes)
    report = plan(PlanRequest(run, found.machine))
    assert report.best.layout.ranks == 16 and report.best.fits


def test_what_cannot_be_found_out_is_said() -> None:
    run, untyped = loads(RUN.format(nodes=2, spares=0)), NodeKind(cores=8, memory=1 << 36, gpus=4)
    with pytest.raises(RunError, match="Slurm does not tell the type of its GPUs: set"):
        choose("Slurm", [untyped] * 2, run)
    with pytest.raises(RunError, match="= 2, but Slurm has 1 usable nodes of one kind"):
        choose("Slurm", [untyped], run)
    with pytest.raises(RunError, match="no usable node for this run: see `sinfo -N -l`"):
        choose("Slurm", [], run)
    found = choose("Slurm", [NodeKind(cores=8, memory=1 << 36, gpus=4, gpu_type="a100")] * 2, run)
    assert any("a100-sxm-80gb is assumed" in note for note in found.notes)


def test_nodes_of_ray() -> None:
    def node(alive: bool = True, **resources: float) -> dict[str, Any]:
        return {"Alive": alive, "Resources": resources | {"node:10.0.0.1": 1.0}}

    gpu = {"CPU": 96.0, "GPU": 8.0, "accelerator_type:H100": 1.0}
    alive = [node(CPU=0.0), node(**gpu, memory=250e9), node(**gpu, memory=249e9), node(CPU=4.0, memory=8e9)]
    large = NodeKind(cores=96, memory=249 * 10**9, gpus=8, gpu_type="H100")
    assert ray_nodes([*alive, node(alive=False, **gpu)]) == [large, large, NodeKind(cores=4, memory=8 * 10**9)]
