"""Models of transformers on ranks equal them in one process: replicas and shards, with fused matrices and with experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hf_families import spec
from ranks import tiny_run

from phalanx.spec.layout import Layout
from phalanx.spec.run import Lora
from phalanx.verification.parity import Report, verify
from phalanx.verification.rank_pool import RankPool

pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2) as made:
        yield made


def proof(pool: RankPool, name: str, layout: dict[str, Any], **more: Any) -> Report:
    run = replace(tiny_run("train.sequence_length=48"), model=spec(name), layout=Layout(**({"data": 1} | layout)))
    return verify(replace(run, **more), steps=3, pool=pool)


def told(report: Report) -> str:
    return f"{report.failure} {[check for check in report.checks if not check.passed]}"


@pytest.mark.parametrize(
    "layout",
    [{"data": 2}, {"shard": 2, "zero": 1}, {"shard": 2, "zero": 2}, {"shard": 2, "zero": 3}],
    ids=["data", "zero-1", "zero-2", "zero-3"],
)
@pytest.mark.parametrize("name", ["phi3", "olmoe", "gpt2"])  # the weights of gpt2 are tied
def test_replicas_and_shards(name: str, layout: dict[str, Any], pool: RankPool) -> None:
    report = proof(pool, name, layout)
    assert report.passed, told(report)


def test_adapters_on_layers_by_the_names_of_transformers(pool: RankPool) -> None:
    report = proof(pool, "phi3", {"shard": 2, "zero": 3}, lora=Lora(rank=3, targets=("qkv_proj", "down_proj")))
    assert report.passed, told(report)
