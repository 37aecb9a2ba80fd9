"""What the compiler makes of a step: work is divided, the old state's memory is used again, and products are in the format of the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from xla_engine import compile_without_constraint, compiled, devices, needs_xla, products, small_run

from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec, Moe

pytestmark = needs_xla

MODEL = ModelSpec(dim=64, layers=1, heads=4, kv_heads=2, ffn=128, vocab=264, context=16)
"""Of sizes that eight devices divide, and large enough for products to be most of the work."""
GRID = Layout(data=2, shard=2, tensor=2)
LAYOUTS = [
    GRID,
    Layout(data=8),
    Layout(data=1, shard=8),
    Layout(data=2, shard=2, tensor=2, sequence=True),
    Layout(data=1, shard=2, context=2, tensor=2, context_method="gather"),
]


def check_layout(layout: Layout, folder: Path) -> None:
    """One device computes one sample of a micro-batch at a time, whose loop the compiler counts once; the devices of a replica share it."""
    with devices() as pool:
        alone = pool.alone(compiled, small_run(Layout(data=1), 1, model=MODEL), folder / "alone")
        shared = pool.alone(compiled, small_run(layout, 1, model=MODEL), folder / "shared")
        log = (pool.folder / "pool.log").read_text() + (pool.folder / "rank-0.log").read_text()
    assert shared.flops <= 1.1 * alone.flops * layout.replicas / layout.ranks
    assert shared.donated >= shared.arguments - 8 * 16 * 4 * 4 - 16  # all but the batch and three numbers
    assert "Involuntary full rematerialization" not in log


def test_work_is_divided_and_memory_is_used_again(tmp_path: Path) -> None:
    check_layout(Layout(data=1, shard=2, tensor=2), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{layout.data}-{layout.shard}-{layout.context}-{layout.tensor}-{layout.sequence}"
)
def test_eight_devices_share_the_work(layout: Layout, tmp_path: Path) -> None:
    check_layout(layout, tmp_path)


@pytest.mark.slow
def test_a_missing_constraint_is_found() -> None:
    with devices() as pool:
        pool.alone(compile_without_constraint, small_run(GRID, 1, model=MODEL))
        log = (pool.folder / "rank-0.log").read_text()
    assert "Involuntary full rematerialization" in log


def test_products_are_in_the_format_of_the_run() -> None:
    """Those of routers stay in fp32: two of the backward and one of the forward, in each of two blocks."""
    layout = Layout(data=1, shard=2, tensor=2)
    sparse = replace(MODEL, layers=2, moe=Moe(experts=4, active=2, ffn=16, balance_loss=0.01))
    with devices() as pool:
        dense = pool.alone(products, small_run(layout, 1, model=MODEL))
        dense_bf16 = pool.alone(products, small_run(layout, 1, model=MODEL, compute="bf16"))
        sparse_bf16 = pool.alone(products, small_run(layout, 1, model=sparse, compute="bf16"))
    assert set(dense) == {"f32 f32"} and set(dense_bf16) == {"bf16 bf16"}
    assert dense["f32 f32"] == dense_bf16["bf16 bf16"]
    assert set(sparse_bf16) == {"bf16 bf16", "f32 f32"} and sparse_bf16["f32 f32"] == 6
