"""A run that starts from a folder: what is taken from it, what may be set beside it, and what is said when that cannot be."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from phalanx.spec.check import check
from phalanx.spec.dump import changed, dump
from phalanx.spec.errors import RunError
from phalanx.spec.load import load, loads, resolve
from phalanx.spec.model import ModelSpec, Moe
from phalanx.spec.run import Data, Run, Train

GOOD = "[train]\nbatch = 8\nsteps = 10\nsequence_length = 64\n"  # later lines of a case start at 5
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5000.0,
    "tie_word_embeddings": True,
}
TOKENIZER = {"model": {"type": "BPE", "vocab": {chr(64 + i): i for i in range(40)}}, "added_tokens": [{"id": 40}]}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders are named as a person would, from where the command is started."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def weights(here: Path) -> Path:
    folder = here / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return folder


@pytest.fixture
def finished(here: Path) -> Path:
    """A run directory with a checkpoint, as far as its model goes."""
    folder = here / "runs" / "first"
    (folder / "checkpoints" / "step-00000010").mkdir(parents=True)
    sizes = '[model]\npreset = "tiny-dense"\nmoe = { experts = 8, active = 2, ffn = 32, bias_rate = 0.01 }\n'
    (folder / "run.toml").write_text(dump(loads(GOOD + sizes)))
    return folder


def problems(text: str, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(RunError) as caught:
        loads(text, name="run.toml", overrides=overrides)
    return caught.value.problems


def start(folder: str, *overrides: str) -> Run:
    return loads(GOOD, overrides=[f"model.from={folder}", *overrides])


def test_sizes_come_from_a_folder_of_hugging_face_weights(weights: Path) -> None:
    model = start("weights").model
    assert (model.dim, model.layers, model.heads, model.kv, model.hidden, model.vocab) == (64, 3, 4, 2, 96, 300)
    assert (model.norm_eps, model.rope_theta, model.tied, model.context) == (1e-6, 5000.0, True, 128)
    assert (model.from_, model.preset) == ("weights", None)


def test_the_tokenizer_comes_along_unless_another_is_named(weights: Path) -> None:
    assert start("weights").data.tokenizer == "byte"
    (weights / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    assert start("weights").data.tokenizer == "weights"
    assert start("weights", "data.tokenizer=byte").data.tokenizer == "byte"


@pytest.mark.parametrize(
    "place", ["runs/first", "runs/first/checkpoints/step-00000010", "runs/first/checkpoints/step-00000010/"]
)
def test_sizes_come_from_a_run_or_its_checkpoint(finished: Path, place: str) -> None:
    run, theirs = start(place), load(finished / "run.toml")
    assert run.model == replace(theirs.model, preset=None, from_=place)
    assert run.data.tokenizer == "byte"
    (finished / "tokenizer").mkdir()
    (finished / "tokenizer" / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    assert Path(start(place).data.tokenizer).samefile(finished / "tokenizer")
    assert start(place, "data.tokenizer=byte").data.tokenizer == "byte"


def test_a_run_directory_may_name_itself(finished: Path) -> None:
    run = start("runs/first")
    (finished / "run.toml").write_text(dump(run))
    assert start("runs/first").model == run.model
    assert load(finished / "run.toml") == run


def test_the_resolved_run_outlives_the_folder(weights: Path) -> None:
    run = start("weights", "model.mtp_depth=2")
    assert loads(dump(run)) == run
    (weights / "config.json").write_text(json.dumps(LLAMA | {"hidden_size": 128, "head_dim": 8}))
    (weights / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    assert loads(dump(run)) == run
    assert "model.dim = 64 differs from the 128" in check(run)[0]
    (weights / "config.json").write_text("{")
    assert loads(dump(run)) == run
    shutil.rmtree(weights)
    assert loads(dump(run)) == run
    assert check(run) == []


def test_what_only_concerns_training_may_be_set_otherwise(finished: Path) -> None:
    moe = ("model.moe.bias_rate=0.5", "model.moe.balance_loss=0.1")
    run = start(
        "runs/first", *moe, "model.mtp_depth=1", "model.mtp_loss_weight=0.5", "model.init_std=0.1", "model.context=4096"
    )
    assert run.model.moe == Moe(experts=8, active=2, ffn=32, bias_rate=0.5, balance_loss=0.1)
    assert (run.model.mtp_depth, run.model.mtp_loss_weight, run.model.init_std, run.model.context) == (1, 0.5, 0.1, 4096)
    assert loads(dump(run)) == run
    assert resolve(run) == run


def test_sizes_that_the_weights_do_not_have_are_refused(weights: Path) -> None:
    text = GOOD + '[model]\nfrom = "weights"\nheads = 4\ndim = 32\nhead_dim = 16\ntied = false\n'
    assert problems(text) == (
        'run.toml:8: model.dim = 32 differs from the 64 of model.from = "weights": remove it.',
        'run.toml:10: model.tied = false differs from the true of model.from = "weights": remove it.',
    )
    (experts,) = problems(GOOD, "model.from=weights", "model.moe={experts=4, active=2, ffn=8}")
    assert experts.endswith('model.from = "weights" has no model.moe: remove [model.moe].')
    assert start("weights", "model.dim=64", "model.head_dim=16", "model.kv_heads=2").model.dim == 64


def test_a_table_of_learned_positions_has_its_length(here: Path) -> None:
    folder = here / "gpt2"
    folder.mkdir()
    config = {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "vocab_size": 300,
        "n_positions": 64,
    }
    (folder / "config.json").write_text(json.dumps(config))
    assert start("gpt2").model.context == 64
    (problem,) = problems(GOOD, "model.from=gpt2", "model.context=128")
    assert "model.context = 128 differs from the 64" in problem


def test_two_ways_to_say_what_the_model_is() -> None:
    preset, gone = problems(GOOD + '[model]\nfrom = "weights"\npreset = "tiny-dense"\n')
    assert preset.startswith('run.toml:6: model.from = "weights" and model.preset = "tiny-dense" both define the model')
    assert gone.startswith('run.toml:6: model.from = "weights" does not exist')
    (module,) = problems(GOOD + '[model]\npreset = "tiny-dense"\nmodule = "a.b:C"\n')
    assert module.startswith('run.toml:7: model.module = "a.b:C" and model.preset')


@pytest.mark.parametrize("name", ["nowhere", "a" * 5000, "~nobody-of-that-name/x", "nul\x00byte"])
def test_no_such_folder(name: str) -> None:
    (problem,) = problems(GOOD, f"model.from={json.dumps(name)}")
    assert "does not exist: name a folder of Hugging Face weights, a run directory, a checkpoint or a model of the" in problem


def test_a_folder_of_something_else(here: Path) -> None:
    (here / "empty").mkdir()
    (here / "checkpoints" / "step-1").mkdir(parents=True)
    for name in ("empty", "checkpoints/step-1"):
        (problem,) = problems(GOOD + f'[model]\nfrom = "{name}"\nheads = 3\n')
        assert problem.startswith(f'run.toml:6: model.from = "{name}" holds neither a config.json')
        assert "run.toml (a run directory)" in problem


def test_a_folder_that_cannot_be_understood(weights: Path, finished: Path) -> None:
    (weights / "config.json").write_text(json.dumps(LLAMA | {"hidden_act": "tanh"}))
    (problem,) = problems(GOOD + '[model]\nfrom = "weights"\nheads = 3\n')
    assert problem.startswith('run.toml:6: model.from = "weights" cannot be used: weights/config.json: hidden_act = "tanh"')
    (weights / "config.json").write_text("{")
    (problem,) = problems(GOOD, "model.from=weights")
    assert "config.json" in problem
    (finished / "run.toml").write_text("[train]\nbatch = 8\n[model]\ndim = 'x'\n")
    (problem,) = problems(GOOD, "model.from=runs/first")
    assert "runs/first/run.toml:4: model.dim" in problem


def test_runs_made_in_python(weights: Path) -> None:
    (weights / "tokenizer.json").write_text(json.dumps(TOKENIZER))
    made = Run(model=ModelSpec(from_="weights", mtp_depth=1), train=Train(batch=8, steps=10, sequence_length=64))
    run = resolve(made)
    assert check(run) == []
    assert (run.model.dim, run.model.vocab, run.model.mtp_depth, run.data.tokenizer) == (64, 300, 1, "weights")
    assert resolve(run) == run
    assert run == start("weights", "model.mtp_depth=1")
    (problem,) = check(resolve(replace(made, model=ModelSpec(from_="gone"))))
    assert "does not exist" in problem
    (problem,) = check(resolve(replace(made, model=ModelSpec(from_="weights", dim=32))))
    assert "model.dim = 32 differs from the 64" in problem
    (problem,) = check(resolve(replace(made, model=ModelSpec(from_="weights", moe=Moe(experts=4, active=2, ffn=8)))))
    assert "has no model.moe" in problem


def test_where_the_weights_came_from_is_part_of_a_runs_identity(weights: Path) -> None:
    shutil.copytree(weights, weights.with_name("others"))
    assert changed(start("weights"), start("others")) == ['model.from: "weights" → "others"']


def test_a_vocabulary_that_nobody_can_tell(here: Path) -> None:
    assert resolve(Run(data=Data(tokenizer="gone.json"))).model.vocab is None
