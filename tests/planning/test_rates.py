"""Constants: which of them a machine gets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.planning.machines.catalogue import gpus, named_gpu
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.rates import Rates, constants, rates_for


def machine(gpu: str = "h100-sxm", **changed: object) -> Hardware:
    entry = named_gpu(gpu, "gpu")
    plain = Hardware(
        name="test",
        device="cuda",
        gpu=entry,
        gpus=8,
        node=8,
        island=8,
        island_bandwidth=450e9,
        network=50e9,
        rails=True,
        host_memory=1e12,
        host_bandwidth=25e9,
        storage=1e9,
        power=None,
        price=None,
        failures=None,
        family=entry.family,
    )
    return replace(plain, **changed)  # type: ignore[arg-type]


def test_the_shipped_file_holds_every_family_of_the_catalogue_or_its_fallback() -> None:
    for gpu in gpus():
        rates = rates_for(machine(gpu.key), "bf16")
        assert 0.2 < rates.gemm <= 1.05, gpu.key
        assert rates.low < 1 < rates.high


def test_a_family_nobody_measured_gets_the_common_constants() -> None:
    unknown = rates_for(machine(family="abacus"), "bf16")
    assert unknown.gemm == constants()["common"]["gemm"]
    assert rates_for(machine(family="abacus"), "fp8").gemm == constants()["format"]["fp8"]["gemm"]


def test_measured_rates_override_fitted_ones() -> None:
    assert rates_for(machine(measured=(("gemm", 0.31), ("low", 0.9), ("bogus", 1.0))), "bf16").gemm == 0.31
    assert rates_for(machine(measured=(("low", 0.9),)), "bf16").low == 0.9


def test_cpu_rates_ignore_published_constants() -> None:
    core = rates_for(machine("cpu-core"), "fp32")
    assert core.gemm == Rates().gemm and core.drain == 0.0


def test_experts_have_wider_intervals() -> None:
    dense, sparse = rates_for(machine(), "bf16"), rates_for(machine(), "bf16", moe=True)
    assert sparse.high / sparse.low > dense.high / dense.low


def test_a_kind_of_its_family_differs_by_its_factor() -> None:
    table = constants()
    one, other = rates_for(machine("b200"), "bf16"), rates_for(machine("gb200"), "bf16")
    assert one.gemm / other.gemm == pytest.approx(table["times"]["b200"]["gemm"] / table["times"]["gb200"]["gemm"])
