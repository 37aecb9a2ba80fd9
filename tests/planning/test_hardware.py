"""From [cluster] to the machines: catalogue, parts, own files, this machine, and what does not match."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.planning.cost.run_cost import upkeep
from phalanx.planning.machines.catalogue import entries
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.hardware import hardware, mismatch, planned
from phalanx.planning.search.search import assumptions_of, judge
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.plan import Gpu, Machine
from phalanx.spec.run import Precision, Run

GIB = 2**30
LAPTOP = Machine(host="here", cpu="a core", cores=4, memory=16 * GIB, core_flops=1e11)


def run(cluster: str = "") -> Run:
    return loads(f"[train]\nbatch = 8\nsteps = 2\n[cluster]\n{cluster}\n")


def built(cluster: str) -> Hardware:
    return hardware(run(cluster), None)


def server(name: str, count: int, memory: int = 143771 << 20) -> Machine:
    return Machine(host="here", cpu="a core", cores=64, memory=1024 * GIB, gpus=(Gpu(name=name, memory=memory),) * count)


@pytest.mark.parametrize("name", entries("clusters"))
def test_every_cluster_of_the_catalogue(name: str) -> None:
    made = built(f'name = "{name}"')
    assert made.gpus >= made.island >= 1 and made.gpus >= made.node >= 1
    assert made.island_bandwidth > made.network > 0 and made.storage > 0
    assert made.sources and made.family == made.gpu.family
    assert made.device == "cpu" or (made.power is not None and made.power > (made.gpu.power or 0))  # the host takes its share


def test_cluster_of_llama_3() -> None:
    made = built('name = "h100-16384"')
    assert (made.gpus, made.node, made.nodes, made.island) == (16384, 8, 2048, 8)
    assert made.network == pytest.approx(400e9 / 8) and made.island_bandwidth == pytest.approx(900e9 / 2)
    assert made.storage * made.nodes == pytest.approx(2e12)
    assert made.failures is not None
    assert 1 / (made.failures.rate * made.gpus) == pytest.approx(54 * 24 / 419)  # hours between interruptions
    hbm = dict(made.failures.rates)["memory"] / made.failures.rate
    assert hbm == pytest.approx(0.172, abs=0.001)


def test_cluster_built_from_parts() -> None:
    made = built('gpu = "h800-sxm"\ngpus = 2048')
    assert made.island_bandwidth == pytest.approx(200e9) and made.nodes == 256
    assert built('gpu = "h100-sxm"').gpus == 8  # those of one node
    rack = built('gpu = "gb200"\ngpus = 576')
    assert (rack.node, rack.island) == (4, 72)
    slow = built('gpu = "h100-sxm"\ngpus = 64\nnode = "dgx-h100"\nnetwork = "roce-100"')
    assert slow.network == pytest.approx(12.5e9)


def test_cluster_keys_override_the_named_cluster() -> None:
    half = built('name = "h100-16384"\ngpus = 8192\nnetwork = "roce-200"')
    assert half.gpus == 8192 and half.network == pytest.approx(25e9) and half.nodes == 1024
    assert half.storage == built('name = "h100-16384"').storage  # of each host
    other = built('name = "h100-8"\ngpu = "a100-sxm-80gb"')
    assert other.island_bandwidth == pytest.approx(300e9)  # another GPU brings its own node


def test_part_of_a_node_has_part_of_its_memory() -> None:
    one = built('name = "h200"')
    assert (one.gpus, one.node, one.island) == (1, 1, 1)
    assert one.host_memory == pytest.approx(built('name = "h200-8"').host_memory / 8)


@pytest.mark.parametrize(
    ("cluster", "parts"),
    [
        ('name = "h100"', ('cluster.name = "h100"', "h100-8", "`phalanx clusters`")),
        ('gpu = "b20"', ('cluster.gpu = "b20"', "b200")),
        ('gpu = "b200"\nnode = "dgx-b20"', ('cluster.node = "dgx-b20"', "dgx-b200")),
        ('gpu = "b200"\nnetwork = "ib-nrd"', ('cluster.network = "ib-nrd"', "ib-ndr")),
        ('name = "missing.toml"', ('cluster.name = "missing.toml"', "No such file")),
        ('name = "h100-8"\ndevice = "cpu"', ('cluster.device = "cpu"', "remove cluster.device")),
    ],
)
def test_unknown_cluster_names_are_refused(cluster: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(RunError) as caught:
        built(cluster)
    (said,) = caught.value.problems
    assert all(part in said for part in parts), said


@pytest.mark.parametrize("key", ["gpus = 8", 'node = "dgx-h100"', 'network = "ib-ndr"'])
def test_parts_without_a_gpu_are_refused_with_the_run_file(key: str) -> None:
    with pytest.raises(RunError, match=rf"cluster.{key.split()[0]} = .*set cluster.gpu"):
        run(key)


def test_sized_cluster_keeps_its_machines() -> None:
    one, eight, many = (built(f'gpu = "h100-sxm"\ngpus = {number}') for number in (1, 8, 24))
    for made in (one.sized(24), eight.sized(24), many.sized(24)):
        assert (made.gpus, made.node, made.island, made.host_memory) == (24, many.node, many.island, many.host_memory)
    fewer = many.sized(2).sized(8)
    assert (fewer.node, fewer.island, fewer.host_memory) == (eight.node, eight.island, eight.host_memory)
    assert built('name = "gb200-576"').sized(8).sized(144).island == 72


def test_a_cluster_that_fails_faster_than_it_starts_has_a_plan_all_the_same() -> None:
    endless = upkeep(built('gpu = "h100-sxm"\ngpus = 10000000'), state=1e9, ranks=10**7, step=1.0)
    assert 0 < float(endless.goodput) < 1e-6


def test_a_format_that_the_device_lacks_is_refused() -> None:
    text = '[train]\nbatch = 8\nsteps = 2\n[precision]\ncompute = "fp8"\n[cluster]\ngpu = "{}"\n'
    assert hardware(loads(text.format("h100-sxm")), None).gpu.peak("fp8")
    with pytest.raises(RunError, match=r'precision.compute = "fp8" but NVIDIA A100.*set precision.compute = "bf16"'):
        hardware(loads(text.format("a100-sxm-80gb")), None)


def test_cluster_from_own_file(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text(
        'gpus = 16\nnetwork = "roce-100"\nstorage = 10\nprice = 1.5\n'
        '[gpu]\nname = "ours"\nbf16 = 100\nmemory = 32\nbandwidth = 500\nnode = "pcie4-box"\n[measured]\ngemm = 0.6\n'
    )
    made = built(f'name = "{file}"')
    assert made.gpu.peaks == {"bf16": 1e14} and made.gpu.memory == 32 * GIB
    assert made.storage == pytest.approx(5e9) and made.price == 1.5 and dict(made.measured) == {"gemm": 0.6}
    file.write_text('gpu = "h100-sxm"\ngpus = 0\nstorrage = 3\nnode = 7\n[measured]\ngemm = "x"\n')
    with pytest.raises(RunError) as caught:
        built(f'name = "{file}"')
    said = "\n".join(caught.value.problems)
    for part in (
        "gpus = 0 must be above 0",
        "storrage is not a key",
        "did you mean storage",
        "node = 7 is an integer",
        'gemm = "x"',
    ):
        assert part in said, said
    file.write_text('gpu = "h100-sxm"\ngpus = 8\nprice = nan\n[measured]\ngemmm = 0.6\nlaunch = 0\n')
    with pytest.raises(RunError) as caught:
        built(f'name = "{file}"')
    said = "\n".join(caught.value.problems)
    for part in (
        "price = nan must be above 0 and finite",
        "gemmm is not a key",
        "did you mean gemm",
        "launch = 0 must be above 0",
    ):
        assert part in said, said
    file.write_text("[gpu]\nname = 'x'\ndevice = 'abacus'\n")
    with pytest.raises(RunError) as caught:
        built(f'name = "{file}"')
    said = "\n".join(caught.value.problems)
    for part in ("gpus is missing", "memory is missing", "abacus", "gives no peak"):
        assert part in said, said


def test_hardware_of_this_machine() -> None:
    cores = hardware(run(), LAPTOP)
    assert (cores.device, cores.gpus, cores.node, cores.family) == ("cpu", 4, 4, "cpu")
    assert cores.gpu.memory * 4 == LAPTOP.memory
    eight = hardware(run(), server("NVIDIA H200", 8))
    assert (eight.device, eight.gpu.key, eight.gpus, eight.node) == ("cuda", "h200-sxm", 8, 8)
    assert eight.gpu.memory == 143771 << 20  # as the driver counts, not as the catalogue does
    assert hardware(run('device = "cpu"'), server("NVIDIA H200", 8)).device == "cpu"
    with pytest.raises(RunError, match="no GPU"):
        hardware(run('device = "cuda"'), LAPTOP)
    with pytest.raises(RunError, match="names no cluster"):
        hardware(run(), None)


def test_a_format_that_cores_multiply_number_by_number_is_slow_and_said() -> None:
    old = replace(LAPTOP, scalar=("bf16",))
    low = replace(run(), precision=Precision(compute="bf16"))
    quick, slow = judge(low, hardware(low, LAPTOP)), judge(low, hardware(low, old))
    assert slow.split["compute"] > 100 * quick.split["compute"]
    assert any(
        "has no instructions for bf16" in one and 'set precision.compute = "fp32"' in one
        for one in assumptions_of(low, hardware(low, old))
    )
    plain, usual = judge(run(), hardware(run(), old)), judge(run(), hardware(run(), LAPTOP))
    assert usual.seconds < plain.seconds < slow.seconds / 20, "in fp32 such cores are slower than others, but not like that"
    assert not any(
        "no instructions" in one
        for one in (*assumptions_of(run(), hardware(run(), old)), *assumptions_of(low, hardware(low, LAPTOP)))
    )


def test_unknown_gpu_is_assumed_and_said() -> None:
    made = hardware(run(), server("NVIDIA H999", 2, 48 * GIB))
    assert made.family == "unknown" and made.gpu.memory == 48 * GIB
    assert any("NVIDIA H999 is not in the catalogue" in sentence for sentence in made.assumed)


def test_training_on_another_machine_is_refused() -> None:
    assert mismatch(run(), LAPTOP) == [] and not planned(run())
    assert mismatch(run('name = "h200-8"'), server("NVIDIA H200", 8)) == []
    (said,) = mismatch(run('name = "h100-16384"'), server("NVIDIA H200", 8))
    assert "16,384 × h100-sxm" in said and "8 × h200-sxm" in said and "phalanx rehearse" in said
    (said,) = mismatch(run('gpu = "h200-sxm"\ngpus = 4'), server("NVIDIA H200", 8))
    assert "4 × h200-sxm" in said and "this machine has 8" in said and "remove the keys name, gpu, gpus, node" in said
    (said,) = mismatch(run('name = "laptop"'), LAPTOP)
    assert "8 × cpu-core" in said and "4 cores" in said
