"""LoRA on ranks equals LoRA in one process, through one pool: adapters are cut like the matrices they belong to, and what is frozen stays."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import tiny_run

from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import PRESETS, ModelSpec
from phalanx.spec.run import Lora, Memory, Optimizer, Precision
from phalanx.verification.cases import MODELS, make_case
from phalanx.verification.parity import Report, verify
from phalanx.verification.rank_pool import RankPool

EXPERTS = ("attention.*", "gate", "up", "down")
PLAIN = Lora(rank=4)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as made:
        yield made


def proof(pool: RankPool, model: str, layout: dict[str, Any], lora: Lora = PLAIN, **more: Any) -> Report:
    run = replace(tiny_run("train.sequence_length=48"), model=MODELS[model], layout=Layout(**({"data": 1} | layout)), lora=lora)
    return verify(replace(run, **more), steps=3, pool=pool)


def told(report: Report) -> str:
    return f"{report.failure} {[check for check in report.checks if not check.passed]}"


@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("model", ["dense", "gpt"])  # gpt has biases, which are added after the sum over tensor ranks
def test_tensor_and_shard(model: str, zero: int, pool: RankPool) -> None:
    report = proof(pool, model, {"tensor": 2, "shard": 2, "zero": zero})
    assert report.passed, told(report)


@pytest.mark.slow
def test_sequence_parallelism_and_gradients_in_shards(pool: RankPool) -> None:
    report = proof(pool, "dense", {"tensor": 2, "shard": 2, "zero": 2, "sequence": True}, Lora(rank=4, alpha=3.0))
    assert report.passed, told(report)


@pytest.mark.parametrize("targets", [(), ("blocks.4.*",)], ids=["all stages", "last stage"])
def test_pipeline_stages_with_and_without_adapters(targets: tuple[str, ...], pool: RankPool) -> None:
    report = proof(pool, "dense", {"pipeline": 2, "shard": 2}, Lora(rank=3, targets=targets))
    assert report.passed, told(report)


@pytest.mark.slow
def test_split_backwards(pool: RankPool) -> None:
    report = proof(pool, "gpt", {"pipeline": 2, "tensor": 2, "schedule": "zbv"}, Lora(rank=3))
    assert report.passed, told(report)


@pytest.mark.slow
@pytest.mark.parametrize("expert", [{"expert": 2}, {"expert_tensor": 2}, {"expert": 2, "expert_tensor": 2}], ids=str)
def test_adapters_of_experts(expert: dict[str, int], pool: RankPool) -> None:
    memory = Memory(recompute="selective")
    report = proof(pool, "moe", {"tensor": 2, "shard": 2} | expert, Lora(rank=4, targets=EXPERTS), memory=memory)
    assert report.passed, told(report)


def test_a_quantized_base_and_dropout(pool: RankPool) -> None:
    """Rows and columns that no block of 64 divides have the same numbers, and ranks that share an input the same masks."""
    report = proof(pool, "gpt", {"tensor": 2, "shard": 2, "zero": 3}, Lora(rank=4, base="nf4", dropout=0.2))
    assert report.passed, told(report)


QUANTIZED = {
    "int8": ("gpt", {"tensor": 2, "shard": 2, "zero": 3}, {"base": "int8"}, {}),
    "bf16": ("gpt", {"tensor": 2, "shard": 2, "zero": 3}, {"base": "nf4"}, {"precision": Precision(compute="bf16")}),
    "fp16": ("dense", {"shard": 4, "zero": 3}, {"base": "nf4"}, {"precision": Precision(compute="fp16")}),
    "zero-1": ("dense", {"shard": 4, "zero": 1}, {"base": "nf4"}, {}),
    "sequence": ("dense", {"tensor": 2, "shard": 2, "zero": 2, "sequence": True}, {"base": "int8", "dropout": 0.2}, {}),
    "pipeline": ("dense", {"pipeline": 2, "shard": 2}, {"base": "nf4", "dropout": 0.2}, {"memory": Memory(recompute="full")}),
    "split backwards": ("gpt", {"pipeline": 2, "tensor": 2, "schedule": "zbv"}, {"base": "nf4", "dropout": 0.2}, {}),
    "context": ("mla-dense", {"tensor": 2, "context": 2}, {"base": "nf4", "dropout": 0.2}, {}),
    "offloaded activations": ("dense", {"tensor": 2, "shard": 2}, {"base": "nf4"}, {"memory": Memory(activations="cpu")}),
    "experts": ("moe", {"tensor": 2, "shard": 2, "expert": 2}, {"base": "nf4", "targets": EXPERTS}, {}),
    "sliced experts": ("moe", {"tensor": 2, "shard": 2, "expert": 2, "expert_tensor": 2}, {"base": "int8", "targets": EXPERTS}, {}),
    "frozen experts": ("moe", {"tensor": 2, "data": 2, "expert": 2}, {"base": "int8", "dropout": 0.2}, {"memory": Memory(recompute="selective")}),
    "diloco": ("dense", {"data": 2}, {"base": "nf4", "dropout": 0.2}, {"optimizer": Optimizer(sync_every=2)}),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_bases_and_dropout_on_other_layouts(name: str, pool: RankPool) -> None:
    model, layout, lora, more = QUANTIZED[name]
    report = proof(pool, model, layout, Lora(rank=4, **lora), **more)
    assert report.passed, told(report)


@pytest.mark.slow
def test_latent_attention_and_context(pool: RankPool) -> None:
    report = proof(pool, "mla-dense", {"tensor": 2, "context": 2})
    assert report.passed, told(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        {"optimizer": Optimizer(name="muon")},
        {"optimizer": Optimizer(sync_every=2)},
        {"memory": Memory(offload="cpu")},
        {"precision": Precision(compute="bf16")},
    ],
    ids=["muon", "diloco", "offload", "bf16"],
)
def test_other_techniques(more: dict[str, Any], pool: RankPool) -> None:
    layout = {"data": 2} if "optimizer" in more and more["optimizer"].sync_every > 1 else {"tensor": 2, "shard": 2}
    report = proof(pool, "dense", layout, **more)
    assert report.passed, told(report)


def test_experts_on_other_ranks(pool: RankPool) -> None:
    report = proof(pool, "moe", {"data": 2, "expert": 2}, Lora(rank=4, targets=("query", "experts.*")))
    assert report.passed, told(report)


@pytest.mark.slow
def test_a_custom_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its linear layers are found by their class, and its table of dimensions says how adapters are cut."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "examples"))
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2] / 'examples'}:{os.environ.get('PYTHONPATH', '')}")
    model = ModelSpec(module="own_model:Recurrent", dim=24, layers=2, vocab=257, context=48)
    run = replace(tiny_run("train.sequence_length=24"), model=model, layout=Layout(data=1, shard=2), lora=Lora(rank=3))
    with RankPool(2) as pool:  # forked now, with the path of the module
        report = verify(run, steps=2, pool=pool)
    assert report.passed, told(report)
    with pytest.raises(RunError, match=r'"query" is no linear layer of the model; its layers are blocks.0.into, blocks.0.out'):
        make_case(replace(run, lora=Lora(rank=3, targets=("query",))))


def test_a_smaller_model_gets_smaller_adapters() -> None:
    """`verify` replaces a large model by a small one of its family: rank and targets follow."""
    lora = Lora(rank=256, alpha=128.0, targets=("blocks.20.*", "query"))
    run = replace(tiny_run("layout.data=2"), model=replace(PRESETS["qwen3-0.6b"], vocab=257), lora=lora)
    case = make_case(run)
    assert case.run.lora.rank is not None and case.run.lora.rank < 256 and case.run.lora.scale == 0.5
    assert case.run.lora.targets == ("query",)
    assert any("lora.rank" in note for note in case.notes) and any("targets" in note for note in case.notes)
