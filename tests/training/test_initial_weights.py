"""Weights to start from: a Hugging Face folder or a run directory fills a model in place, or is refused before a value changes."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_models import logits, save, tokens
from torch import nn

from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.evaluation.convert import import_folder
from phalanx.models.init import build, materialize
from phalanx.spec import hf_config
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec
from phalanx.training import initial_weights


def model(spec: ModelSpec) -> nn.Module:
    return materialize(build(spec), 0, torch.device("cpu")).eval()


def start(ours: nn.Module, folder: Path) -> None:
    state = ours.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    initial_weights.load({name: StateTensor.full(tensor) for name, tensor in state.items()}, shapes, folder)


def answer(of: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        got: torch.Tensor = of(tokens(), torch.arange(60).expand(2, 60))
    return got


@pytest.mark.parametrize("name", ["gpt2", "mixtral", "deepseek"])
def test_initial_weights_from_a_hugging_face_folder_and_from_its_import(tmp_path: Path, name: str) -> None:
    theirs = save(tmp_path / "hf", name)
    spec = hf_config.model_spec(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run")
    for path in (tmp_path / "hf", tmp_path / "run", tmp_path / "run" / "checkpoints" / "step-00000000"):
        ours = model(spec)
        start(ours, path)
        torch.testing.assert_close(answer(ours), logits(theirs, tokens()), atol=1e-4, rtol=0)


def test_initial_weights_are_cast_to_the_models_dtype(tmp_path: Path) -> None:
    save(tmp_path / "hf", "llama")
    ours = model(hf_config.model_spec(tmp_path / "hf")).to(torch.bfloat16)
    start(ours, tmp_path / "hf")
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}


def test_training_only_tensors_keep_their_initial_values(tmp_path: Path) -> None:
    save(tmp_path / "hf", "mixtral")
    spec = hf_config.model_spec(tmp_path / "hf")
    assert spec.moe is not None
    spec = replace(spec, mtp_depth=1, moe=replace(spec.moe, bias_rate=0.001))
    import_folder(tmp_path / "hf", tmp_path / "run")
    fresh = model(spec).state_dict()
    for path in (tmp_path / "hf", tmp_path / "run"):
        ours = model(spec)
        start(ours, path)
        for name, tensor in ours.state_dict().items():
            own = name.startswith("mtp.") or name.endswith("router.bias")
            assert torch.equal(tensor, fresh[name]) == (own or tensor.numel() == 0), name


def test_initial_weights_of_another_size_are_refused_before_a_value_changes(tmp_path: Path) -> None:
    save(tmp_path / "hf", "llama")
    import_folder(tmp_path / "hf", tmp_path / "run")
    ours = model(replace(hf_config.model_spec(tmp_path / "hf"), ffn=96))
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    for path in (tmp_path / "hf", tmp_path / "run"):
        with pytest.raises(RunError) as refused:
            start(ours, path)
        assert "blocks.0.mlp.gate.weight of shape [80, 48]" in refused.value.problems[0]
        assert "[96, 48]" in refused.value.problems[0]
    assert all(torch.equal(tensor, before[name]) for name, tensor in ours.state_dict().items())
    deeper = model(replace(hf_config.model_spec(tmp_path / "hf"), layers=4))
    with pytest.raises(RunError, match=r"lacks blocks\.3\.attention_norm\.weight"):
        start(deeper, tmp_path / "run")


def test_an_imported_model_has_the_loss_of_the_original(tmp_path: Path) -> None:
    # A model that was filled wrongly would still run: its text must be as probable to both.
    theirs = save(tmp_path / "hf", "qwen3")
    ours = model(hf_config.model_spec(tmp_path / "hf"))
    start(ours, tmp_path / "hf")
    ids = tokens()
    with torch.no_grad():
        expected = theirs(input_ids=ids, labels=ids).loss.item()
    got = nn.functional.cross_entropy(answer(ours)[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    assert math.isclose(got, expected, abs_tol=1e-5)
