"""Every file of the catalogue: whole, and naming only things that are there."""

from __future__ import annotations

import pytest

from phalanx.planning.machines.catalogue import KINDS, entries, entry, gpu_entry, gpus
from phalanx.planning.machines.hardware import failure_rates
from phalanx.spec.errors import RunError

KEYS = {
    "nodes": {
        "name",
        "gpus",
        "island",
        "link",
        "network",
        "nics",
        "rails",
        "host_memory",
        "host_link",
        "storage",
        "power",
        "source",
    },
    "links": {"name", "kind", "bandwidth", "source"},
    "clusters": {"name", "gpu", "gpus", "node", "source"},
    "failures": {"name", "source", "observed", "components"},
    "gpus": {"name", "match", "family", "memory", "bandwidth", "node", "source"},
}
MORE = {
    "nodes": {"note"},
    "links": {"note"},
    "clusters": {"note", "storage", "failures", "network", "rails", "price"},
    "failures": {"note"},
    "gpus": {"fp32", "tf32", "bf16", "fp16", "fp8", "fp4", "device", "power", "price", "price_source", "failures", "note"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_files_hold_what_is_read_and_nothing_else(kind: str) -> None:
    assert entries(kind)
    for name, values in entries(kind).items():
        assert KEYS[kind] <= values.keys() <= KEYS[kind] | MORE[kind], name
        assert values["source"], name


def test_catalogue_references_exist() -> None:
    for gpu in gpus():
        assert gpu.node in entries("nodes"), gpu.key
        assert not gpu.failures or gpu.failures in entries("failures"), gpu.key
    for name, node in entries("nodes").items():
        assert {node["link"], node["network"], node["host_link"]} <= entries("links").keys(), name
        assert node["island"] % node["gpus"] == 0 or node["gpus"] % node["island"] == 0, name
    for name, cluster in entries("clusters").items():
        assert cluster["gpu"] in entries("gpus") and cluster["node"] in entries("nodes"), name
        assert cluster.get("failures", "a100-opt") in entries("failures"), name


def test_clusters_from_a_laptop_to_a_hundred_thousand() -> None:
    sizes = {(c["gpu"], c["gpus"]) for c in entries("clusters").values()}
    wanted = {
        ("h200-sxm", 1),
        ("h100-sxm", 8),
        ("a100-sxm-80gb", 1024),
        ("h800-sxm", 2048),
        ("h100-sxm", 16384),
        ("h100-sxm", 100000),
    }
    assert wanted <= sizes
    assert "laptop" in entries("clusters")


@pytest.mark.parametrize("name", entries("failures"))
def test_components_are_all_the_interruptions(name: str) -> None:
    table = entry("failures", name, "failures")
    assert sum(table["components"].values()) == pytest.approx(table["observed"]["interruptions"])
    assert 300 < 1 / failure_rates(name).rate / 24 < 30_000  # device-days; the worst and the best that anybody has reported


def test_a_gpu_without_a_needed_key_is_refused_by_its_file() -> None:
    values = {key: value for key, value in entries("gpus")["h100-sxm"].items() if key not in ("family", "node")}
    with pytest.raises(RunError) as refused:
        gpu_entry("h100-sxm", values)
    assert refused.value.problems == (
        "catalogue/gpus/h100-sxm.toml: family is missing: set it.",
        "catalogue/gpus/h100-sxm.toml: node is missing: set it.",
    )


def test_unknown_catalogue_name_suggests_nearest() -> None:
    with pytest.raises(RunError) as caught:
        entry("gpus", "H100", "cluster.gpu")
    (said,) = caught.value.problems
    assert (
        said.startswith('cluster.gpu = "H100" is not a GPU of the catalogue')
        and "h100-sxm" in said
        and "`phalanx clusters`" in said
    )
    with pytest.raises(RunError, match="`phalanx clusters` lists them"):
        entry("nodes", "zzzz", "cluster.node")
