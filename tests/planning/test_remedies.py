"""A run that fits nowhere says what is missing, and every change that it proposes makes it fit."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from planning_cases import SMALL, cluster, run_of, with_memory

from phalanx.planning.machines.catalogue import gpus
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.hardware import hardware as cluster_of
from phalanx.planning.planner import search
from phalanx.planning.search.search import find
from phalanx.planning.solve import remedies, with_sequence
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.run import Cluster, Memory, Run

LARGE = run_of("llama3-70b", 64, 8192)


def changed(run: Run, hardware: Hardware, sentence: str) -> tuple[Run, Hardware]:
    """The run and the cluster that a remedy describes, read off its words."""
    numbers = [int(number.replace(",", "")) for number in re.findall(r"\d[\d,]*", sentence)]
    if found := re.match(r"Take ([\d,]+) devices and set train.sequence_length = (\d+)", sentence):
        return with_sequence(run, int(found[2])), replace(hardware, gpus=int(found[1].replace(",", "")))
    if sentence.startswith("Take ") and "devices of this kind" in sentence:
        return run, replace(hardware, gpus=numbers[0])
    for gpu in gpus():
        if f"× {gpu.name} (" in sentence:
            count = int(re.findall(r"([\d,]+) ×", sentence)[0].replace(",", ""))
            assert f'cluster.gpu = "{gpu.key}"' in sentence
            return run, replace(hardware, gpu=gpu, gpus=count)
    if sentence.startswith("Set train.sequence_length"):
        return with_sequence(run, numbers[0]), hardware
    if sentence.startswith("Use a smaller model"):
        sizes = {key: int(value) for key, value in re.findall(r"model\.(\w+) = (\d+)", sentence)}
        return replace(run, model=replace(run.model, **sizes)), hardware  # type: ignore[arg-type]
    if sentence.startswith("Remove [layout]"):
        return replace(run, layout=Layout()), hardware
    if sentence.startswith("Remove memory.recompute"):
        plain = Memory()
        return replace(run, memory=replace(run.memory, recompute=plain.recompute, offload=plain.offload)), hardware
    if sentence.startswith("Set memory.loss_chunk"):
        return replace(run, memory=replace(run.memory, loss_chunk=1024)), hardware
    if sentence.startswith("Set memory.activations"):
        return replace(run, memory=replace(run.memory, activations="cpu")), hardware
    if sentence.startswith("Set data.document_mask"):
        return replace(run, data=replace(run.data, document_mask=False)), hardware
    if sentence.startswith("Set precision.optimizer"):
        return replace(run, precision=replace(run.precision, optimizer="bf16")), hardware
    assert sentence.startswith("Set train.batch"), sentence
    return replace(run, train=replace(run.train, batch=numbers[0])), hardware


@pytest.mark.parametrize(
    ("run", "hardware"),
    [
        (LARGE, cluster(2)),
        (replace(LARGE, layout=Layout(tensor=2)), cluster(4)),
        (replace(LARGE, layout=Layout(tensor=8), memory=Memory(recompute="full", offload="cpu")), cluster(8)),
        (run_of("llama3-8b", 8, 65536), with_memory(cluster(2), 24 * 2**30)),
    ],
)
def test_each_remedy_makes_the_run_fit(run: Run, hardware: Hardware) -> None:
    assert find(run, hardware, most=1) is None
    found = remedies(run, hardware)
    assert re.search(r"needs [\d.,]+ GiB of [\d.,]+ GiB, of which [\d.,]+ GiB are \w+", found[0])
    assert len(found) == 4
    for sentence in found[1:]:
        assert find(*changed(run, hardware, sentence), most=1) is not None, sentence


def test_search_raises_the_remedies() -> None:
    with pytest.raises(RunError) as refused:
        search(LARGE, cluster(2))
    assert list(refused.value.problems) == remedies(LARGE, cluster(2))


def test_fewer_devices_than_proposed_do_not_fit() -> None:
    sentence = next(one for one in remedies(LARGE, cluster(2))[1:] if "devices of this kind" in one)
    _, larger = changed(LARGE, cluster(2), sentence)
    assert find(LARGE, replace(larger, gpus=larger.gpus // 2), most=1) is None


def test_laptop_gets_three_remedies() -> None:
    """Cores of a laptop have no larger kind, so that what is left is more of them, or less to do."""
    run = replace(run_of("llama3-8b", 1024, 4096), cluster=Cluster(name="laptop"))
    found = remedies(run, cluster_of(run, None))
    assert len(found) == 4
    assert any("Use a smaller model: model.dim" in change for change in found)


def test_a_limit_below_what_any_device_needs_can_only_be_raised() -> None:
    run, here = run_of("llama3.2-1b", 64, 4096), cluster(8)
    found = remedies(run, here, 2.0**30)
    limits = [float(number) * 2**30 for change in found for number in re.findall(r"--fits-in ([\d.]+)GiB", change)]
    assert len(limits) == 3 and limits[0] == max(limits)
    assert find(run, here, limits[0], 1) is not None and find(run, here, 0.97 * limits[0], 1) is None
    assert find(run, here.sized(16), limits[1], 1) is not None
    assert find(with_sequence(run, 2048), here, limits[2], 1) is not None


def test_indivisible_run_is_refused() -> None:
    run = run_of(replace(SMALL, heads=7, dim=448, kv_heads=7, layers=3), 5, 30, layout=Layout(tensor=2))
    found = remedies(run, cluster(8))
    assert found[0].startswith("The run file's [layout] does not fit 8 devices")
    assert found[1:]
    bare = remedies(replace(run, layout=Layout()), cluster(11))
    assert bare[0].startswith("No layout divides this run")
