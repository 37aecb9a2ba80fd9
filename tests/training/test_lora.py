"""A trainer with LoRA: what is trained, what it costs, what a checkpoint holds, and that weights of a Hugging Face folder are below the
adapters on every layout, at the start and after a resumption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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
