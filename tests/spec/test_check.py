"""Problems between keys: one table of conflicts with the sentence's value, limit and remedy, and the places they are told at."""

import re
from dataclasses import replace

import pytest

from phalanx.spec.check import check, findings
from phalanx.spec.errors import RunError
from phalanx.spec.keys import KEYS
from phalanx.spec.layout import Layout
from phalanx.spec.load import loads
from phalanx.spec.model import ModelSpec, RopeScaling
from phalanx.spec.run import Data, Optimizer, Run, Train

BASE = Run(train=Train(batch=8, steps=10, sequence_length=64))


def train(**keys: object) -> Run:
    return replace(BASE, train=Train(**({"batch": 8, "steps": 10, "sequence_length": 64} | keys)))


def model(**keys: object) -> Run:
    return replace(BASE, model=ModelSpec(**keys))


def layout(run: Run = BASE, **keys: int) -> Run:
    return replace(run, layout=Layout(**keys))


def optimizer(**keys: object) -> Run:
    return replace(BASE, optimizer=Optimizer(**keys))


CONFLICTS = {
    "no batch": (train(batch=None), ["neither train.batch nor train.batch_tokens", "train.batch = 8"]),
    "two batches": (train(batch_tokens=64), ["train.batch = 8 and train.batch_tokens = 64", "remove one"]),
    "broken sequence": (
        train(batch=None, batch_tokens=100),
        ["train.batch_tokens = 100", "train.sequence_length = 64", "take 64 or 128"],
    ),
    "part of a sequence": (train(batch=None, batch_tokens=10), ["train.batch_tokens = 10", "take 64."]),
    "no duration": (train(steps=None), ["neither train.steps nor train.tokens", "train.steps = 1000"]),
    "two durations": (train(tokens=512), ["train.steps = 10 and train.tokens = 512", "remove one"]),
    "replicas": (
        layout(train(batch=30), data=8),
        ["train.batch = 30", "8 replicas", "set train.batch to 24 or 32", "layout.data to 6 or 10"],
    ),
    "replicas by tokens": (
        layout(train(batch=None, batch_tokens=30 * 64), data=8),
        ["train.batch_tokens = 1920 (30 sequences)", "set train.batch_tokens to 1536 or 2048"],
    ),
    "more replicas than sequences": (layout(data=9), ["train.batch = 8", "set train.batch to 9, or layout.data to 8."]),
    "absurd batch": (layout(train(batch=2**61 - 1), data=8), ["8 replicas", "or layout.data to 1 or 2305843009213693951"]),
    "micro-batch": (train(micro_batch=3), ["train.micro_batch = 3", "8 sequences", "1, 2, 4 or 8"]),
    "micro-batch of a replica": (
        layout(train(micro_batch=8), data=2),
        ["train.micro_batch = 8", "4 sequences that each replica", "1, 2 or 4"],
    ),
    "micro-batch of many": (
        train(batch=5040, micro_batch=11),
        ["train.micro_batch = 11", "set it to 10 or 12, or leave it out"],
    ),
    "key heads": (model(heads=8, kv_heads=3), ["model.kv_heads = 3", "model.heads = 8", "2 or 4"]),
    "heads": (model(dim=100, heads=8), ["model.heads = 8", "model.dim = 100", "5 or 10", "model.head_dim"]),
    "odd head": (model(head_dim=33), ["model.head_dim = 33 is odd", "take 32 or 34"]),
    "odd derived head": (model(dim=60, heads=4), ["model.dim / model.heads = 15 is odd", "take 14 or 16"]),
    "learned positions": (
        model(positions="learned", context=32),
        ["train.sequence_length = 64", "model.context = 32", "at most 32", "enlarge model.context"],
    ),
    "scaling of learned positions": (
        model(positions="learned", rope_scaling=RopeScaling(factor=8.0)),
        ["model.rope_scaling", 'model.positions = "learned"', 'set model.positions to "rope"'],
    ),
    "scaling upside down": (
        model(rope_scaling=RopeScaling(factor=8.0, low_freq_factor=4.0)),
        ["low_freq_factor = 4.0", "high_freq_factor = 4.0", "lower the one or raise the other"],
    ),
    "vocabulary": (model(vocab=256), ["model.vocab = 256", "257 tokens", "at least 257"]),
    "decay": (
        optimizer(schedule="wsd", warmup_steps=4, decay_steps=7),
        ["optimizer.warmup_steps + optimizer.decay_steps = 11", "10 steps", "at most 6"],
    ),
    "decay of another schedule": (
        optimizer(decay_steps=2),
        ["optimizer.decay_steps = 2", 'the schedule is "cosine"', 'set optimizer.schedule to "wsd"'],
    ),
    "evaluation of nothing": (
        replace(train(eval_every=5), data=Data(eval_fraction=0.0)),
        ["train.eval_every = 5", "data.eval_fraction = 0", "data.eval_fraction = 0.01"],
    ),
    "tensor and heads": (layout(tensor=3), ["layout.tensor = 3", "model.heads = 4", "2 or 4"]),
    "tensor and key heads": (layout(model(kv_heads=2), tensor=4), ["layout.tensor = 4", "model.kv_heads = 2", "set it to 2"]),
    "pipeline": (layout(pipeline=5), ["layout.pipeline = 5", "model.layers = 4", "at most 4"]),
    "context": (layout(context=3), ["train.sequence_length = 64", "2 × layout.context = 6", "60 or 66"]),
}


