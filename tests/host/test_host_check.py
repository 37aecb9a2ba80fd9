"""The rules by which hosts are judged before a run starts: what they say about themselves, their links, their devices."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations

import pytest

from phalanx.host.host_check import (
    MAX_ROUNDS,
    DeviceResult,
    Pair,
    device_problems,
    disagreements,
    disjoint_rounds,
    gpu_differences,
    link_rounds,
    shortages,
    slow_links,
    usual_speed,
)
from phalanx.host.host_report import HostQuestion, HostReport, report
from phalanx.host.probe import this_machine


@pytest.fixture(scope="module")
def same() -> HostReport:
    return report(HostQuestion(run_dir="/nowhere/run", launch="1", paths=("/", "/nowhere/data")))


def test_this_machine_reports(same: HostReport) -> None:
    assert same.machine == this_machine() and not same.sees_run_dir and same.missing == ("/nowhere/data",)
    assert "127.0.0.1" not in same.addresses and same.free_disk > 0 and len(same.code) == 64


def problems(*reports: HostReport) -> list[str]:
    names = [chr(ord("a") + number) for number in range(len(reports))]
    found = disagreements(names, reports, [(reports[0].clock - 1, reports[0].clock + 1)] * len(reports))
    return [message for _, message in found]


def test_equal_hosts_agree(same: HostReport) -> None:
    assert not problems(same) and not problems(same, replace(same, clock=same.clock + 0.5), same)


def test_a_host_that_differs_is_named(same: HostReport) -> None:
    other = replace(same, versions={**same.versions, "torch": "2.0.0"})
    (sentence,) = problems(same, other, same)
    assert sentence.startswith("torch of b is 2.0.0, but ") and "remove the host" in sentence
    (sentence,) = problems(same, same, replace(same, code="0" * 64))
    assert sentence.startswith("Phalanx's source code of c is 000000000000")
    (sentence,) = problems(same, replace(same, clock=same.clock + 300), same)
    assert sentence.startswith("The clock of b is 299 s ahead of the others")
    (sentence,) = problems(same, replace(same, clock=same.clock - 300), same)
    assert sentence.startswith("The clock of b is 299 s behind the others")
    (sentence,) = problems(replace(same, files="1" * 64), same, same)
    assert sentence.startswith("the run file or plan of a is 111111111111, but ")
    (sentence,) = problems(same, same, replace(same, versions={**same.versions, "NVIDIA driver": "550.54"}))
    assert sentence.startswith("NVIDIA driver of c is 550.54, but ")
    assert not list(gpu_differences(["a", "b"], [8, 8]))
    ((host, sentence),) = gpu_differences(["a", "b", "c"], [8, 4, 8])
    assert host == 1 and sentence.startswith("the number of GPUs of b is 4 GPUs") and "slots=N" in sentence


def test_a_full_host_is_named(same: HostReport) -> None:
    roomy = replace(same, free_disk=1 << 30, free_memory=same.machine.memory)
    assert not list(shortages(["a", "b"], [roomy, roomy], "/runs/x"))
    ((_, sentence),) = shortages(["a", "b"], [roomy, replace(roomy, free_disk=3 << 20)], "/runs/x")
    assert sentence.startswith("b has 3 MiB free for /runs/x")
    ((_, sentence),) = shortages(["a", "b"], [replace(roomy, free_memory=1 << 20), roomy], "/runs/x")
    assert sentence.startswith("a has 1 MiB of its ")


@pytest.mark.parametrize("count", [2, 3, 4, 5, 7, 8, 15, 16])
def test_every_link_of_few_hosts_is_measured_once(count: int) -> None:
    hosts = [3 * number for number in range(count)]
    rounds = link_rounds(hosts)
    for pairs in rounds:
        assert len({host for pair in pairs for host in pair}) == 2 * len(pairs), "a host is in one pair at a time"
    measured = [pair for pairs in rounds for pair in pairs]
    assert sorted(measured) == sorted(combinations(hosts, 2))


def test_every_one_of_many_hosts_is_measured_with_several(count: int = 501) -> None:
    rounds = link_rounds(range(count))
    assert len(rounds) == MAX_ROUNDS
    measured = [pair for pairs in rounds for pair in pairs]
    assert len(set(measured)) == len(measured)
    assert min(sum(host in pair for pair in measured) for host in range(count)) >= MAX_ROUNDS - 1


def test_slow_links_are_measured_again_in_rounds_without_conflict() -> None:
    pairs = [(0, 1), (0, 2), (1, 2), (3, 4)]
    rounds = disjoint_rounds(pairs)
    assert sorted(pair for group in rounds for pair in group) == pairs
    assert rounds[0] == [(0, 1), (3, 4)]


def rates(count: int, slow: set[int], seed: int = 0) -> dict[Pair, float]:
    """Links of hosts some of which are ten times slower; everything varies by a factor of 1.6."""
    dice = random.Random(seed)
    return {
        pair: dice.uniform(625, 1000) / (10 if slow & set(pair) else 1) for pairs in link_rounds(range(count)) for pair in pairs
    }


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("count", "slow"), [(2, set()), (3, set()), (3, {1}), (4, {3}), (4, {0, 2}), (16, {5}), (40, {7, 8})])
def test_hosts_with_slow_links_are_found_and_no_others(count: int, slow: set[int], seed: int) -> None:
    measured = rates(count, slow, seed)
    assert slow_links(measured, 0.5 * usual_speed(measured)) == (sorted(slow), [])


def test_one_slow_link_is_nobodys_fault() -> None:
    measured = rates(5, set()) | {(1, 3): 90.0}
    assert slow_links(measured, 0.5 * usual_speed(measured)) == ([], [(1, 3)])


def test_a_slow_network_is_nobodys_fault() -> None:
    assert slow_links({(0, 1): 3.0}, 0.5 * usual_speed({(0, 1): 3.0})) == ([], [])


def test_of_two_hosts_that_cannot_connect_one_is_left_out() -> None:
    measured = rates(4, set()) | {(1, 3): 0.0}
    assert slow_links(measured, 0.5 * usual_speed(measured)) == ([3], [])
    assert slow_links({(0, 1): 0.0}, 0.0) == ([1], [])
    measured = rates(4, set()) | {(0, 1): 0.0, (1, 3): 0.0}
    assert slow_links(measured, 0.5 * usual_speed(measured)) == ([1], [])


def device(host: int, **values: object) -> DeviceResult:
    return replace(DeviceResult(host=host, name="GPU 0", model="H100", digest="same", flops=700e12), **values)  # type: ignore[arg-type]


def device_sentences(*results: DeviceResult) -> list[tuple[int, str]]:
    return [(host, message) for host, message in device_problems(["a", "b", "c"], results, 0.5)]


def test_equal_devices_pass() -> None:
    assert not device_sentences(device(0), device(1, flops=400e12), device(2, model="A100", digest="other", flops=200e12))


def test_a_device_that_computes_wrongly_or_slowly_is_named() -> None:
    ((host, sentence),) = device_sentences(device(0), device(1, wrong=1), device(2))
    assert host == 1 and sentence.startswith("GPU 0 of b (H100) computes wrongly: 1 of the numbers")
    ((host, sentence),) = device_sentences(device(0), device(1), device(2, digest="other"))
    assert host == 2 and "computes other bits than 2 of 3 devices of its model" in sentence
    ((host, sentence),) = device_sentences(device(0, flops=300e12), device(1), device(2))
    assert host == 0 and "computes 300,000.0 GFLOP/s, less than cluster.min_speed = 0.5 of the 700,000.0 GFLOP/s" in sentence
    ((host, sentence),) = device_sentences(device(0), device(1, problem="CUDA error: ECC"), device(2))
    assert host == 1 and "does not compute: CUDA error: ECC; replace it, or remove the host." in sentence


def test_of_two_devices_with_other_bits_neither_is_blamed() -> None:
    """Both have computed the exact products."""
    assert not device_sentences(device(0), device(1, digest="other"))
