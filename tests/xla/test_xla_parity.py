"""The XLA engine computes what one process of the torch engine computes: every family, every kind of layout, on virtual devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from xla_engine import needs_xla

from phalanx.spec.engine import Engine
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Data, Memory, Precision, Run, Train
from phalanx.verification import parity
from phalanx.verification.cases import MODELS, random_documents

pytestmark = needs_xla

QWEN = replace(MODELS["dense"], qk_norm=True, tied=True, head_dim=12)
FAMILIES = MODELS | {"qwen3": QWEN}
LAYOUTS = {
    "ddp": Layout(data=8),
    "zero1": Layout(data=1, shard=8, zero=1),
    "zero2": Layout(data=2, shard=4, zero=2),
    "zero3": Layout(data=1, shard=8),
    "grid": Layout(data=2, shard=2, tensor=2),
    "sequence": Layout(data=2, shard=2, tensor=2, sequence=True),
    "context": Layout(data=2, shard=2, context=2, context_method="gather"),
    "all": Layout(data=1, shard=2, context=2, tensor=2, context_method="gather", sequence=True),
}
CASES = [
    ("dense", "ddp", Memory()),
    ("dense", "zero1", Memory(recompute="full")),
    ("gpt", "zero2", Memory()),
    ("gpt", "sequence", Memory()),
    ("qwen3", "grid", Memory()),
    ("qwen3", "zero3", Memory()),
    ("window", "context", Memory(recompute="selective", recompute_every=2)),
    ("mla-dense", "all", Memory()),
    ("mla", "grid", Memory()),
    ("moe", "context", Memory()),
    ("moe", "zero3", Memory()),
]


def run_of(model: ModelSpec, layout: Layout, memory: Memory | None = None) -> Run:
    return Run(
        model=model,
        layout=layout,
        memory=memory or Memory(),
        engine=Engine(name="xla"),
        train=Train(batch=16, sequence_length=48, steps=3, micro_batch=1),
        data=Data(source="memory", documents=random_documents(0), eval_fraction=0.0),
    )


def test_a_small_decoder_on_four_devices() -> None:
    model = ModelSpec(dim=24, layers=1, heads=3, kv_heads=1, ffn=20, vocab=257, context=48, init_std=0.1)
    report = parity.verify(run_of(model, Layout(data=1, shard=2, context=2, context_method="gather")), steps=2)
    assert report.passed, report.to_json()
    assert {check.name: check.accepted for check in report.checks}["gradients"] == 1e-4


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "memory"), CASES, ids=[f"{family}-{layout}" for family, layout, _ in CASES])
def test_families_on_layouts(family: str, layout: str, memory: Memory) -> None:
    report = parity.verify(run_of(FAMILIES[family], LAYOUTS[layout], memory), steps=3)
    assert report.passed, report.to_json()


@pytest.mark.slow
def test_bf16_is_as_near_as_on_torch() -> None:
    run = run_of(MODELS["dense"], LAYOUTS["grid"])
    report = parity.verify(replace(run, precision=Precision(compute="bf16")), steps=3)
    assert report.passed, report.to_json()


def test_two_processes_hold_their_own_boxes_and_compute_the_same() -> None:
    """Each of them has two devices of four."""
    model = ModelSpec(dim=24, layers=1, heads=4, kv_heads=2, ffn=20, vocab=257, context=48, init_std=0.1)
    run = replace(run_of(model, Layout(data=1, shard=2, tensor=2)), engine=Engine(name="xla", devices_per_process=2))
    report = parity.verify(run, steps=2)
    assert report.passed, report.to_json()
    # Devices of a tensor group are in one process. The vocabulary is odd: both devices hold the same half of each of its two tables.
    matrices, tables, norms = 24 * (24 + 12 + 12 + 24) + 3 * 24 * 20, 2 * 257 * 24, 3 * 24
    held = 12 * (matrices // 2 + tables + norms)  # with two moments
    assert next(check.tensor for check in report.checks if check.name == "placement").startswith(
        f"process 0 holds {held:,} bytes"
    )


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["zero1", "zero3", "grid", "context"])
@pytest.mark.parametrize("each", [4, 2])
def test_processes_on_layouts(layout: str, each: int) -> None:
    run = replace(run_of(MODELS["dense"], LAYOUTS[layout]), engine=Engine(name="xla", devices_per_process=each))
    report = parity.verify(run, steps=3)
    assert report.passed, report.to_json()
