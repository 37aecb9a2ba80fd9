"""Weights of models of transformers: read from folders in any form that transformers reads, and written so that it loads them to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_families import batch, config, ours, spec, theirs
from hf_models import save_tokenizer
from safetensors.torch import load_file, save_file
from torch import Tensor

from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.evaluation.convert import export_checkpoint, import_folder
from phalanx.evaluation.open_model import open_model
from phalanx.models.init import build, materialize
from phalanx.models.sampling import Sampling, generate
from phalanx.spec.errors import RunError
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.training import initial_weights
from phalanx.training.hf_weights import open_weights

transformers = pytest.importorskip("transformers", minversion="5")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
CPU = torch.device("cpu")


def saved(folder: Path, name: str) -> Any:
    """A model that transformers has written, in the form in which such models are published."""
    model = theirs(name)
    model.save_pretrained(folder)
    return model


def loaded(name: str, folder: Path, part: TensorSlice | None = None) -> dict[str, Tensor]:
    model = materialize(build(spec(name)), 0, CPU)
    state = model.state_dict()
    shapes = {key: tuple(tensor.shape) for key, tensor in state.items()}
    initial_weights.load({key: StateTensor.full(tensor) for key, tensor in state.items()}, shapes, folder, spec(name))
    return state


@pytest.mark.parametrize(
    "name", ["phi3", "gemma2", "olmoe", "deepseek_v3", "gpt_oss", pytest.param("mixtral", marks=pytest.mark.slow)]
)
def test_published_weights_are_read_to_the_bit(name: str, tmp_path: Path) -> None:
    reference = saved(tmp_path, name)
    state = loaded(name, tmp_path)
    expected = {key: value for key, value in reference.state_dict().items() if key in state}
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(state[key], value), key


def test_experts_that_are_stored_one_by_one_are_stacked(tmp_path: Path) -> None:
    saved(tmp_path, "olmoe")
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.5.up_proj.weight" in stored
    files, _, table = open_weights(tmp_path, spec("olmoe"))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert files.shape(name) == (6, 160, 48)
    assert name in {entry.name for entry in table}
    up = files.rows(name, 5 * 160 + 80, 6 * 160)
    assert torch.equal(up, stored["model.layers.0.mlp.experts.5.up_proj.weight"])


def test_a_rank_reads_its_part_of_stacked_experts(tmp_path: Path) -> None:
    reference = saved(tmp_path, "olmoe")
    name = "model.layers.1.mlp.experts.down_proj"
    whole = reference.get_parameter(name)
    part = TensorSlice.full(whole.shape).cut(0, 1, 4)  # two of six experts
    tensor = torch.zeros(part.shape)
    shapes = {key: tuple(value.shape) for key, value in build(spec("olmoe")).state_dict().items()}
    initial_weights.load({name: StateTensor(tensor, part)}, shapes, tmp_path, spec("olmoe"))
    assert torch.equal(tensor, whole[2:4])


def test_missing_foreign_and_misshapen_tensors_are_refused_by_the_headers(tmp_path: Path) -> None:
    saved(tmp_path, "phi3")
    stored = load_file(tmp_path / "model.safetensors")
    taken = stored.pop("model.layers.1.self_attn.qkv_proj.weight")
    stored["model.norm.weight"] = stored["model.norm.weight"][:40].contiguous()
    stored["model.layers.7.self_attn.qkv_proj.weight"] = taken
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RunError) as refused:
        open_weights(tmp_path)
    text = str(refused.value)
    assert "lacks the tensor model.layers.1.self_attn.qkv_proj.weight, of shape [96, 48]" in text
    assert "model.layers.7.self_attn.qkv_proj.weight, which this kind of model does not have" in text
    assert "model.norm.weight has shape [40]; config.json asks for [48]" in text


@pytest.mark.parametrize("name", ["phi3", "olmoe", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_import_and_export_give_back_what_transformers_has_written(name: str, tmp_path: Path) -> None:
    reference = saved(tmp_path / "hf", name)
    done = import_folder(tmp_path / "hf", tmp_path / "run")
    assert done.family == config(name).model_type
    out = export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert (out.family, out.dtype) == (config(name).model_type, "fp32")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(again) is type(reference)
    for (key, expected), (other, got) in zip(reference.state_dict().items(), again.state_dict().items(), strict=True):
        assert key == other and torch.equal(got, expected), key


def test_a_folder_is_opened_and_continues_a_text_as_transformers_does(tmp_path: Path) -> None:
    reference = theirs("phi3")
    reference.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    prompt = batch(1, 8)
    expected = reference.generate(prompt, max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)[0, 8:].tolist()
    opened = open_model(tmp_path, "cpu")
    got = list(generate(opened.model, prompt[0].tolist(), 6, -1, Sampling(temperature=0)))
    assert got == expected


def test_trained_weights_have_the_names_of_transformers() -> None:
    reference = theirs("phi3")
    model = ours("phi3", reference)
    tokens = batch()
    model(tokens, torch.arange(tokens.shape[1]).expand_as(tokens)).logsumexp(-1).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    missing = reference.load_state_dict(model.state_dict(), strict=True)
    assert not missing.missing_keys
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    torch.testing.assert_close(model(tokens, positions), reference(input_ids=tokens).logits, atol=1e-4, rtol=0)
