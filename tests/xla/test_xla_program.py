"""What the compiler makes of a step: work is divided, the old state's memory is used again, and products are in the format of the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from xla_engine import (
    Program,
    devices,
    formats_of_sums,
    kernels,
    needs_xla,
    products,
    programs,
    programs_with_undivided_experts,
    programs_without_constraint,
    small_run,
)

from phalanx.spec.layout import Layout
from phalanx.spec.model import Mla, ModelSpec, Moe
from phalanx.spec.run import Memory

pytestmark = needs_xla

MODEL = ModelSpec(dim=64, layers=1, heads=4, kv_heads=2, ffn=128, vocab=264, context=16)
"""Of sizes that eight devices divide, and large enough for products to be most of the work."""
MOE = Moe(experts=8, active=2, ffn=32, shared=1, bias_rate=0.01, balance_loss=0.01)
MLA = Mla(kv_rank=16, q_rank=16, nope_dim=16, rope_dim=8, value_dim=16)
FAMILIES = {
    "dense": replace(MODEL, layers=3),
    "gpt": replace(MODEL, kv_heads=None, norm="layer", activation="gelu", positions="learned", bias=True, tied=True),
    "window": replace(MODEL, layers=3, window=7, global_every=3),
    "mla": replace(MODEL, kv_heads=None, mla=MLA),
    "moe": replace(MODEL, layers=3, qk_norm=True, moe=replace(MOE, dense_layers=1)),
    "mla-moe": replace(MODEL, kv_heads=None, mla=MLA, moe=replace(MOE, router="sigmoid", scale=2.5, groups=4, active_groups=2)),
}
GRID = Layout(data=2, shard=2, tensor=2)
LAYOUTS = {
    "data 8": Layout(data=8),
    "shard 8": Layout(data=1, shard=8),
    "grid": GRID,
    "sequence": replace(GRID, sequence=True),
    "ring": Layout(data=1, shard=2, context=2, tensor=2),
    "gather": Layout(data=2, shard=2, context=2, context_method="gather"),
}
EXPERT_LAYOUTS = {
    "expert 2": replace(GRID, expert=2),
    "expert 4": replace(GRID, expert=4),
    "expert 4 of shard 8": Layout(data=1, shard=8, expert=4),
    "expert 2, expert_tensor 2": Layout(data=1, shard=2, context=2, tensor=2, expert=2, expert_tensor=2),
}


def programs_of(model: ModelSpec, layouts: dict[str, Layout]) -> tuple[list[Program], str]:
    """The step on one device and on those of each layout, and what the compiler said."""
    with devices() as pool:
        found = pool.alone(programs, [small_run(layout, 1, model=model) for layout in (Layout(data=1), *layouts.values())])
        return found, (pool.folder / "pool.log").read_text() + (pool.folder / "rank-0.log").read_text()


def assert_divided(found: list[Program], layouts: dict[str, Layout]) -> None:
    alone, *shared = found
    for (name, layout), program in zip(layouts.items(), shared, strict=True):
        assert program.flops <= 1.1 * alone.flops / layout.ranks, (name, program.flops * layout.ranks / alone.flops)
        assert program.donated == program.arguments - program.batch, (name, program)


def test_work_is_divided_and_memory_is_used_again() -> None:
    layouts = {"expert": Layout(data=1, shard=2, tensor=2, expert=2)}
    found, said = programs_of(replace(FAMILIES["moe"], layers=1, moe=MOE), layouts)
    assert_divided(found, layouts)
    assert "Involuntary full rematerialization" not in said


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_on_eight_devices(family: str) -> None:
    layouts = LAYOUTS | (EXPERT_LAYOUTS if FAMILIES[family].moe is not None else {})
    found, said = programs_of(FAMILIES[family], layouts)
    assert_divided(found, layouts)
    assert "Involuntary full rematerialization" not in said


@pytest.mark.slow
def test_a_missing_constraint_is_found() -> None:
    with devices() as pool:
        pool.alone(programs_without_constraint, small_run(LAYOUTS["gather"], 1, model=FAMILIES["mla"]))
        log = (pool.folder / "rank-0.log").read_text()
    assert "Involuntary full rematerialization" in log


@pytest.mark.slow
def test_an_undivided_dispatch_is_found() -> None:
    model, layouts = replace(FAMILIES["moe"], layers=1, moe=MOE), {"expert 2": EXPERT_LAYOUTS["expert 2"]}
    with devices() as pool:
        alone = pool.alone(programs, [small_run(Layout(data=1), 1, model=model)])
        found = pool.alone(programs_with_undivided_experts, small_run(layouts["expert 2"], 1, model=model))
    with pytest.raises(AssertionError, match="expert 2"):
        assert_divided([*alone, *found], layouts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("tpu", {"fwd": 1, "dq": 1, "dkv": 1}),
        ("cuda", {"fmhaScaleBiasSoftmax": 1, "fmhaScaleBiasSoftmaxBackward": 1}),
    ],
)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_step_has_the_kernels_of_the_platform(platform: str, expected: dict[str, int], recompute: Any) -> None:
    """Three equal blocks are one, which a loop repeats: one kernel of the forward, and those of the backward. Selective recomputation stores what the kernel
    gives."""
    model = replace(MODEL, layers=3, heads=4, kv_heads=2, head_dim=64)
    run = replace(small_run(GRID, 1, model=model, compute="bf16"), memory=Memory(recompute=recompute))
    with devices() as pool:
        found = pool.alone(kernels, run, platform)
    forward = next(iter(expected))
    assert found == expected | {forward: 2 if recompute == "full" else 1}


@pytest.mark.slow
def test_selective_recomputation_repeats_no_product_of_experts() -> None:
    run = small_run(Layout(data=1), 1, model=replace(MODEL, head_dim=64, moe=MOE), compute="bf16")
    with devices() as pool:
        found = [
            pool.alone(products, replace(run, memory=Memory(recompute=mode)), "cuda") for mode in ("none", "selective", "full")
        ]
    assert found[0] == found[1] and sum(found[2].values()) > sum(found[1].values())


def test_logits_in_chunks_are_computed_once() -> None:
    """A product for the logits, and one for each of their gradients."""
    layout, model = Layout(data=1, shard=2, tensor=2), replace(MODEL, vocab=1032)
    with devices() as pool:
        whole = pool.alone(products, small_run(layout, 1, model=model))
        cut = pool.alone(products, replace(small_run(layout, 1, model=model), memory=Memory(loss_chunk=4)))
    assert cut == whole


def test_products_are_in_the_format_of_the_run() -> None:
    """Those of routers stay in fp32: two of the backward and one of the forward, in the loop over two blocks."""
    layout = Layout(data=1, shard=2, tensor=2)
    sparse = replace(MODEL, layers=2, moe=Moe(experts=4, active=2, ffn=16, balance_loss=0.01))
    with devices() as pool:
        dense = pool.alone(products, small_run(layout, 1, model=MODEL))
        dense_bf16 = pool.alone(products, small_run(layout, 1, model=MODEL, compute="bf16"))
        sparse_bf16 = pool.alone(products, small_run(layout, 1, model=sparse, compute="bf16"))
    assert set(dense) == {"f32 f32"} and set(dense_bf16) == {"bf16 bf16"}
    assert dense["f32 f32"] == dense_bf16["bf16 bf16"]
    assert set(sparse_bf16) == {"bf16 bf16", "f32 f32"} and sparse_bf16["f32 f32"] == 3


@pytest.mark.parametrize("family", ["gpt", "moe"])
def test_gradients_in_bf16_are_added_up_in_fp32(family: str, tmp_path: Path) -> None:
    """No tensor group, whose sums are of activations and stay in the format of products."""
    layout = Layout(data=2, shard=2, **({"expert": 2} if family == "moe" else {}))
    run = small_run(layout, 1, model=replace(FAMILIES[family], layers=1), compute="bf16")
    with devices() as pool:
        assert pool.alone(formats_of_sums, run, str(tmp_path)) == {"f32"}
