"""The machines of published steps, from the printed values: kind of device, devices per host, links.

Peaks and links are those of the catalogue. Rows with an unknown kind are excluded. `steps` calls it.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

from phalanx.planning.machines.catalogue import entry, named_gpu

Row = dict[str, str]


class Kind(NamedTuple):
    """A device with its usual node and network."""

    name: str
    family: str
    half: float
    eight: float
    four: float
    bandwidth: float
    memory: float
    node: float
    island: float
    near: float
    far: float


T, G = 1e12, 1e9

# Patterns of printed device names and keys of the catalogue; more specific patterns first.
CATALOGUED = (
    ("GB300", "gb300"),
    ("GB200", "gb200"),
    ("B300", "b300"),
    ("B200", "b200"),
    ("H200", "h200-sxm"),
    ("H800", "h800-sxm"),
    (r"H20\b", "h20"),
    ("H100.*NVL", "h100-nvl"),
    ("H100.*PCI", "h100-pcie"),
    ("H100", "h100-sxm"),
    ("A800", "a800-sxm"),
    ("A100.*PCI.*40|A100.*40.*PCI", "a100-pcie-40gb"),
    ("A100.*PCI", "a100-pcie-80gb"),
    ("A100.*40", "a100-sxm-40gb"),
    ("A100", "a100-sxm-80gb"),
    ("V100.*PCI", "v100-pcie"),
    ("V100.*SXM3", "v100-sxm3"),
    ("V100", "v100-sxm2"),
    ("MI300", "mi300x"),
    ("MI250", "mi250x"),
    ("L40S", "l40s"),
    ("4090", "rtx-4090"),
    ("3090", "rtx-3090"),
    ("TPU ?v?7", "tpu-v7"),
    ("TPU ?v?6", "tpu-v6e"),
    ("TPU ?v5p", "tpu-v5p"),
    ("TPU ?v5", "tpu-v5e"),
    ("TPU ?v4", "tpu-v4"),
)

# Devices that the catalogue does not have, with the vendors' figures.
OTHERS = (
    ("GH200", Kind("gh200", "h100", 989.4 * T, 1978.9 * T, 1978.9 * T, 4000 * G, 96 * G, 4, 4, 450 * G, 25 * G)),
    ("MI355", Kind("mi355x", "mi300", 2300 * T, 4600 * T, 9200 * T, 8000 * G, 288 * G, 8, 8, 450 * G, 50 * G)),
    ("MI325", Kind("mi325x", "mi300", 1307.4 * T, 2614.9 * T, 2614.9 * T, 6000 * G, 256 * G, 8, 8, 448 * G, 50 * G)),
    ("TPU ?v3", Kind("tpu-v3", "tpu", 123 * T, 123 * T, 123 * T, 900 * G, 32 * G, 4, 1024, 80 * G, 6.25 * G)),
)


@cache
def _catalogued(key: str) -> Kind:
    gpu = named_gpu(key, "gpu")
    node = entry("nodes", gpu.node, "node")
    half = gpu.peak("bf16") or gpu.peak("fp16") or gpu.peaks["fp32"]
    eight = gpu.peak("fp8") or half
    return Kind(
        name=key,
        family=gpu.family,
        half=half,
        eight=eight,
        four=gpu.peaks.get("fp4", eight),
        bandwidth=gpu.bandwidth,
        memory=gpu.memory,
        node=node["gpus"],
        island=node["island"],
        near=entry("links", node["link"], "link")["bandwidth"] * G,
        far=entry("links", node["network"], "network")["bandwidth"] * G * node["nics"] / node["gpus"],
    )


def kind_of(row: Row) -> Kind | None:
    """The device of a row; None if unknown."""
    other = next((kind for match, kind in OTHERS if re.search(match, row["gpu"])), None)
    if other is not None:
        return other
    key = next((key for match, key in CATALOGUED if re.search(match, row["gpu"])), None)
    return None if key is None else _catalogued(key)


def precision_of(row: Row) -> str:
    """The number format, from its printed name; bf16 if missing."""
    text = row["precision"].lower()
    if "fp4" in text:
        return "fp4"
    if "8" in text.replace("fp8 all-gather", "").replace("float8 all-gather)", "") and re.search(
        r"fp8|float8|mxfp8|e4m3", text
    ):
        return "fp8"
    if text.startswith("fp32"):
        return "fp32"
    return "fp16" if text.startswith("fp16") else "bf16"


def machine(row: Row, kind: Kind, precision: str, ranks: float) -> dict[str, float]:
    """The machine's columns. Printed links take precedence over those of the kind."""
    peak = {"fp8": kind.eight, "fp4": kind.four}.get(precision, kind.half)
    slow = _power(row)
    node = float(row["gpus_per_node"] or kind.node)
    island = (
        _slice(row, kind)
        if kind.family.startswith("tpu")
        else kind.island
        if kind.island > kind.node
        else min(node, kind.island)
    )
    far = float(row["inter_bw_Gbps_per_gpu"]) * G / 8 if row["inter_bw_Gbps_per_gpu"] else kind.far
    near = float(row["intra_bw_GBs"]) * G if row["intra_bw_GBs"] else kind.near
    bandwidth = 2400 * G if "HBM2e" in row["gpu"] and kind.family == "h100" else kind.bandwidth
    # fp32 products run at a sixteenth of the 16-bit peak.
    peak = kind.half / 16 if precision == "fp32" else peak
    return {
        "peak": peak * slow,
        "peak16": (peak if precision == "fp32" else kind.half) * slow,
        "bandwidth": bandwidth,
        "memory": _memory(row, kind),
        "island": float(min(island, max(ranks, 1))),
        "island_bandwidth": near,
        "network": far,
    }


def _power(row: Row) -> float:
    """Relative clock of cards capped below 700 W: dynamic power grows with the cube of the clock."""
    said = re.search(r"(\d{3})W", row["gpu"])
    watts = float(said[1]) if said else 500.0 if "lowtdp" in row["gpu"].lower() else 700.0
    return float((watts / 700) ** (1 / 3))


def _memory(row: Row, kind: Kind) -> float:
    said = re.search(r"(\d+)GB", row["gpu"])
    return float(said[1]) * G if said else kind.memory


def _slice(row: Row, kind: Kind) -> float:
    """TPUs of one slice: from "FSDP N within slice", from "N slice(s)" in the notes, or the size of the kind."""
    inside = re.search(r"FSDP (\d+) within slice", row["zero_or_fsdp"])
    if inside:
        return float(inside[1])
    several = re.search(r"(\d+) slice\(?s?\)?", row["notes"])
    if several and row["n_gpus"]:
        return float(row["n_gpus"]) / float(several[1])
    return kind.island
