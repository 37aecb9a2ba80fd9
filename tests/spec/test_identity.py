"""Runs that compute the same have the same identity, however they are written down."""

import pytest

from phalanx.spec.identity import changed, identity
from phalanx.spec.load import loads
from phalanx.spec.run import Run

BASE = ("train.batch=8", "train.steps=10", "train.sequence_length=64")


def run(*overrides: str) -> Run:
    return loads("", overrides=[*BASE, *overrides])


def test_keys_are_dotted_and_decide_what_is_computed() -> None:
    keys = identity(run())
    assert {key.split(".")[0] for key in keys} == {"model", "data", "train", "optimizer", "precision"}
    assert {key for key in keys if key.startswith("train.")} == {
        "train.batch",
        "train.sequence_length",
        "train.seed",
        "train.clip",
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
        ("data.paths=a.txt", 'data.paths: [] → ["a.txt"]'),
        ("precision.compute=bf16", 'precision.compute: unset → "bf16"'),
        ("data.shuffle=false", "data.shuffle: true → false"),
    ],
)
def test_changed(override: str, line: str) -> None:
    assert changed(run(), run(override)) == [line]


def test_everything_that_changed_is_told() -> None:
    assert changed(run(), run("train.seed=1", "model.rope_scaling.factor=8")) == [
        "model.rope_scaling.factor: unset → 8.0",
        "model.rope_scaling.low_freq_factor: unset → 1.0",
        "model.rope_scaling.high_freq_factor: unset → 4.0",
        "model.rope_scaling.original_context: unset → 8192",
        "train.seed: 0 → 1",
    ]


@pytest.mark.parametrize(
    "override",
    [
        "train.steps=20",
        "train.micro_batch=2",
        "train.eval_every=5",
        "train.eval_sequences=5",
        "data.prefetch=7",
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