@pytest.mark.parametrize(("run", "parts"), CONFLICTS.values(), ids=CONFLICTS)
def test_conflict(run: Run, parts: list[str]) -> None:
    (finding,) = findings(run)
    for part in parts:
        assert part in finding.sentence
    assert finding.sentence.endswith(".")
    assert not re.search(r"[.?!] +[A-Z]", finding.sentence)
    assert set(finding.keys) <= set(KEYS)
    assert finding.sentence in check(run)


@pytest.mark.parametrize(
    "run",
    [
        BASE,
        train(batch=None, batch_tokens=512),
        train(steps=None, tokens=1),
        layout(data=4),
        layout(train(micro_batch=2), data=4),
        model(heads=8, kv_heads=2),
        model(dim=100, heads=8, head_dim=32),
        model(dim=60, heads=4, positions="learned"),
        model(positions="learned", context=64),
        model(vocab=257),
        optimizer(warmup_steps=9),
        optimizer(warmup_steps=100),
        optimizer(schedule="wsd", warmup_steps=4, decay_steps=6),
        optimizer(schedule="wsd"),
        replace(BASE, data=Data(eval_fraction=0.0)),
    ],
)
def test_legal(run: Run) -> None:
    assert check(run) == []


def test_check_finds_everything_at_once() -> None:
    run = replace(BASE, train=Train(), model=ModelSpec(vocab=3, heads=3))
    assert len(check(run)) == 4


def test_check_reads_values_of_runs_made_in_python() -> None:
    run = Run(
        model=ModelSpec(heads=0), train=Train(batch=8, steps="ten"), optimizer=Optimizer(name="sgd"), layout=Layout(tensor=2)
    )  # type: ignore[arg-type]
    heads, steps, name, tensor = check(run)
    assert heads == "model.heads = 0 is out of range: it must be at least 1."
    assert steps.startswith('train.steps = "ten" is a string')
    assert name.startswith('optimizer.name = "sgd" is unknown')
    assert tensor.startswith("layout.tensor = 2 asks for tensor parallelism")
    (missing,) = check(replace(BASE, train=replace(BASE.train, seed=None)))  # type: ignore[arg-type]
    assert missing.startswith("train.seed = None is a Python NoneType")


def places(text: str, *overrides: str) -> list[str]:
    with pytest.raises(RunError) as caught:
        loads(text, name="run.toml", overrides=overrides)
    return [problem.partition(": ")[0] for problem in caught.value.problems]


def test_a_conflict_is_told_at_its_likeliest_key() -> None:
    text = "[train]\nsteps = 5\nbatch = 8\nmicro_batch = 3\n[optimizer]\nschedule = 'wsd'\nwarmup_steps = 3\ndecay_steps = 3\n"
    assert places(text) == ["run.toml:4", "run.toml:8"]
    assert places(text, "train.micro_batch=8", "train.steps=4") == ["command line"]


def test_a_missing_key_is_told_at_its_table() -> None:
    assert places("\n[train]\nbatch = 8\n") == ["run.toml:2"]
    assert places("train.batch = 8\n") == ["run.toml:1"]
    assert places("") == ["run.toml", "run.toml"]


def test_what_rests_on_another_mistake_is_not_told() -> None:
    assert places("[train]\nbatch = 8\nsteps = 'x'\n") == ["run.toml:3"]
    assert places("[trian]\nbatch = 8\nsteps = 9\n") == ["run.toml:1"]
    assert places("[train]\nbatch = 8\nsteps = 5\n[model]\nheads = 'x'\ndim = 3\n[layout]\ntensor = 2\n") == [
        "run.toml:5",
        "run.toml:8",
    ]
