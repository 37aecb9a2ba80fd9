"""A trainer with LoRA: what is trained, what it costs, what a checkpoint holds, and that weights of a Hugging Face folder are below the
adapters on every layout, at the start and after a resumption."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from ranks import ALONE, run_ranks, tiny_run, tiny_trainer

from phalanx.checkpointing.restore import CheckpointReader
from phalanx.events.records import Restored, WeightsLoaded
from phalanx.models.init import build
from phalanx.parallel.mesh import Mesh
from phalanx.spec import hf_config
from phalanx.spec.adapted_layers import adapter_parameters
from phalanx.spec.layout import Layout
from phalanx.spec.run import Lora, Run
from phalanx.training.trainer import Trainer
from phalanx.verification.cases import MODELS


def lora_run(*overrides: str, model: str = "dense", lora: Lora = Lora(rank=3)) -> Run:  # noqa: B008  # a frozen value
    return replace(tiny_run("train.sequence_length=24", *overrides), model=MODELS[model], lora=lora)


def test_frozen_weights_cost_their_own_bytes_alone(tmp_path: Path) -> None:
    run = lora_run("precision.compute=bf16")
    trainer = tiny_trainer(ALONE, run, tmp_path / "checkpoints")
    before = {name: state.values().clone() for name, state in trainer.state.frozen().items()}
    for _ in range(3):
        trainer.step()
    adapters = adapter_parameters(run.model, run.lora)
    matrices = sum(p.numel() for p in build(run.model).parameters() if p.ndim > 1)
    norms = run.model.parameters() - matrices
    placed = trainer.state.placement()
    assert placed.parameters == 2 * matrices + 4 * (norms + adapters)
    assert (placed.gradients, placed.optimizer) == (4 * adapters, 8 * adapters)
    after = trainer.state.frozen()
    assert after.keys() == before.keys() and all(torch.equal(after[name].values(), value) for name, value in before.items())
    assert before["model/blocks.0.mlp.up.weight"].dtype == torch.bfloat16
    moved = [name for name, state in trainer.tensors().items() if name.endswith("lora_b") and state.values().abs().max() > 0]
    assert len(moved) == 7 * run.model.layers


@pytest.mark.parametrize(("base", "each"), [("int8", 1.0), ("nf4", 0.5625)])
def test_quantized_matrices_cost_their_own_bytes_alone(base: Any, each: float, tmp_path: Path) -> None:
    run = lora_run("precision.compute=bf16", lora=Lora(rank=3, base=base))
    run = replace(run, model=replace(run.model, dim=64, heads=4, ffn=128))
    trainer = tiny_trainer(ALONE, run, tmp_path / "checkpoints")
    before = {name: state.values().clone() for name, state in trainer.state.frozen().items()}
    trainer.step()
    shapes = {name: parameter.shape for name, parameter in build(run.model).named_parameters()}
    blocks = [shape for name, shape in shapes.items() if name.startswith("blocks.") and len(shape) > 1]
    stored = sum(each * shape.numel() + (4 * shape[0] if base == "int8" else 0) for shape in blocks)
    tables = sum(shape.numel() for name, shape in shapes.items() if not name.startswith("blocks.") and len(shape) > 1)
    norms = sum(shape.numel() for shape in shapes.values() if len(shape) == 1)
    placed = trainer.state.placement()
    assert placed.parameters == stored + 2 * tables + 4 * (norms + adapter_parameters(run.model, run.lora))
    after = trainer.state.frozen()
    assert all(torch.equal(after[name].values(), value) for name, value in before.items())


def test_a_checkpoint_holds_adapters_and_their_states_alone(tmp_path: Path) -> None:
    run = lora_run(model="moe", lora=Lora(rank=3, targets=("query", "experts.up")))
    trainer = tiny_trainer(ALONE, run, tmp_path / "checkpoints")
    biases = {name: state.values().clone() for name, state in trainer.state.frozen().items() if state.is_buffer}
    trainer.step()
    assert biases and all(torch.equal(trainer.state.frozen()[name].values(), bias) for name, bias in biases.items())
    path = trainer.save().path
    names = CheckpointReader(Path(path)).names
    assert len(names) == 8 * (
        run.model.layers + (run.model.layers - 1)
    )  # A and B with three states each; the first block has no experts
    assert all(".lora_" in name or "_lora_" in name for name in names)


def all_steps(mesh: Mesh, run: Run, folder: Path, until: int) -> list[float]:
    """The losses up to a step, which is saved."""
    trainer = tiny_trainer(mesh, run, folder)
    trainer.restore()
    losses = [taken.loss for _ in range(until - trainer.progress.step) if (taken := trainer.step()) is not None]
    trainer.save()
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("lora", [Lora(rank=3), Lora(rank=3, base="nf4", dropout=0.2)], ids=["plain", "nf4 and dropout"])
def test_a_checkpoint_of_four_ranks_goes_on_with_one_and_two(lora: Lora, tmp_path: Path) -> None:
    """Adapters and their optimizer states are resharded; the losses are those of four ranks without a stop."""
    hf_models.save(tmp_path / "base", "llama-tied", words=False)
    model = replace(hf_config.model_spec(tmp_path / "base"), from_=str(tmp_path / "base"))
    run = replace(lora_run("train.steps=10", "optimizer.learning_rate=0.01", lora=lora), model=model)
    four = Layout(data=1, tensor=2, shard=2)
    whole = run_ranks(all_steps, 4, replace(run, layout=four), tmp_path / "whole", 5, layout=four)[0]
    run_ranks(all_steps, 4, replace(run, layout=four), tmp_path / "half", 2, layout=four)
    for layout in (Layout(data=1), Layout(data=1, tensor=2), Layout(data=1, shard=2)):
        shutil.copytree(tmp_path / "half", folder := tmp_path / f"{layout.tensor} {layout.shard}")
        later = run_ranks(all_steps, layout.ranks, replace(run, layout=layout), folder, 5, layout=layout)[0]
        assert later == pytest.approx(whole[2:], rel=1e-5), layout
    assert whole[4] < whole[0]


def first_steps(mesh: Mesh, run: Run, folder: Path) -> list[float]:
    trainer = tiny_trainer(mesh, run, folder)
    events = trainer.restore()
    assert isinstance(events[0], WeightsLoaded)
    assert trainer.progress.step == 0 or isinstance(events[-1], Restored)
    return [taken.loss for _ in range(2) if (taken := trainer.step()) is not None]


@pytest.mark.parametrize(
    "layout", [Layout(data=1, tensor=2, shard=2), Layout(data=1, pipeline=2, shard=2, zero=1)], ids=["fsdp", "pipeline"]
)
def test_any_layout_goes_on_with_adapters_and_the_weights_below_them(layout: Layout, tmp_path: Path) -> None:
    hf_models.save(tmp_path / "base", "llama-tied", words=False)
    model = replace(hf_config.model_spec(tmp_path / "base"), from_=str(tmp_path / "base"))
    run = replace(lora_run("train.steps=10", "optimizer.learning_rate=0.01"), model=model)
    alone = tiny_trainer(ALONE, run, tmp_path / "checkpoints")
    assert isinstance(alone.restore()[0], WeightsLoaded)
    expected = hf_models.make("llama-tied").model.layers[1].mlp.up_proj.weight
    assert torch.equal(alone.state.frozen()["model/blocks.1.mlp.up.weight"].values(), expected.detach())
    start = [taken.loss for _ in range(2) if (taken := alone.step()) is not None]
    run = replace(run, layout=layout)
    assert run_ranks(first_steps, 4, run, tmp_path / "none", layout=layout)[0] == pytest.approx(start, rel=1e-5)
    alone.save()
    later = [taken.loss for _ in range(2) if (taken := alone.step()) is not None]
    assert run_ranks(first_steps, 4, run, tmp_path / "checkpoints", layout=layout)[0] == pytest.approx(later, rel=1e-5)


def test_a_rollback_reads_the_weights_once(tmp_path: Path) -> None:
    hf_models.save(tmp_path / "base", "llama", words=False)
    model = replace(hf_config.model_spec(tmp_path / "base"), from_=str(tmp_path / "base"))
    trainer: Trainer = tiny_trainer(ALONE, replace(lora_run(), model=model), tmp_path / "checkpoints")
    trainer.restore()
    trainer.step()
    trainer.save()
    assert [type(event) for event in trainer.restore()] == [Restored]
