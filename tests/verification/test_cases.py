"""Small models keep their family's traits and suit the layout; layouts shrink only where ranks are missing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from ranks import tiny_run

from phalanx.models.init import build
from phalanx.spec.check import check
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.model import PRESETS, Moe
from phalanx.spec.run import Run, Train
from phalanx.verification.cases import TINY, fit_layout, make_case, shrink

BIG = [name for name, spec in PRESETS.items() if spec.vocab is not None]
LAYOUTS = {
    "tensor": Layout(tensor=2, sequence=True),
    "four": Layout(tensor=4),
    "ulysses": Layout(tensor=2, context=2, context_method="ulysses"),
    "ring": Layout(data=2, context=2),
    "zbv": Layout(pipeline=2, schedule="zbv", shard=2),
    "gpipe": Layout(pipeline=4, schedule="gpipe"),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=list(LAYOUTS))
@pytest.mark.parametrize("name", BIG)
def test_every_family_has_a_small_model_that_every_layout_takes(name: str, layout: Layout) -> None:
    spec = PRESETS[name]
    small = shrink(spec, layout, 24)
    run = Run(model=small, layout=layout, train=Train(batch=16, micro_batch=2, sequence_length=24 * layout.tensor, steps=2))
    run = replace(run, model=replace(small, context=96))
    assert check(run) == []
    assert small.parameters() < 200_000
    assert sum(p.numel() for p in build(small).parameters()) == small.parameters()
    for trait in ("norm", "activation", "positions", "qk_norm", "bias", "tied"):
        assert getattr(small, trait) == getattr(spec, trait)
    assert (small.kv < small.heads) == (spec.kv < spec.heads)
    assert (small.mla is None) == (spec.mla is None)
    assert (small.rope_scaling is None) == (spec.rope_scaling is None)
    assert (small.vocab == 257 and small.layers % layout.pipeline != 0) or layout.pipeline == 1


def test_experts_keep_their_router() -> None:
    spec = PRESETS["deepseek-v3"]
    small = shrink(spec, Layout(data=4, expert=4), 24)
    assert spec.moe is not None and small.moe is not None
    for trait in ("router", "normalize", "scale", "bias_rate", "balance_loss"):
        assert getattr(small.moe, trait) == getattr(spec.moe, trait)
    assert small.moe.experts % 4 == 0 and small.moe.groups > 1 and small.moe.shared == 1 and small.moe.dense_layers == 1
    assert small.mla is not None and small.mla.q_rank is not None


def test_wide_attention_stays_wide() -> None:
    spec = PRESETS["qwen3-0.6b"]  # its heads together are wider than the residual stream
    small = shrink(spec, Layout(tensor=2), 24)
    assert spec.heads * spec.head > spec.dim and small.heads * small.head > small.dim


@pytest.mark.parametrize(
    ("given", "most", "degrees", "words"),
    [
        (Layout(data=2, tensor=2), 8, {"data": 2, "tensor": 2}, ""),
        (Layout(data=64, tensor=8), 8, {"data": 2, "tensor": 4}, "data 64 → 2, layout.tensor 8 → 4"),
        (Layout(pipeline=4, data=4, tensor=4), 8, {"pipeline": 2, "data": 2, "tensor": 2}, "at most 8"),
        (Layout(data=3, shard=3), 8, {"data": 2, "shard": 3}, "data 3 → 2"),
        (Layout(pipeline=2, data=2, shard=2, context=2, tensor=2), 8, {"data": 1, "shard": 1, "pipeline": 2}, "data 2 → 1"),
        (Layout(data=8, shard=8, expert=32, expert_tensor=2), 8, {"data": 2, "shard": 4, "expert": 4}, "expert 32 → 4"),
    ],
)
def test_layouts_shrink_to_the_ranks_and_say_so(given: Layout, most: int, degrees: dict[str, int], words: str) -> None:
    fitted, said = fit_layout(given, most)
    assert fitted.ranks <= most
    assert {name: getattr(fitted, name) for name in degrees} == degrees
    assert fitted.ranks // fitted.pipeline % (fitted.expert * fitted.expert_tensor) == 0
    assert words in " ".join(said) and bool(said) == bool(words)


def test_what_belongs_to_a_degree_goes_with_it() -> None:
    given = Layout(pipeline=2, data=2, shard=2, context=2, tensor=2, zero=1, sequence=True, schedule="zbv")
    assert fit_layout(given, 4)[0] == Layout(pipeline=2, data=1, tensor=2, sequence=True, schedule="zbv")
    assert fit_layout(given, 2)[0] == Layout(pipeline=2, data=1, schedule="zbv")


def test_a_tiny_run_is_taken_as_it_is_but_for_the_optimizer() -> None:
    run = tiny_run("layout.data=2")
    case = make_case(run, steps=3)
    assert run.model.parameters() < TINY
    assert case.run.model == run.model
    assert (case.run.batch, case.run.train.sequence_length) == (8, 24)
    assert case.run.data.documents == run.data.documents and case.run.data.document_mask
    assert case.run.optimizer.eps == 1e-4 and any("optimizer.eps" in sentence for sentence in case.notes)
    assert case.run.steps == 3
    assert case.reference.layout.ranks == 1 and case.reference_plan.accumulation == 2 * case.plan.accumulation


@pytest.mark.parametrize(("batch", "times"), [(2, 1), (6, 3), (10, 5)])
def test_a_small_batch_is_proven_as_it_is_whatever_its_micro_batches(batch: int, times: int) -> None:
    case = make_case(tiny_run("layout.data=2", "train.micro_batch=1", f"train.batch={batch}", "train.sequence_length=21"))
    assert (case.run.batch, case.run.train.sequence_length, case.plan.accumulation) == (batch, 21, times)
    assert not any("Batches" in sentence for sentence in case.notes)


@pytest.mark.parametrize("override", ["precision.compute=bf16", "precision.reduce=bf16", "precision.optimizer=bf16"])
def test_coarse_numbers_get_a_coarser_eps(override: str) -> None:
    case = make_case(tiny_run("layout.data=2", override))
    assert case.run.optimizer.eps == 1e-2 and any("0.01 instead of" in sentence for sentence in case.notes)


@pytest.mark.parametrize(
    ("overrides", "iterations"),
    [((), "fp32"), (("precision.compute=bf16",), "bf16"), (("precision.reduce=bf16",), "bf16")],
)
def test_muon_iterates_in_fp32_where_everything_else_is(overrides: tuple[str, ...], iterations: str) -> None:
    case = make_case(tiny_run("layout.data=2", "optimizer.name=muon", *overrides))
    assert case.run.precision.newton_schulz == case.reference.precision.newton_schulz == iterations
    assert any("precision.newton_schulz" in sentence for sentence in case.notes) == (iterations == "fp32")
    adamw = make_case(tiny_run("layout.data=2", *overrides))
    assert not any("newton_schulz" in sentence for sentence in adamw.notes)


@pytest.mark.parametrize(
    ("overrides", "experts", "coarsest"),
    [
        ((), True, "fp32"),
        (("optimizer.name=muon",), False, "fp32"),
        (("optimizer.name=muon",), True, "fp32"),
        (("optimizer.name=muon", "precision.optimizer=bf16"), False, "bf16"),
        (("precision.compute=fp8",), False, "fp8"),
        (("precision.compute=fp8",), True, "experts"),
        (("precision.reduce=bf16",), True, "experts"),
    ],
)
def test_coarse_numbers_may_send_tokens_to_other_experts(overrides: tuple[str, ...], experts: bool, coarsest: str) -> None:
    run = tiny_run("layout.data=2", *overrides)
    run = replace(run, model=replace(run.model, moe=Moe(experts=4, active=2, ffn=8))) if experts else run
    assert make_case(run).coarsest == coarsest


def test_a_large_run_becomes_small_and_says_so() -> None:
    run = loads(
        'model = "llama3-70b"\nlayout = {data = 16, tensor = 8}\ntrain = {batch = 512, steps = 9, sequence_length = 4096}'
    )
    case = make_case(run)
    words = " ".join(case.notes)
    assert case.layout.ranks == 8 and case.layout.tensor == 4 and case.layout.data == 2
    assert case.run.model.parameters() < 200_000
    assert "replaces the 70,553,706,496" in words and "tensor 8 → 4" in words
    assert case.reference.memory == type(run.memory)()


def test_a_layout_without_replicas_given_gets_some() -> None:
    assert make_case(tiny_run()).layout.data == 2
    assert make_case(tiny_run(), ranks=4).layout.data == 4
    assert make_case(tiny_run("layout.tensor=2")).layout.data == 1


def test_text_that_is_not_at_hand_is_replaced() -> None:
    case = make_case(tiny_run('data.source="hf"', 'data.paths=["name/of-a-dataset"]', "data.documents=[]"))
    assert case.run.data.source == "memory" and len(case.run.data.documents) > 100
    assert any("random documents" in sentence for sentence in case.notes)
