"""The run file read: defaults, overrides, and one table of mistakes with what their messages must say."""

import json
import math
from dataclasses import MISSING, replace
from pathlib import Path

import pytest
from sentences import assert_one_sentence

from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.keys import KEYS
from phalanx.spec.load import loads
from phalanx.spec.model import PRESETS, Mla, Moe
from phalanx.spec.preset_vocabulary import vocabulary_question
from phalanx.spec.run import Optimizer, Run, Train

GOOD = "[train]\nbatch = 8\nsteps = 10\n"  # later lines of a case start at 4

# (text, overrides, for each expected problem in order: what it must contain)
MISTAKES = {
    # Unknown names.
    "misspelled key": ("[train]\nbatch = 8\nstps = 10\n", [], [("run.toml:3: ", "train.stps", "did you mean train.steps?")]),
    "key of another table": (
        GOOD + "learning_rate = 1e-3\n",
        [],
        [("run.toml:4: ", "train.learning_rate", "did you mean optimizer.learning_rate?")],
    ),
    "key of two other tables": (
        GOOD + "[model]\nschedule = 'x'\n",
        [],
        [("run.toml:5: ", "optimizer.schedule or layout.schedule?")],
    ),
    "another trainer's name": (
        GOOD + "[optimizer]\nlr = 1e-3\n",
        [],
        [("run.toml:5: ", "optimizer.lr", "optimizer.learning_rate?")],
    ),
    "nothing near": (
        GOOD + "[watch]\nxyzzy = 1\n",
        [],
        [("run.toml:5: ", "watch.xyzzy", "[watch] accepts log_every, tensorboard, wandb")],
    ),
    "misspelled table": (
        GOOD + "[optimiser]\nname = 'muon'\n",
        [],
        [("run.toml:4: ", "[optimiser]", "did you mean [optimizer]?")],
    ),
    "unknown table": (
        GOOD + "[xyzzy]\na = 1\n",
        [],
        [
            (
                "run.toml:4: ",
                "[xyzzy]",
                "the tables are model, model.options, model.rope_scaling, model.mla, model.moe, data, data.mix.NAME, ",
            )
        ],
    ),
    "unknown inner table": (GOOD + "[model.rope_scalin]\n", [], [("run.toml:4: ", "did you mean [model.rope_scaling]?")]),
    "key above the tables": ("steps = 3\n" + GOOD, [], [("run.toml:1: ", "steps is not a key", "train.steps")]),
    "unknown key above the tables": ("xyzzy = 3\n" + GOOD, [], [("run.toml:1: ", "its tables are model, ")]),
    "quoted dotted key": ('"train.clip" = 3.0\n' + GOOD, [], [("run.toml:1: ", '"train.clip"', "write it without quotes")]),
    "model below a header": (
        GOOD + 'model = "gpt2-124m"\n',
        [],
        [("run.toml:4: ", "train.model", "must stand above the first [table] header")],
    ),
    "misspelled override": (
        GOOD,
        ["train.stps=20"],
        [("command line: train.stps=20: ", "train.stps", "did you mean train.steps?")],
    ),
    "override of an unknown table": (GOOD, ["trian.steps=20"], [("command line: trian.steps=20: ", "did you mean [train]?")]),
    "override without a table": (GOOD, ["steps=20"], [("command line: steps=20: ", "did you mean train.steps?")]),
    "override with dashes": (GOOD, ["--train.steps=20"], [("command line: --train.steps=20: ", "did you mean [train]?")]),
    # Wrong types.
    "string for an integer": (
        '[train]\nbatch = 8\nsteps = "20"\n',
        [],
        [("run.toml:3: ", 'train.steps = "20" is a string', "an integer is expected", "write 20 without quotes")],
    ),
    "float for an integer": (
        "[train]\nbatch = 8\nsteps = 1e3\n",
        [],
        [("run.toml:3: ", "train.steps = 1000.0 is a float", "an integer is expected: write 1000.")],
    ),
    "boolean for an integer": (
        "[train]\nbatch = true\nsteps = 3\n",
        [],
        [("run.toml:2: ", "train.batch = true is a boolean", "an integer is expected")],
    ),
    "boolean for a float": (
        GOOD + "clip = true\n",
        [],
        [("run.toml:4: ", "train.clip = true is a boolean", "a number is expected")],
    ),
    "integer for a boolean": (
        GOOD + "[data]\nshuffle = 0\n",
        [],
        [("run.toml:5: ", "data.shuffle = 0 is an integer", "write false")],
    ),
    "string for a boolean": (
        GOOD + "[data]\nshuffle = 'True'\n",
        [],
        [("run.toml:5: ", "true or false is expected: write true.")],
    ),
    "integer for a string": (
        GOOD + "[watch]\nwandb_project = 7\n",
        [],
        [("run.toml:5: ", "watch.wandb_project = 7 is an integer", 'write it in quotes, "7"')],
    ),
    "half a string for an integer": (
        GOOD + 'seed = "2.5"\n',
        [],
        [('train.seed = "2.5" is a string, but an integer is expected.',)],
    ),
    "huge float for an integer": (
        GOOD + "seed = 1e300\n",
        [],
        [("train.seed = 1e+300 is a float, but an integer is expected.",)],
    ),
    "string for a float": (
        GOOD + 'clip = "1e-3"\n',
        [],
        [("run.toml:4: ", "a number is expected: write 1e-3 without quotes.")],
    ),
    "list for a number": (
        GOOD + "seed = [1, 2]\n",
        [],
        [("run.toml:4: ", "train.seed = [1, 2] is a list", "an integer is expected")],
    ),
    "date for a number": (GOOD + "seed = 2020-01-01\n", [], [("run.toml:4: ", "2020-01-01 is a date or time")]),
    "table for a number": (GOOD + "seed = { a = 1 }\n", [], [("run.toml:4: ", "train.seed = { a = 1 } is a table")]),
    "number for a table": (GOOD, ["train=5"], [("command line: train=5: ", "train = 5 is an integer", "train is a table")]),
    "list for a table": (
        "[[train]]\nbatch = 8\n",
        [],
        [("run.toml:1: ", "is a list", "train is a table", "such as train.batch")],
    ),
    "number in a list of strings": (
        GOOD + "[data]\npaths = [\n  'a',\n  3,\n]\n",
        [],
        [("run.toml:5: ", "data.paths[1] = 3 is an integer", "a string is expected")],
    ),
    "unknown choice": (
        GOOD + "[optimizer]\nname = 'adam'\n",
        [],
        [("run.toml:5: ", 'optimizer.name = "adam"', '"adamw" or "muon"', 'did you mean "adamw"?')],
    ),
    "far-off choice": (GOOD, ["optimizer.schedule=zz"], [('it must be "cosine", "wsd", "linear" or "constant".',)]),
    "number for a choice": (GOOD + "[optimizer]\nname = 3\n", [], [("3 is an integer", '"adamw" or "muon" is expected')]),
    # Ranges.
    "below": ("[train]\nbatch = 8\nsteps = 0\n", [], [("run.toml:3: ", "train.steps = 0", "at least 1")]),
    "between": (
        GOOD + "[data]\neval_fraction = 0.9\n",
        [],
        [("run.toml:5: ", "data.eval_fraction = 0.9", "between 0.0 and 0.5")],
    ),
    "not above": (GOOD, ["optimizer.learning_rate=0"], [("learning_rate = 0.0", "greater than 0.0")]),
    "infinite": (GOOD, ["optimizer.learning_rate=inf"], [("learning_rate = inf", "greater than 0.0 and finite")]),
    "minus infinite": (GOOD, ["train.clip=-inf"], [("train.clip = -inf", "greater than 0.0")]),
    "not a number": (GOOD, ["train.clip=nan"], [("train.clip = nan", "greater than 0.0 and finite")]),
    "more than 64 bits": (GOOD, ["train.eval_every=1" + "0" * 25], [("train.eval_every = 0x", "must fit into 64 bits")]),
    "more than any float": (GOOD, ["train.clip=1" + "0" * 400], [("train.clip = 0x", "must fit into 64 bits")]),
    "degree below one": (
        GOOD,
        ["layout.tensor=0", "layout.data=-1"],
        [("layout.tensor = 0", "at least 1"), ("layout.data = -1", "at least 1")],
    ),
    "zero stage": (GOOD, ["layout.zero=4"], [("layout.zero = 4", "between 1 and 3")]),
    "negative size": (GOOD, ["model.dim=-64"], [("model.dim = -64", "at least 1")]),
    # Presets.
    "unknown preset": (
        'model = "lama3-8b"\n' + GOOD,
        [],
        [("run.toml:1: ", 'model.preset = "lama3-8b"', "llama3-8b, ", "`phalanx models` lists them")],
    ),
    "unlike any preset": (
        GOOD,
        ["model=xyzzy"],
        [("command line: model=xyzzy: ", "is not a known model: `phalanx models` lists them.")],
    ),
    "scaling without a factor": (
        GOOD + "[model.rope_scaling]\nlow_freq_factor = 2.0\n",
        [],
        [("run.toml:5: ", "model.rope_scaling.factor is missing")],
    ),
    "experts without sizes": (
        GOOD + "[model.moe]\nexperts = 8\n",
        [],
        [("run.toml:5: ", "model.moe.active is missing"), ("run.toml:5: ", "model.moe.ffn is missing")],
    ),
    "empty optional table": (GOOD + "[model.mla]\n", [], [("run.toml:4: ", "model.mla.kv_rank is missing")]),
    "optional table of which one key is wrong": (
        GOOD + "[model.moe]\nexperts = 'x'\nactive = 99\nffn = 8\n",
        [],
        [("run.toml:5: ", 'model.moe.experts = "x" is a string')],
    ),
    # Overrides that are none.
    "override without a value": (GOOD, ["train.steps="], [("command line: train.steps=: ", "train.steps=VALUE")]),
    "override without an equals sign": (
        GOOD,
        ["train.steps"],
        [("command line: train.steps: ", "key=value, such as train.steps=20")],
    ),
    "override without a key": (GOOD, ["=3"], [("command line: =3: ", "key=value")]),
    "override with an open bracket": (GOOD, ['data.paths=["a"'], [('command line: data.paths=["a": ', "close its brackets")]),
    "override of undecodable bytes": (
        GOOD,
        ["data.paths=a\udc80"],
        [("command line: data.paths=a\\udc80: ", "data.paths = 'a\\udc80'", "not valid Unicode")],
    ),
    # TOML.
    "no equals sign": ("[train]\nsteps 20\n", [], [("run.toml:2: ", "`steps 20`", "column 7", "expected '=' after a key")]),
    "unquoted text": ("model = gpt2-124m\n", [], [("run.toml:1: ", "invalid value", "text needs quotes")]),
    "open bracket": ("[data]\npaths = [\n'a',\n", [], [("run.toml:3: ", "`'a',`", "not valid TOML at the end", "still open")]),
    "key twice": ("[train]\nsteps = 1\nsteps = 2\n", [], [("run.toml:3: ", "`steps = 2`", "keep one of the two")]),
    "table twice": (GOOD + "[train]\nseed = 1\n", [], [("run.toml:4: ", "`[train]`", "second time", "one header")]),
    "deep": ("a = " + "[" * 5000, [], [("run.toml: ", "nested too deeply")]),
    "thousands of digits": ("a = " + "1" * 5000, [], [("run.toml: ", "not valid TOML", "limit")]),
    "syntax and override": (
        "[train\n",
        ["train.stps=1"],
        [("run.toml:1: ", "expected ']'"), ("command line: train.stps=1: ", "train.steps?")],
    ),
    # Several at once, in the order of the file and then of the command line.
    "all at once": (
        'model = "gpt2"\n[train]\nstps = 10\nseed = -1\nbatch = 3\n[layout]\ndata = 2\n',
        ["optimizer.nme=muon", "watch.log_every=0"],
        [
            ("run.toml:1: ", "gpt2-124m"),
            ("run.toml:3: ", "train.steps?"),
            ("run.toml:4: ", "train.seed = -1", "between 0 and"),
            ("run.toml:7: ", "train.batch = 3 does not divide among the 2 replicas", "2 or 4"),
            ("command line: optimizer.nme=muon: ", "optimizer.name?"),
            ("command line: watch.log_every=0: ", "at least 1"),
        ],
    ),
}


