"""Every technique alone and the combinations that matter, proven equal to one device; and what each costs, beside theory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import pytest
from ranks import tiny_run

from phalanx.spec.layout import Layout, Schedule
from phalanx.spec.run import Precision, Run
from phalanx.verification.cases import MODELS
from phalanx.verification.parity import Report, verify
from phalanx.verification.rank_pool import RankPool

SCHEDULES = get_args(Schedule)
QUICK: dict[str, tuple[str, dict[str, Any]]] = {
    "zero-1 × pipeline": ("dense", {"shard": 2, "zero": 1, "pipeline": 2}),
    "zero-3 × sequence": ("gpt", {"shard": 2, "tensor": 2, "sequence": True}),
    "ring × expert": ("moe", {"context": 2, "data": 2, "expert": 2, "expert_tensor": 2}),
    "ulysses × replicas": ("mla", {"context": 2, "data": 2, "context_method": "ulysses"}),
}
TWO: dict[str, tuple[str, dict[str, Any]]] = {
    "replicas": ("dense", {"data": 2}),
    **{f"zero-{zero}": ("dense", {"shard": 2, "zero": zero}) for zero in (1, 2, 3)},
    "tensor": ("gpt", {"tensor": 2}),
    "sequence": ("dense", {"tensor": 2, "sequence": True}),
    "tensor, experts": ("moe", {"tensor": 2}),
    "sequence, latent": ("mla", {"tensor": 2, "sequence": True}),
    **{f"context, {method}": ("dense", {"context": 2, "context_method": method}) for method in ("ring", "gather", "ulysses")},
    "context, experts": ("moe", {"context": 2}),
    **{schedule: ("dense", {"pipeline": 2, "schedule": schedule}) for schedule in SCHEDULES},
    "pipeline, tied": ("gpt", {"pipeline": 2}),
    "pipeline, experts": ("mla", {"pipeline": 2, "schedule": "zbv"}),
    "expert": ("moe", {"data": 2, "expert": 2}),
    "expert_tensor": ("mla", {"data": 2, "expert_tensor": 2}),
}
FOUR: dict[str, tuple[str, dict[str, Any]]] = {
    "replicas": ("dense", {"data": 4}),
    **{f"zero-{zero}": ("dense", {"shard": 4, "zero": zero}) for zero in (1, 2, 3)},
    **{f"hybrid zero-{zero}": ("dense", {"data": 2, "shard": 2, "zero": zero}) for zero in (1, 2, 3)},
    **{f"context, {method}": ("mla-dense", {"context": 4, "context_method": method}) for method in ("ring", "gather")},
    "gpipe": ("gpt", {"pipeline": 4, "schedule": "gpipe"}),
    "1f1b": ("gpt", {"pipeline": 4}),
    "expert": ("moe", {"shard": 4, "expert": 4}),
}
EIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"shard2×tensor2×pipeline2, {s}": ("dense", {"shard": 2, "tensor": 2, "pipeline": 2, "schedule": s}) for s in SCHEDULES},
    **{f"zero-{z}×pipeline2": ("dense", {"shard": 4, "pipeline": 2, "zero": z}) for z in (1, 2, 3)},
    "data2×shard2×tensor2": ("dense", {"data": 2, "shard": 2, "tensor": 2}),
    "shard2×context2×tensor2": ("dense", {"shard": 2, "context": 2, "tensor": 2}),
    "data4×shard2, expert4": ("moe", {"data": 4, "shard": 2, "expert": 4}),
    "data2×shard4, expert4×expert_tensor2": ("moe", {"data": 2, "shard": 4, "expert": 4, "expert_tensor": 2}),
    "pipeline2×data2×shard2, expert2": ("moe", {"pipeline": 2, "data": 2, "shard": 2, "expert": 2}),
    "tensor2×context2×pipeline2": ("dense", {"tensor": 2, "context": 2, "pipeline": 2}),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as made:
        yield made


@pytest.fixture(scope="module")
def large() -> Iterator[RankPool]:
    with RankPool(8, timeout=300) as made:
        yield made


def run_of(model: str, layout: dict[str, Any], *overrides: str) -> Run:
    run = replace(tiny_run("train.sequence_length=48", *overrides), model=MODELS[model])
    return replace(run, layout=Layout(**{"data": 1} | layout))


def prove(row: tuple[str, dict[str, Any]], pool: RankPool, *overrides: str, steps: int = 8) -> Report:
    report = verify(run_of(*row, *overrides), steps=steps, pool=pool)
    assert report.passed, report.failure or report.first
    return report


@pytest.mark.parametrize("name", QUICK)
def test_some_combinations_at_once(name: str, pool: RankPool) -> None:
    prove(QUICK[name], pool, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", TWO)
def test_alone_on_two_ranks(name: str, pool: RankPool) -> None:
    prove(TWO[name], pool)


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_alone_on_four_ranks(name: str, pool: RankPool) -> None:
    prove(FOUR[name], pool)


@pytest.mark.slow
def test_tensor_ranks_beyond_the_key_heads(pool: RankPool) -> None:
    model = replace(MODELS["dense"], heads=4, dim=32)  # 4 query heads, 2 key heads, 4 ranks
    run = replace(run_of("dense", {"tensor": 4}), model=model)
    report = verify(run, steps=8, pool=pool)
    assert report.passed, report.failure or report.first


@pytest.mark.slow
@pytest.mark.parametrize("name", EIGHT)
def test_together_on_eight_ranks(name: str, large: RankPool) -> None:
    prove(EIGHT[name], large)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        ("memory.recompute=full",),
        ("memory.recompute=selective", "memory.recompute_every=2"),
        ("memory.loss_chunk=7",),
        ("memory.activations=cpu",),
        ("memory.offload=cpu",),
        ("memory.offload=nvme", "memory.offload_buffer=1"),
        ("optimizer.name=muon",),
        ("precision.reduce=bf16",),
        ("precision.optimizer=bf16",),
        ("precision.compute=bf16",),
        ("precision.compute=fp16",),
        ("precision.compute=fp8",),
        ("precision.compute=fp8", "precision.fp8_gather=true"),
        ("precision.compute=fp8", "precision.fp8_scaling=row"),
        ("precision.compute=fp8", "precision.bf16_first=1", "precision.bf16_last=1"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("layout", [{"shard": 2, "tensor": 2}, {"data": 2, "pipeline": 2}], ids=["sharded", "pipelined"])
def test_what_is_traded_for_memory_or_speed(overrides: tuple[str, ...], layout: dict[str, Any], pool: RankPool) -> None:
    prove(("dense", layout), pool, *overrides)


@pytest.mark.parametrize("layout", [{"data": 2, "shard": 2}, {"data": 2}], ids=["sharded", "alone"])
def test_replicas_that_meet_now_and_then(layout: dict[str, Any], pool: RankPool) -> None:
    run = run_of("moe", layout)
    run = replace(run, optimizer=replace(run.optimizer, sync_every=2))
    report = verify(run, steps=5, pool=pool)
    assert report.passed, report.failure or report.first


def test_experts_in_fp8(pool: RankPool) -> None:
    run = run_of("moe", {"shard": 2, "expert": 2})
    run = replace(run, precision=Precision(compute="fp8", fp8_experts=True, fp8_gather=True))
    report = verify(run, steps=3, pool=pool)
    assert report.passed, report.failure or report.first


def state_bytes(zero: int, ranks: int, compute: str, pool: RankPool, *more: str) -> None:
    model = replace(MODELS["dense"], dim=96, head_dim=16, ffn=192)
    # A few tokens: cores without bf16 take long for each, and the state hangs on none of them.
    overrides = (f"precision.compute={compute}", "train.sequence_length=16", *more)
    run = replace(run_of("dense", {"shard": ranks, "zero": zero}, *overrides), model=model)
    report = verify(run, steps=1, account=True, pool=pool)
    assert report.passed, report.failure or report.first
    assert report.theory is not None
    low = {1: 4 + 12 / ranks, 2: 2 + 14 / ranks, 3: 16 / ranks}
    full = {1: 8 + 8 / ranks, 2: 4 + 12 / ranks, 3: 16 / ranks}
    expected = (full if compute == "fp32" else low)[zero] * model.parameters()
    assert sum(report.theory.memory.values()) == pytest.approx(expected)
    for account in report.accounts:
        state = sum(size for kind, size in account.memory.items() if kind != "activations")
        assert state == pytest.approx(expected, rel=0.03)
        sent = sum(sum(names.values()) for use, names in account.sent.items() if use.startswith("shard"))
        assert sent == pytest.approx(report.theory.sent["shard"], rel=0.1)


@pytest.mark.parametrize(
    ("compute", "more"), [("bf16", ()), ("fp8", ("precision.fp8_gather=true",))], ids=["bf16", "gathered in fp8"]
)
def test_sharded_state_is_what_theory_says(compute: str, more: tuple[str, ...], pool: RankPool) -> None:
    state_bytes(3, 4, compute, pool, *more)


@pytest.mark.slow
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_sharded_state_falls_with_the_ranks(zero: int, ranks: int, compute: str, large: RankPool) -> None:
    state_bytes(zero, ranks, compute, large)


@pytest.mark.parametrize(
    ("model", "layout", "use"),
    [
        ("dense", {"tensor": 2}, "tensor"),
        ("dense", {"context": 2}, "context"),
        pytest.param("dense", {"context": 2, "context_method": "gather"}, "context", marks=pytest.mark.slow),
        pytest.param("dense", {"context": 2, "context_method": "ulysses"}, "context", marks=pytest.mark.slow),
        ("dense", {"pipeline": 2}, "pipeline"),
        ("moe", {"data": 2, "expert": 2}, "expert"),
    ],
    ids=["tensor", "ring", "gather", "ulysses", "pipeline", "expert"],
)
def test_messages_are_what_theory_says(model: str, layout: dict[str, Any], use: str, pool: RankPool) -> None:
    report = verify(run_of(model, layout), steps=1, account=True, pool=pool)
    assert report.theory is not None and report.accounts
    sent = [sum(account.sent[use].values()) for account in report.accounts]
    assert sum(sent) / len(sent) == pytest.approx(report.theory.sent[use], rel=0.15)
