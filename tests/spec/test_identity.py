"""Runs that compute the same have the same identity, however they are written down."""

import pytest

from phalanx.spec.dump import changed, identity
from phalanx.spec.load import loads
from phalanx.spec.run import Run

BASE = ("train.batch=8", "train.steps=10", "train.sequence_length=64")


def run(*overrides: str) -> Run:
    return loads("", overrides=[*BASE, *overrides])


def test_keys_are_dotted_and_decide_what_is_computed() -> None:
    keys = identity(run())
    assert {key.split(".")[0] for key in keys} == {"model", "data", "train", "optimizer", "lora", "dpo", "precision"}
    assert {key for key in keys if key.startswith("train.")} == {
        "train.batch",
        "train.sequence_length",
        "train.seed",
        "train.clip",
        "train.objective",
    }
    assert "data.prefetch" not in keys
    assert keys["model.dim"] == 256


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("train.seed=1", "train.seed: 0 → 1"),
        ("train.batch=4", "train.batch: 8 → 4"),
        ("model.vocab=300", "model.vocab: 257 → 300"),
        ("optimizer.name=muon", 'optimizer.name: "adamw" → "muon"'),
        ("data.epochs=2", "data.epochs: unset → 2.0"),
        ("precision.compute=bf16", 'precision.compute: unset → "bf16"'),
        ("data.shuffle=false", "data.shuffle: true → false"),
    ],
)
def test_changed(override: str, line: str) -> None:
    assert changed(run(), run(override)) == [line]


def test_other_text_is_told_with_its_kind() -> None:
    assert changed(run(), run("data.paths=a.txt")) == ['data.source: "stdlib" → "text"', 'data.paths: [] → ["a.txt"]']


def test_everything_that_changed_is_told() -> None:
    assert changed(run(), run("train.seed=1", "model.rope_scaling.factor=8")) == [
        "model.rope_scaling.factor: unset → 8.0",
        "train.seed: 0 → 1",
    ]


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=20",
        "train.micro_batch=2",
        "train.eval_every=5",
        "train.sample_every=5",
        "train.eval_sequences=5",
        "data.prefetch=7",
        "data.cache=elsewhere",
        "data.processes=3",
        "data.max_bad_records=0",
        "data.source=stdlib",  # what leaving it out means where there are no paths
        "layout.data=2",
        "cluster.device=cpu",
        "checkpoint.every=3",
        "resilience.timeout=5",
        "watch.log_every=5",
        "model.kv_heads=4",  # as many as heads: what leaving it out means
        "model.head_dim=64",
        "model.ffn=704",
    ],
)
def test_what_decides_nothing(override: str) -> None:
    assert changed(run(), run(override)) == []


def test_two_ways_to_give_the_batch() -> None:
    by_tokens = loads("", overrides=["train.batch_tokens=512", "train.tokens=5120", "train.sequence_length=64"])
    assert identity(by_tokens) == identity(run())
    assert changed(by_tokens, run("train.batch=16")) == ["train.batch: 8 → 16"]


def test_a_preset_is_only_a_name() -> None:
    sizes = ("model.dim=64", "model.layers=2", "model.heads=4", "model.kv_heads=2", "model.context=1024")
    assert changed(run("model=tiny-dense"), run(*sizes)) == []


def test_experts_and_latent_attention_count() -> None:
    experts = ("model.moe.experts=8", "model.moe.active=2", "model.moe.ffn=64")
    assert changed(run(), run(*experts)) == [
        "model.moe.experts: unset → 8",
        "model.moe.active: unset → 2",
        "model.moe.ffn: unset → 64",
    ]
    assert changed(run(*experts), run(*experts, "model.moe.bias_rate=0.1")) == ["model.moe.bias_rate: 0.0 → 0.1"]
    assert changed(run("model.mla.kv_rank=8"), run("model.mla.kv_rank=9")) == ["model.mla.kv_rank: 8 → 9"]


def test_options_of_a_module_count() -> None:
    module = "model.module=a.b:C"
    before, after = run(module, "model.options.x=1", "model.options.y=1"), run(module, "model.options.y=2")
    assert changed(before, after) == ["model.options.x: 1 → unset", "model.options.y: 1 → 2"]


def test_a_mixture_counts_with_its_order() -> None:
    a, b = ("data.mix.a.paths=a.txt", "data.mix.a.weight=1"), ("data.mix.b.source=stdlib", "data.mix.b.weight=2")
    assert changed(run(*a, *b), run(*a, *b)) == []
    assert changed(run(*a, *b), run(*b, *a)) == ['data.mix: ["a", "b"] → ["b", "a"]']
    assert changed(run(*a, *b), run(*a, *b, "data.mix.a.weight=3")) == ["data.mix.a.weight: 1.0 → 3.0"]
    assert changed(run(), run(*b)) == [
        'data.source: "stdlib" → unset',
        'data.mix.b.source: unset → "stdlib"',
        "data.mix.b.weight: unset → 2.0",
        'data.mix: unset → ["b"]',
    ]