def problems_of(text: str, overrides: list[str]) -> tuple[str, ...]:
    with pytest.raises(RunError) as caught:
        loads(text, name="run.toml", overrides=overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return caught.value.problems


@pytest.mark.parametrize(("text", "overrides", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_mistake(text: str, overrides: list[str], expected: list[tuple[str, ...]]) -> None:
    problems = problems_of(text, overrides)
    assert len(problems) == len(expected), problems
    for problem, parts in zip(problems, expected, strict=True):
        assert_one_sentence(problem)
        assert problem.startswith(("run.toml: ", "run.toml:", "command line: "))
        for part in parts:
            assert part in problem


def test_an_empty_file_lacks_only_batch_and_duration() -> None:
    batch, duration = problems_of("", [])
    assert batch.startswith("run.toml: neither train.batch nor train.batch_tokens")
    assert duration.startswith("run.toml: neither train.steps nor train.tokens")


def test_defaults() -> None:
    run = loads(GOOD)
    assert run.train == Train(batch=8, steps=10)
    assert run.optimizer == Optimizer()
    assert run.model.vocab == 257
    assert (run.batch, run.steps, run.batch_tokens) == (8, 10, 8192)


def test_only_what_makes_an_optional_table_has_no_default() -> None:
    assert [path for path, key in KEYS.items() if key.default is MISSING] == [
        "model.rope_scaling.factor",
        "model.mla.kv_rank",
        "model.moe.experts",
        "model.moe.active",
        "model.moe.ffn",
    ]


def override(*overrides: str) -> Run:
    return loads(GOOD, overrides=overrides)


def test_overrides() -> None:
    assert override("train.steps=20").train.steps == 20
    assert override(" train.steps = 20 ").train.steps == 20
    assert override("train.steps=20", "train.steps=30").train.steps == 30
    assert override("train.clip=inf").train.clip == math.inf
    assert type(override("train.clip=2").train.clip) is float
    assert override("data.shuffle=false").data.shuffle is False
    assert override("optimizer={name='muon', beta1=0.8}").optimizer == Optimizer(name="muon", beta1=0.8)


def test_override_strings_need_no_quotes() -> None:
    assert override("optimizer.name=muon").optimizer.name == "muon"
    assert override('optimizer.name="muon"').optimizer.name == "muon"
    assert override("watch.wandb_project=a=b c").watch.wandb_project == "a=b c"
    assert override("watch.wandb_project=2024").watch.wandb_project == "2024"
    assert override("watch.wandb_project=1\nx=2").watch.wandb_project == "1\nx=2"


def test_a_string_where_a_list_is_wanted_is_a_list_of_one() -> None:
    assert override("data.paths=a.txt").data.paths == ("a.txt",)
    assert override("data.paths=007").data.paths == ("007",)
    assert override('data.paths=["a.txt","b.txt"]').data.paths == ("a.txt", "b.txt")
    assert loads(GOOD + "[data]\npaths = 'a.txt'\n").data.paths == ("a.txt",)


def test_presets() -> None:
    llama = PRESETS["llama3-8b"]
    assert loads('model = "llama3-8b"\n' + GOOD).model == llama
    assert loads(GOOD + '[model]\npreset = "llama3-8b"\n').model == llama
    assert override("model=llama3-8b").model == llama
    assert override("model={preset='llama3-8b'}").model == llama


def test_sizes_override_the_preset() -> None:
    model = override("model=llama3.2-1b", "model.layers=2", "model.rope_scaling.factor=8").model
    assert (model.preset, model.layers, model.dim) == ("llama3.2-1b", 2, 2048)
    assert model.rope_scaling is not None
    assert (model.rope_scaling.factor, model.rope_scaling.original_context) == (8.0, 8192)


def test_a_preset_without_a_vocabulary_takes_the_tokenizers() -> None:
    assert override("model=tiny-dense").model.vocab == 257
    assert override("model=tiny-dense", "model.vocab=300").model.vocab == 300


def test_a_preset_with_another_tokenizer_takes_its_vocabulary(tmp_path: Path) -> None:
    bytes_ = override("model=qwen3-0.6b", "data.tokenizer=byte").model
    assert (bytes_.vocab, bytes_.vocab_undecided) == (320, False)
    for tokens, rows in ((151_669, 151_936), (80_000, 151_936), (50_000, 50_048), (200_000, 200_000)):
        folder = tmp_path / str(tokens)
        folder.mkdir()
        (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "z": tokens - 1}}}))
        assert override("model=qwen3-0.6b", f"data.tokenizer={folder}").model.vocab == rows
    assert override("model=qwen3-0.6b", "data.tokenizer=byte", "model.vocab=151936").model.vocab == 151_936


