"""The XLA engine computes what one process of the torch engine computes: every family, every kind of layout, on virtual devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from xla_engine import compare_without_a_backward, needs_xla

from phalanx.spec.engine import Engine
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec, Moe
from phalanx.spec.run import Data, Memory, Optimizer, Precision, Run, Train
from phalanx.verification import parity
from phalanx.verification.cases import MODELS, random_documents

pytestmark = needs_xla

QWEN = replace(MODELS["dense"], qk_norm=True, tied=True, head_dim=12)
DEEPSEEK = MODELS["mla"].moe
assert DEEPSEEK is not None
FAMILIES = MODELS | {
    "qwen3": QWEN,
    "mixtral": replace(MODELS["dense"], moe=Moe(experts=8, active=2, ffn=12)),
    "qwen3-moe": replace(QWEN, tied=False, moe=Moe(experts=8, active=2, ffn=12, normalize=True, balance_loss=0.01)),
    "deepseek": replace(MODELS["mla"], moe=replace(DEEPSEEK, shared=1)),
}
LAYOUTS = {
    "shard": Layout(data=1, shard=8),
    "grid": Layout(data=2, shard=2, tensor=2),
    "sequence": Layout(data=2, shard=2, tensor=2, sequence=True),
    "context": Layout(data=2, shard=2, context=2),
    "expert 2": Layout(data=2, shard=2, tensor=2, expert=2),
    "expert 4": Layout(data=2, shard=2, tensor=2, expert=4),
}
MATRIX = [(family, layout) for family in FAMILIES for layout in LAYOUTS if FAMILIES[family].moe or "expert" not in layout]
SETTINGS = {
    "ddp": ("dense", Layout(data=8), Memory()),
    "zero1, recomputed": ("dense", Layout(data=1, shard=8, zero=1), Memory(recompute="full")),
    "zero2": ("gpt", Layout(data=2, shard=4, zero=2), Memory()),
    "gather, every second block": (
        "window",
        Layout(data=2, shard=2, context=2, context_method="gather"),
        Memory(recompute="selective", recompute_every=2),
    ),
    "all, loss in chunks": ("mla-dense", Layout(data=1, shard=2, context=2, tensor=2, sequence=True), Memory(loss_chunk=7)),
    "experts, recomputed": ("moe", Layout(data=1, shard=8, expert=2), Memory(recompute="full")),
    "slices of experts": (
        "moe",
        Layout(data=1, shard=2, context=2, tensor=2, expert=2, expert_tensor=2, zero=2),
        Memory(loss_chunk=16),
    ),
}


@pytest.fixture(autouse=True)
def quick_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """What LLVM makes of small programs takes longer than to run them."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")


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
@pytest.mark.parametrize(("family", "layout"), MATRIX)
def test_families_on_layouts(family: str, layout: str) -> None:
    report = parity.verify(run_of(FAMILIES[family], LAYOUTS[layout]), steps=2)
    assert report.passed, report.to_json()


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(setting: str) -> None:
    family, layout, memory = SETTINGS[setting]
    report = parity.verify(run_of(FAMILIES[family], layout, memory), steps=3)
    assert report.passed, report.to_json()


@pytest.mark.slow
@pytest.mark.parametrize("model", [MODELS["dense"], MODELS["moe"]], ids=["dense", "moe"])
def test_muon(model: ModelSpec) -> None:
    run = replace(run_of(model, Layout(data=1, shard=2, tensor=2)), optimizer=Optimizer(name="muon"))
    report = parity.verify(run, steps=3)
    assert report.passed, report.to_json()


@pytest.mark.slow
def test_a_lost_backward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the balancing loss: the loss is right in the first step, and gradients of routers are not."""
    monkeypatch.setattr(parity, "compare_devices", compare_without_a_backward)
    model = replace(FAMILIES["qwen3-moe"], layers=1)
    report = parity.verify(run_of(model, Layout(data=1, shard=2)), steps=1)
    wrong = {check.name: check.tensor for check in report.checks if not check.passed}
    assert "router.weight" in wrong["gradients"], report.to_json()


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
@pytest.mark.parametrize(("family", "layout"), MATRIX)
@pytest.mark.parametrize("each", [4, 2])
def test_processes_on_layouts(family: str, layout: str, each: int) -> None:
    run = replace(run_of(FAMILIES[family], LAYOUTS[layout]), engine=Engine(name="xla", devices_per_process=each))
    report = parity.verify(run, steps=3)
    assert report.passed, report.to_json()
