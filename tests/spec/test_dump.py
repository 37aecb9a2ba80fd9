"""The resolved run file reads back to the run it was written from."""

import math
import random
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from phalanx.spec.check import check
from phalanx.spec.dump import dump, toml
from phalanx.spec.keys import KEYS, TABLES, Key
from phalanx.spec.load import loads, resolve
from phalanx.spec.model import ModelSpec, RopeScaling
from phalanx.spec.presets import PRESETS
from phalanx.spec.run import Data, Run, Train

BASE = resolve(Run(train=Train(batch=8, steps=10)))
TEXTS = [
    "",
    "a.txt",
    'quo"te',
    "back\\slash",
    "line\nbreak\ttab\r\n",
    "\x00\x1f\x7f\b\f",
    "é ∑ 🙂",
    "'''",
    '"""',
    "# no comment",
    "[x]",
]


def draw_value(draw: random.Random, key: Key) -> Any:
    if key.many:
        return [draw.choice(TEXTS) for _ in range(draw.randrange(4))]
    if key.choices:
        return draw.choice([c for c in key.choices if c not in key.metadata.get("later_values", {})])
    if key.kind is bool:
        return draw.random() < 0.5
    if key.kind is str:
        return draw.choice(TEXTS)
    low = key.metadata.get("low") or 0
    high = key.metadata.get("high") or low + 5000
    return draw.randint(low, high) if key.kind is int else draw.choice([high, low + (high - low) * draw.random() + 1e-12])


def draw_run(draw: random.Random) -> Run:
    """Keys drawn one by one; a draw that contradicts what was drawn before is not taken."""
    settings = {"train.batch": 8, "train.steps": 10}
    if draw.random() < 0.5:
        settings["model.preset"] = draw.choice(sorted(set(PRESETS)))
        settings["train.sequence_length"] = 64
    run = loads("", overrides=[f"{path}={toml(value)}" for path, value in settings.items()])
    for key in draw.sample([key for key in KEYS.values() if "later" not in key.metadata and key.path != "model.preset"], 12):
        value = draw_value(draw, key)
        name, _, inner = key.path.partition(".")
        table = getattr(run, name)
        if key.table == "model.rope_scaling":
            scaling = replace(table.rope_scaling or RopeScaling(factor=2.0), **{key.name: value})
            candidate = replace(run, model=replace(table, rope_scaling=scaling))
        else:
            candidate = replace(run, **{name: replace(table, **{inner: tuple(value) if key.many else value})})
        run = candidate if not check(candidate) else run
    return run


def test_many_runs_read_back() -> None:
    draw = random.Random(0)
    runs = [draw_run(draw) for _ in range(150)]
    assert len(set(runs)) == len(runs)
    for run in runs:
        assert loads(dump(run)) == run


@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_back(name: str) -> None:
    run = resolve(replace(BASE, model=PRESETS[name]))
    assert loads(dump(run)) == run


def test_infinity_reads_back() -> None:
    run = replace(BASE, train=replace(BASE.train, clip=math.inf))
    assert "clip = inf\n" in dump(run)
    assert loads(dump(run)) == run


def test_everything_is_written_once() -> None:
    text = dump(replace(BASE, model=replace(PRESETS["llama3-405b"])))
    assert text.startswith("# The resolved run")
    assert [line.strip("[]") for line in text.splitlines() if line.startswith("[")] == list(TABLES)
    tree = tomllib.loads(text)
    assert tree["model"]["preset"] == "llama3-405b"
    assert tree["model"]["dim"] == 16384
    assert tree["model"]["rope_scaling"] == {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_context": 8192,
    }
    assert tree["optimizer"]["learning_rate"] == 3e-4
    assert "head_dim" not in tree["model"]
    assert dump(loads(text)) == text


def test_a_preset_that_was_cut_down_in_python_keeps_its_sizes() -> None:
    model = replace(PRESETS["llama3.2-1b"], rope_scaling=None)
    assert loads(dump(replace(BASE, model=model))).model == replace(model, preset=None)
    named = ModelSpec(preset="mine", dim=128, vocab=300)
    assert loads(dump(replace(BASE, model=named))).model == replace(named, preset=None)


@pytest.mark.parametrize(
    "value",
    [
        *TEXTS,
        "".join(map(chr, range(0x300))),
        0,
        -5,
        2**63 - 1,
        1.0,
        1e-300,
        1.5e300,
        -0.1,
        math.inf,
        -math.inf,
        True,
        False,
        [],
        ["a", "b"],
        [[1], {"a": 1}],
    ],
)
def test_values_read_back(value: object) -> None:
    assert tomllib.loads(f"value = {toml(value)}")["value"] == value


def test_tuples_are_arrays_and_nan_is_nan() -> None:
    assert toml(Data(paths=("a", "b")).paths) == '["a", "b"]'
    assert math.isnan(tomllib.loads(f"value = {toml(math.nan)}")["value"])