def test_a_preset_without_a_tokenizer_is_planned_as_published_but_asks_before_training() -> None:
    run = override("model=qwen3-0.6b")
    assert run.model == PRESETS["qwen3-0.6b"] and run.model.vocab == 151_936
    (question,) = vocabulary_question(run)
    assert all(text in question for text in ("151,936 rows", "257 tokens", 'data.tokenizer = "byte"', "model.vocab = 151936"))
    for answer in ("data.tokenizer=byte", "model.vocab=151936"):
        assert not vocabulary_question(override("model=qwen3-0.6b", answer))
    assert not vocabulary_question(override("model=tiny-dense"))
    assert not vocabulary_question(loads(dump(run))), "the run file of a run directory has decided"
    assert loads(dump(run)).model.vocab == 151_936


def test_optional_tables_over_a_preset_keep_its_other_values() -> None:
    moe = override("model=tiny-moe", "model.moe.bias_rate=0.25").model.moe
    assert moe is not None and moe == replace(PRESETS["tiny-moe"].moe, bias_rate=0.25)
    latent = override("model=tiny-mla", "model.mla.value_dim=8").model.mla
    assert latent is not None and latent == replace(PRESETS["tiny-mla"].mla, value_dim=8)
    sizes = override("model.moe={experts=8, active=2, ffn=64}", "model.mla.kv_rank=16").model
    assert (sizes.moe, sizes.mla) == (Moe(experts=8, active=2, ffn=64), Mla(kv_rank=16))


def test_a_value_overridden_is_not_complained_about() -> None:
    assert loads("[train]\nbatch = 8\nsteps = 'x'\n", overrides=["train.steps=3"]).train.steps == 3


def test_an_editors_schema_key_is_ignored() -> None:
    assert loads('"$schema" = "run.schema.json"\n' + GOOD) == loads(GOOD)
