"""`model.config`: a config.json becomes the text in the run, and sizes follow from it; what can never be trained is refused by key and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from phalanx.spec.dump import dump
from phalanx.spec.errors import RunError
from phalanx.spec.load import load, loads, resolve
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Run, Train

PHI3: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": 3, "vocab_size": 320, "max_position_embeddings": 512, "initializer_range": 0.05,
    "tie_word_embeddings": True,
}  # fmt: skip
LLAMA = PHI3 | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu"}
REST = "[train]\nsteps = 3\nbatch = 2\nsequence_length = 64\n"


@pytest.fixture
def weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(PHI3, indent=2))
    return folder


def model(keys: str, more: str = REST) -> ModelSpec:
    return loads(f"[model]\n{keys}\n{more}", name="run.toml").model


def problems(keys: str, more: str = REST) -> tuple[str, ...]:
    with pytest.raises(RunError) as refused:
        model(keys, more)
    return refused.value.problems


def test_a_file_a_folder_and_the_text_give_the_same_model(weights: Path) -> None:
    text = (weights / "config.json").read_text()
    by_folder = model('config = "weights"')
    assert by_folder == model('config = "weights/config.json"') == model(f"config = '''{text}'''")
    assert json.loads(by_folder.config or "") == PHI3
    sizes = {
        "dim": 48,
        "layers": 3,
        "heads": 4,
        "kv_heads": 2,
        "ffn": 80,
        "vocab": 320,
        "context": 512,
        "tied": True,
        "init_std": 0.05,
    }
    assert {name: getattr(by_folder, name) for name in sizes} == sizes
    assert not by_folder.is_builtin and by_folder.custom_key == "model.config (phi3)"


def test_the_run_directory_needs_the_folder_no_more(weights: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(f'[model]\nfrom = "weights"\nconfig = "weights"\n{REST}')
    run = load(tmp_path / "run.toml")
    assert run.model.config is not None and run.model.from_ == "weights"
    (weights / "config.json").unlink()
    assert loads(dump(run)) == run


def test_a_run_made_in_python_is_resolved_alike(weights: Path) -> None:
    run = resolve(Run(model=ModelSpec(config="weights"), train=Train(steps=3, batch=2, sequence_length=64)))
    assert run.model == model('config = "weights"')


def test_a_folder_that_the_built_in_decoder_computes_stays_with_it(weights: Path) -> None:
    (weights / "config.json").write_text(json.dumps(LLAMA))
    assert model('from = "weights"').is_builtin
    forced = model('from = "weights"\nconfig = "weights"')
    assert not forced.is_builtin and forced.from_ == "weights"
    (weights / "config.json").write_text(json.dumps(LLAMA | {"attention_bias": True}))
    assert model('from = "weights"').custom_key == "model.config (llama)", "a setting that it does not have"


@pytest.mark.parametrize(
    ("names", "values"),
    [
        ("gpt", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 80, "n_positions": 64, "vocab_size": 320}),
        ("mpt", {"d_model": 48, "n_layers": 3, "n_heads": 4, "ffn_dim": 80, "max_seq_len": 64, "vocab_size": 320}),
        ("text", {"text_config": {"hidden_size": 48, "num_hidden_layers": 3, "num_heads": 4, "ffn_hidden_size": 80, "n_ctx": 64, "vocab_size": 320}}),
    ],
)  # fmt: skip
def test_sizes_are_found_by_their_other_names(weights: Path, names: str, values: dict[str, Any]) -> None:
    (weights / "config.json").write_text(json.dumps({"model_type": names} | values))
    spec = model('config = "weights"')
    assert (spec.dim, spec.layers, spec.heads, spec.ffn, spec.context, spec.vocab) == (48, 3, 4, 80, 64, 320)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, ("no model_type", "phi3")),
        ({"model_type": 3}, ("model_type = 3",)),
        ({"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}}, ("auto_map", "modeling_x.X", "model.module")),
        ({"quantization_config": {"quant_method": "gptq"}}, ("quantization_config", "gptq", "original weights")),
        ({"is_encoder_decoder": True}, ("is_encoder_decoder = true", "without an encoder")),
        ({"vocab_size": None}, ("no vocab_size", "save the model again")),
        ({"hidden_size": "wide"}, ('hidden_size = "wide"', "whole number")),
        ({"num_hidden_layers": 0}, ("num_hidden_layers = 0", "above 0")),
    ],
)
@pytest.mark.parametrize("key", ["config", "from"])
def test_what_can_never_be_trained_is_refused_by_key_and_value(
    weights: Path, key: str, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    (weights / "config.json").write_text(json.dumps(PHI3 | {"architectures": ["NoneOfOurs"]} | changes))
    (problem,) = problems(f'{key} = "weights"')
    assert problem.startswith(f'run.toml:2: model.{key} = "weights"'), problem
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ('config = "nowhere/config.json"', ("does not exist", "Hugging Face hub")),
        ("config = '{\"a\": }'", ("is not JSON",)),
        ('config = "weights"\nlayers = 5', ("run.toml:3: model.layers = 5 differs from the 3 of model.config",)),
        ('config = "weights"\npreset = "tiny-dense"', ("both define the model",)),
        ('config = "weights"\nmodule = "a:B"', ("both define the model",)),
        ('config = "weights"\nnorm = "layer"', ("model.norm", "belongs to the built-in decoder")),
        ('config = "weights"\nmtp_depth = 1', ("model.mtp_depth", "belongs to the built-in decoder")),
        ('config = "weights"\n[model.moe]\nexperts = 4\nactive = 2\nffn = 8', ("[model.moe] belongs to the built-in decoder",)),
    ],
)
def test_keys_that_contradict_the_config(weights: Path, keys: str, words: tuple[str, ...]) -> None:
    (problem, *_) = problems(keys)
    assert all(word in problem for word in words), problem


def test_what_every_start_may_change(weights: Path) -> None:
    spec = model('config = "weights"\ninit_std = 0.01\ncontext = 128')
    assert (spec.init_std, spec.context) == (0.01, 128)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            "[layout]\ndata = 2\nexpert_tensor = 2\n",
            ("layout.expert_tensor = 2", "a model of transformers (model.config)", "= 1"),
        ),
        ("[layout]\ndata = 2\nexpert = 2\ntensor = 2\n", ("layout.expert = 2", "layout.tensor = 2", "set one of them to 1")),
        ('[lora]\nrank = 2\nbase = "nf4"\n', ("lora.base", "remove lora.base")),
    ],
)
def test_layouts_that_are_not_possible_are_refused_by_name(weights: Path, more: str, words: tuple[str, ...]) -> None:
    (problem, *_) = problems('config = "weights"', REST + more)
    assert all(word in problem for word in words), problem
