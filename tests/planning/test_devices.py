"""The catalogue against what drivers print and what vendors publish."""

from __future__ import annotations

import re

import pytest

from phalanx.planning.devices import find_gpu, gpus


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Tesla V100-SXM2-16GB", "v100-sxm2"),
        ("Tesla V100-PCIE-32GB", "v100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H800", "h800-sxm"),
        ("NVIDIA H800 PCIe", "h800-pcie"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA A10", "a10"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_driver_names(name: str, key: str) -> None:
    entry = find_gpu(name)
    assert entry is not None
    assert entry.key == key


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA A10G",
        "NVIDIA GH200 480GB",
        "NVIDIA L40",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb",
        "",
    ],
)
def test_relatives_are_not_mistaken_for_the_ones_that_are_known(name: str) -> None:
    assert find_gpu(name) is None


def test_published_peaks() -> None:
    h100, v100 = find_gpu("NVIDIA H100 80GB HBM3"), find_gpu("Tesla V100-SXM2-32GB")
    assert h100 is not None and v100 is not None
    assert h100.peak("bf16") == pytest.approx(989.4e12)
    assert h100.peak("fp32") == pytest.approx(66.9e12)  # never the tf32 figure
    assert v100.peak("bf16") is None


def test_every_entry_is_plausible() -> None:
    order = ("fp32", "tf32", "bf16", "fp8")
    for entry in gpus():
        re.compile(entry.match)
        known = [entry.peaks[name] for name in order if name in entry.peaks]
        assert known == sorted(known), entry.key  # narrower numbers are never slower
        # Tensor cores double as numbers halve; published figures are rounded, and consumer cards have tf32 = fp32.
        if "fp8" in entry.peaks:
            assert entry.peaks["fp8"] == pytest.approx(2 * entry.peaks["bf16"], rel=0.02), entry.key
        if "tf32" in entry.peaks:
            assert entry.peaks["bf16"] == pytest.approx(2 * entry.peaks["tf32"], rel=0.02), entry.key
        assert entry.peaks.get("bf16", entry.peaks["fp16"]) == entry.peaks["fp16"], entry.key
        assert 16e9 <= entry.memory <= 300e9 and 2e11 <= entry.bandwidth <= 1e13, entry.key
        assert entry.source
