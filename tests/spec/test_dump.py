"""The resolved run file reads back to the run it was written from."""

import math
import random
import tomllib
from dataclasses import replace
from typing import Any

import pytest

from phalanx.spec.check import check
from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError, toml
from phalanx.spec.keys import KEYS, TABLES, Key
from phalanx.spec.load import loads, resolve
from phalanx.spec.model import PRESETS, Mla, ModelSpec, Moe, RopeScaling
from phalanx.spec.run import Data, MixedSource, Run, Train

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
        return draw.choice(key.choices)
    if key.kind is bool:
        return draw.random() < 0.5
    if key.kind is str:
        return "env:SOME_NAME" if "secret" in key.metadata else draw.choice(TEXTS)
    low = key.metadata.get("low") or 0
    high = key.metadata.get("high") or low + 5000
    return draw.randint(low, high) if key.kind is int else draw.choice([high, low + (high - low) * draw.random() + 1e-12])


BEGUN: dict[str, Any] = {
    "rope_scaling": RopeScaling(factor=2.0),
    "mla": Mla(kv_rank=16),
    "moe": Moe(experts=8, active=2, ffn=64),
}
"""Optional tables, as the first of their keys to be drawn finds them."""


def put(table: Any, parts: list[str], value: Any) -> Any:
    """A table with one key of it, or of a table in it, set."""
    name, *inner = parts
    attribute = "from_" if name == "from" else name
    if not inner:
        return replace(table, **{attribute: tuple(value) if isinstance(value, list) else value})
    if name == "mix":
        sources = {source.name: source for source in table.mix}
        sources[inner[0]] = put(sources.get(inner[0], MixedSource(name=inner[0])), inner[1:], value)
        return replace(table, mix=tuple(sources.values()))
    return replace(table, **{name: put(getattr(table, name) or BEGUN[name], inner, value)})


def draw_run(draw: random.Random) -> Run:
    """Keys drawn one by one; a draw that contradicts what was drawn before is not taken."""
    settings = {"train.batch": 8, "train.steps": 10}
    if draw.random() < 0.5:
        settings["model.preset"] = draw.choice(sorted(set(PRESETS)))
        settings["train.sequence_length"] = 64
    run = loads("", overrides=[f"{path}={toml(value)}" for path, value in settings.items()])
    keys = [key for key in KEYS.values() if key.path != "model.preset" and key.table != "command"]
    for key in draw.sample(keys, 18):
        candidate = put(run, key.path.replace("*", draw.choice(["wiki", "code-2"])).split("."), draw_value(draw, key))
        run = candidate if not check(candidate) else run
    if run.model.preset is None and draw.random() < 0.3:
        options = tuple(sorted({"a": draw.choice(TEXTS), "b-2": draw.random(), "_": draw.choice([True, 3, math.inf])}.items()))
        candidate = put(put(run, ["model", "module"], "a.b:C"), ["model", "options"], options)
        run = candidate if not check(candidate) else run
    return run


def test_many_runs_read_back() -> None:
    draw = random.Random(4)
    runs = [draw_run(draw) for _ in range(300)]
    assert len(set(runs)) == len(runs)
    drawn = [
        sum(bool(getattr(run.model, name)) for run in runs)
        for name in ("from_", "module", "options", "rope_scaling", "mla", "moe")
    ]
    assert min(*drawn, sum(bool(run.data.mix) for run in runs)) >= 5, "some kind of table was hardly ever drawn"
    for run in runs:
        assert loads(dump(run)) == run


@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_back(name: str) -> None:
    run = resolve(replace(BASE, model=PRESETS[name]))
    assert loads(dump(run)) == run


def test_secrets_are_not_written_but_the_names_of_their_variables_are() -> None:
    keys = ["watch.alerts.url=https://hooks/hidden", "watch.metrics_port=9464", "watch.metrics_token=hidden-hidden-hidden"]
    run = loads("", overrides=["train.batch=8", "train.steps=1", *keys])
    assert "hidden" not in dump(run) and "# url is set; it is a secret" in dump(run)
    read = loads(dump(run)).watch
    assert (read.alerts.url, read.metrics_token, read.metrics_port) == (None, None, 9464)
    named = [key if "hidden" not in key else f"{key.partition('=')[0]}=env:NAME" for key in keys]
    run = loads("", overrides=["train.batch=8", "train.steps=1", *named])
    assert loads(dump(run)) == run and run.watch.alerts.url == run.watch.metrics_token == "env:NAME"
    for value in ("env:", "env:1A", "env:A B", "env:A\n", "environment"):
        with pytest.raises(RunError, match=r"watch\.alerts\.url is neither"):
            loads(f"[train]\nbatch = 8\nsteps = 1\n[watch.alerts]\nurl = {toml(value)}\n")


def test_infinity_reads_back() -> None:
    run = replace(BASE, train=replace(BASE.train, clip=math.inf))
    assert "clip = inf\n" in dump(run)
    assert loads(dump(run)) == run


def test_everything_is_written_once() -> None:
    text = dump(replace(BASE, model=replace(PRESETS["llama3-405b"])))
    assert text.startswith("# The resolved run")
    assert [line.strip("[]") for line in text.splitlines() if line.startswith("[")] == [
        table for table in TABLES if table not in ("model.mla", "model.moe", "data.mix.*", "command")
    ]
    tree = tomllib.loads(text)
    assert tree["model"]["preset"] == "llama3-405b"
    assert tree["model"]["dim"] == 16384
    assert tree["model"]["rope_scaling"]["factor"] == 8.0
    assert set(tree["model"]["rope_scaling"]) == {key.name for key in KEYS.values() if key.table == "model.rope_scaling"}
    assert tree["optimizer"]["learning_rate"] == 3e-4
    assert "head_dim" not in tree["model"]
    assert dump(loads(text)) == text


def test_a_program_of_the_users_own_is_written() -> None:
    run = loads("", overrides=['command.program=["python", "a b.py", "--x=\\"1\\""]', "cluster.nodes=3", "command.min_nodes=2"])
    assert tomllib.loads(dump(run))["command"] == {"program": ["python", "a b.py", '--x="1"'], "min_nodes": 2}
    assert loads(dump(run)) == run


def test_a_mixture_is_written_in_its_order() -> None:
    mix = (MixedSource(name="b", paths=("b.txt",), weight=1.0), MixedSource(name="a-1", source="stdlib", weight=2.0))
    run = replace(BASE, data=Data(mix=mix), model=replace(BASE.model, module="a.b:C", options=(("x", 1), ("y", "z"))))
    text = dump(run)
    assert text.index("[data]\n") < text.index("[data.mix.b]\n") < text.index("[data.mix.a-1]\n") < text.index("[train]\n")
    assert tomllib.loads(text)["model"]["options"] == {"x": 1, "y": "z"}
    assert "name" not in tomllib.loads(text)["data"]["mix"]["b"]
    assert loads(text) == run


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
