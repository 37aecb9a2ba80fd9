"""The settings of single families on every kind of layout: each equals one device, in fp32 bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from ranks import tiny_run

from phalanx.spec.layout import Layout
from phalanx.spec.model import PRESETS
from phalanx.verification.parity import verify
from phalanx.verification.rank_pool import RankPool

LAYOUTS = {
    "tensor": Layout(data=1, tensor=2),
    "pipeline": Layout(data=1, pipeline=2),
    "ring": Layout(data=1, context=2),
    "ulysses": Layout(data=1, context=2, context_method="ulysses"),
    "zero-3": Layout(data=1, shard=2, zero=3),
    "data, tensor, sequence": Layout(data=2, tensor=2, sequence=True),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as made:
        yield made


MODELS = {
    "window": PRESETS["tiny-window"],
    "phi3": replace(PRESETS["tiny-dense"], rope_fraction=0.75, window=16, export_as="phi3"),
    "gemma2": PRESETS["tiny-gemma2"],
    "gemma3": PRESETS["tiny-gemma3"],
    "qwen2": replace(PRESETS["tiny-dense"], qkv_bias=True, tied=True, window=16, window_from=1),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", MODELS)
def test_every_layout_equals_one_device(family: str, layout: str, pool: RankPool) -> None:
    run = tiny_run("train.sequence_length=48", "train.batch=4", "train.micro_batch=1")
    model = replace(MODELS[family], vocab=run.model.vocab, init_std=0.1)
    report = verify(replace(run, model=model, layout=LAYOUTS[layout]), steps=2, pool=pool)
    assert report.passed, f"{report.failure} {[check for check in report.checks if not check.passed]}"
    assert report.case.run.model == model, "it is verified as it is"
    assert report.case.coarsest == "fp32"


@pytest.mark.parametrize("overrides", [("memory.loss_chunk=7",), ("memory.recompute=selective",), ("memory.recompute=full",)])
def test_capped_logits_and_scores_cost_less_memory_and_stay_the_same(overrides: tuple[str, ...], pool: RankPool) -> None:
    run = tiny_run("train.sequence_length=48", "train.batch=4", "train.micro_batch=1", "layout.tensor=2", *overrides)
    model = replace(MODELS["gemma2"], vocab=run.model.vocab, init_std=0.1)
    report = verify(replace(run, model=model), steps=2, pool=pool)
    assert report.passed, f"{report.failure} {[check for check in report.checks if not check.passed]}"
