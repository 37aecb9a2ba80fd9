"""The catalogue against what drivers print and what vendors publish."""

from __future__ import annotations

import re

import pytest

from phalanx.planning.machines.catalogue import find_gpu, gpus


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Tesla V100-SXM2-16GB", "v100-sxm2-16gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm2"),
        ("Tesla V100-SXM3-32GB", "v100-sxm3"),
        ("Tesla V100-PCIE-32GB", "v100-pcie"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A800-SXM4-80GB", "a800-sxm"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H800", "h800-sxm"),
        ("NVIDIA H800 PCIe", "h800-pcie"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA B300 SXM6 AC", "b300"),
        ("NVIDIA GB300", "gb300"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090"),
        ("NVIDIA A10", "a10"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI250X", "mi250x"),
        ("TPU v4", "tpu-v4"),
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5p", "tpu-v5p"),
        ("TPU v6 lite", "tpu-v6e"),
        ("TPU7x", "tpu-v7"),
    ],
)
def test_driver_names_find_their_gpu(name: str, key: str) -> None:
    entry = find_gpu(name)
    assert entry is not None
    assert entry.key == key
    assert [other.key for other in gpus() if re.search(other.match, name)] == [key]  # the order of files decides nothing


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


# Dense TFLOP/s of 16-bit matrices as people quote them, GB as sold, GB/s, W: written down apart from the catalogue.
QUOTED = {
    "v100-sxm2": (125, 32, 900, 300),
    "a100-sxm-80gb": (312, 80, 2039, 400),
    "h100-sxm": (989, 80, 3350, 700),
    "h100-pcie": (756, 80, 2000, 350),
    "h800-sxm": (989, 80, 3350, 700),
    "h20": (148, 96, 4000, 400),
    "h200-sxm": (989, 141, 4800, 700),
    "b200": (2250, 180, 8000, 1000),
    "gb200": (2500, 186, 8000, 1200),
    "mi300x": (1307, 192, 5300, 750),
    "tpu-v4": (275, 32, 1228, 192),
    "tpu-v5e": (197, 16, 819, None),
    "tpu-v5p": (459, 95, 2765, None),
    "tpu-v6e": (918, 32, 1638, None),
    "tpu-v7": (2307, 192, 7380, None),
}


@pytest.mark.parametrize("key", QUOTED)
def test_gpu_peaks_equal_published_figures(key: str) -> None:
    peak, memory, bandwidth, power = QUOTED[key]
    entry = next(entry for entry in gpus() if entry.key == key)
    sixteen = entry.peak("bf16") or entry.peak("fp16")
    assert sixteen == pytest.approx(peak * 1e12, rel=0.002)
    assert memory * 1e9 * 0.98 <= entry.memory <= memory * 2**30  # vendors count in GB or in GiB, drivers keep some
    assert entry.bandwidth == pytest.approx(bandwidth * 1e9, rel=0.001)
    assert power is None or entry.power == power


def test_gpu_number_formats() -> None:
    h100, v100 = find_gpu("NVIDIA H100 80GB HBM3"), find_gpu("Tesla V100-SXM2-32GB")
    assert h100 is not None and v100 is not None
    assert h100.peak("fp32") == pytest.approx(66.9e12)  # never the tf32 figure
    assert v100.peak("bf16") is None


def test_every_entry_is_plausible() -> None:
    order = ("fp32", "tf32", "bf16", "fp8", "fp4")
    for entry in gpus():
        known = [entry.peaks[name] for name in order if name in entry.peaks]
        assert known == sorted(known), entry.key  # narrower numbers are never slower
        # Tensor cores double as numbers halve; published figures are rounded, and consumer cards have tf32 = fp32.
        if "fp8" in entry.peaks:
            assert entry.peaks["fp8"] == pytest.approx(2 * entry.peaks["bf16"], rel=0.02), entry.key
        if "fp4" in entry.peaks:
            assert 2 <= entry.peaks["fp4"] / entry.peaks["fp8"] <= 3, entry.key
        if "tf32" in entry.peaks:
            assert entry.peaks["bf16"] == pytest.approx(2 * entry.peaks["tf32"], rel=0.02), entry.key
        if {"bf16", "fp16"} <= entry.peaks.keys():
            assert entry.peaks["bf16"] == entry.peaks["fp16"], entry.key
        if entry.device == "cpu":
            continue
        assert 16e9 <= entry.memory <= 300e9 and 2e11 <= entry.bandwidth <= 1e13, entry.key
        assert entry.power is not None and 50 <= entry.power <= 1500, entry.key
        assert entry.price is not None and entry.price_source, entry.key
