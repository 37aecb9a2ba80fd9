"""LoRA adapters after training: a model is opened, exported merged, and exported for PEFT, and each computes the logits of the model in
training. PEFT itself is asked where it is installed."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import hf_models
import pytest
import torch
from torch import Tensor

import phalanx as px
from phalanx.evaluation.convert import export_checkpoint, import_folder
from phalanx.evaluation.open_model import open_model
from phalanx.evaluation.peft_folder import export_adapters
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.run import Lora

EXPERTS = ["attention.*", "experts.*"]
RUN = """\
[model]
from = "{base}"
[data]
source = "memory"
tokenizer = "{base}-tokenizer"
documents = ["the quick brown fox jumps over the lazy dog, pack my box with five dozen liquor jugs", "the five boxing wizards jump over the lazy dog of my five boxes"]
eval_fraction = 0.0
[train]
batch = 2
sequence_length = 16
steps = 4
[optimizer]
learning_rate = 0.02
schedule = "constant"
[lora]
rank = 4
targets = {targets}
[cluster]
device = "cpu"
threads = 1
"""


def trained(folder: Path, family: str, targets: list[str] | None = None, *changes: str, **config: Any) -> px.Trainer:
    """A trainer whose adapters have left zero, saved in `folder`/run/checkpoints."""
    hf_models.save(folder / "base", family, words=False, **config)
    hf_models.save_tokenizer(folder / "base-tokenizer")
    run = loads(RUN.format(base=folder / "base", targets=json.dumps(targets or [])), overrides=list(changes))
    trainer = px.trainer(run, checkpoints=folder / "run" / "checkpoints")
    for _ in range(4):
        trainer.step()
    trainer.save()
    return trainer


def live_logits(trainer: px.Trainer, ids: Tensor) -> Tensor:
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    with torch.no_grad():
        return trainer.model.eval()(ids, positions)


def checkpoint(folder: Path) -> Path:
    return folder / "run" / "checkpoints" / "step-00000004"


@pytest.mark.parametrize(
    ("family", "targets"), [("llama-3.1", None), ("gpt2", None), ("deepseek", EXPERTS), ("mixtral", EXPERTS)]
)
def test_opened_and_merged_models_are_the_model_in_training(family: str, targets: list[str] | None, tmp_path: Path) -> None:
    trainer, ids = trained(tmp_path, family, targets), hf_models.tokens(24)
    live = live_logits(trainer, ids)
    with trainer.sharded.adapters.off():  # type: ignore[union-attr]
        assert (live_logits(trainer, ids) - live).abs().max() > 0.05, "the adapters do nothing"
    opened = open_model(checkpoint(tmp_path), "cpu")
    with torch.no_grad():
        ours = opened.model(ids, torch.arange(24).expand_as(ids))
    torch.testing.assert_close(ours, live, atol=1e-4, rtol=1e-4)
    export_checkpoint(checkpoint(tmp_path), tmp_path / "merged")
    transformers = pytest.importorskip("transformers")
    theirs = hf_models.logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").float(), ids)
    torch.testing.assert_close(theirs, live, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "targets", "base"), [("llama-3.1", None, "nf4"), ("gpt2", ["key", "up"], "nf4"), ("mixtral", EXPERTS, "int8")]
)
def test_a_quantized_base_is_merged_as_it_was_trained_on(
    family: str, targets: list[str] | None, base: str, tmp_path: Path
) -> None:
    trainer, ids = trained(tmp_path, family, targets, f"lora.base={base}"), hf_models.tokens(24)
    live = live_logits(trainer, ids)
    with torch.no_grad():
        ours = open_model(checkpoint(tmp_path), "cpu").model(ids, torch.arange(24).expand_as(ids))
    torch.testing.assert_close(ours, live, atol=1e-4, rtol=1e-4)
    export_checkpoint(checkpoint(tmp_path), tmp_path / "merged")
    transformers = pytest.importorskip("transformers")
    theirs = hf_models.logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").float(), ids)
    torch.testing.assert_close(theirs, live, atol=1e-4, rtol=1e-4)
    original = hf_models.logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").float(), ids)
    with trainer.sharded.adapters.off():  # type: ignore[union-attr]
        assert (live_logits(trainer, ids) - original).abs().max() > 0.01, "nothing was quantized"


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama-3.1", None),
        ("qwen3", ["query", "value"]),
        ("gpt2", None),
        ("gpt2-untied", ["key", "blocks.1.mlp.up"]),
        ("deepseek", ["blocks.*.attention.*"]),
        ("mixtral", ["query", "output"]),
        ("qwen3-moe", EXPERTS),
        ("qwen3-moe", ["experts.up"]),
        ("mixtral", ["experts.down"]),
        ("deepseek", ["output", "mlp.up", "experts.gate", "experts.up", "experts.down", "shared.up"]),
    ],
)
def test_peft_loads_exported_adapters(family: str, targets: list[str] | None, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs peft: pip install peft")
    import transformers

    trainer, ids = trained(tmp_path, family, targets), hf_models.tokens(24)
    export_adapters(checkpoint(tmp_path), tmp_path / "adapters")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").float().eval()
    before = hf_models.logits(base, ids)
    theirs = hf_models.logits(peft.PeftModel.from_pretrained(base, str(tmp_path / "adapters")), ids)
    live = live_logits(trainer, ids)
    torch.testing.assert_close(theirs, live, atol=1e-4, rtol=1e-4)
    assert (theirs - before).abs().max() > 0.05, "the adapters do nothing"


def test_peft_folder_adds_up_to_the_merged_weights(tmp_path: Path) -> None:
    """Without peft: the folder's matrices, by the formula of the LoRA paper, against the merged export."""
    from safetensors.torch import load_file

    trained(tmp_path, "llama-tied")
    export_adapters(checkpoint(tmp_path), tmp_path / "adapters")
    export_checkpoint(checkpoint(tmp_path), tmp_path / "merged")
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 8.0)
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    base, merged = (load_file(tmp_path / folder / "model.safetensors") for folder in ("base", "merged"))
    assert len(config["target_modules"]) == 3 * 7 and len(adapters) == 2 * 3 * 7
    for name, weight in base.items():
        layer = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{layer}.lora_A.weight" in adapters:
            weight = weight + 2.0 * adapters[f"{layer}.lora_B.weight"] @ adapters[f"{layer}.lora_A.weight"]
        torch.testing.assert_close(merged[name], weight, atol=1e-6, rtol=1e-6)


def test_a_checkpoint_of_adapters_is_small(tmp_path: Path) -> None:
    trained(tmp_path, "llama", None, "lora.rank=1", hidden_size=96, intermediate_size=256)
    saved = sum(file.stat().st_size for file in checkpoint(tmp_path).rglob("*") if file.is_file())
    model = (tmp_path / "base" / "model.safetensors").stat().st_size
    assert saved < model / 3, f"{saved} bytes next to {model} of the model"


def test_adapters_of_experts_in_the_peft_folder(tmp_path: Path) -> None:
    """Without peft: its formula for stacked parameters, applied to the folder, against the merged export."""
    from safetensors.torch import load_file

    trained(tmp_path, "qwen3-moe", EXPERTS)
    assert "transformers 5" in export_adapters(checkpoint(tmp_path), tmp_path / "adapters").notes[0]
    export_checkpoint(checkpoint(tmp_path), tmp_path / "merged")
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert config["r"] == 8 and config["lora_alpha"] == 16.0 and len(config["target_parameters"]) == 2 * 3
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    module = "base_model.model.model.layers.1.mlp.experts"
    added = {}
    for name, path in (("gate_up", f"{module}.base_layer"), ("down", module)):
        a, b = (adapters[f"{path}.lora_{which}.weight"] for which in "AB")
        added[name] = 2.0 * torch.einsum("ore,eri->eoi", b.view(len(b), -1, 6), a.view(6, -1, a.shape[1]))
    base, merged = (load_file(tmp_path / folder / "model.safetensors") for folder in ("base", "merged"))
    for expert in range(6):
        stem = f"model.layers.1.mlp.experts.{expert}"
        gate, up = added["gate_up"][expert].chunk(2)
        for word, delta in (("gate", gate), ("up", up), ("down", added["down"][expert])):
            name = f"{stem}.{word}_proj.weight"
            torch.testing.assert_close(merged[name], base[name] + delta, atol=1e-6, rtol=1e-6)
            assert delta.abs().max() > 0.001


def test_a_changed_or_missing_base_is_refused(tmp_path: Path) -> None:
    trained(tmp_path, "llama")
    shutil.move(tmp_path / "base", tmp_path / "kept")
    with pytest.raises(RunError, match=r"LoRA adapters of model.from = .*which is not there"):
        open_model(checkpoint(tmp_path), "cpu")
    model = hf_models.make("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(1.01)  # another model of the same shape
    model.save_pretrained(tmp_path / "base")
    for use in (
        lambda: open_model(checkpoint(tmp_path), "cpu"),
        lambda: export_adapters(checkpoint(tmp_path), tmp_path / "out"),
    ):
        with pytest.raises(RunError, match="adapters of other weights than"):
            use()
    run = loads(RUN.format(base=tmp_path / "base", targets="[]"))
    with pytest.raises(RunError, match="adapters of other weights than"):
        px.trainer(run, checkpoints=checkpoint(tmp_path).parent).restore()


def test_a_run_directory_below_adapters(tmp_path: Path) -> None:
    """The weights below may also be an imported run; a checkpoint more there makes them others."""
    hf_models.save(tmp_path / "hf", "qwen3", words=False)
    hf_models.save_tokenizer(tmp_path / "base-tokenizer")
    import_folder(tmp_path / "hf", tmp_path / "base")
    run = loads(RUN.format(base=tmp_path / "base", targets="[]"))
    trainer = px.trainer(run, checkpoints=tmp_path / "run" / "checkpoints")
    for _ in range(4):
        trainer.step()
    trainer.save()
    ids = hf_models.tokens(24)
    with torch.no_grad():
        ours = open_model(checkpoint(tmp_path), "cpu").model(ids, torch.arange(24).expand_as(ids))
    torch.testing.assert_close(ours, live_logits(trainer, ids), atol=1e-4, rtol=1e-4)
    export_checkpoint(checkpoint(tmp_path), tmp_path / "merged")
    export_adapters(checkpoint(tmp_path), tmp_path / "adapters")
    further = px.trainer(replace(run, lora=Lora()), checkpoints=tmp_path / "base" / "checkpoints")
    further.step()
    further.save()
    with pytest.raises(RunError, match="adapters of other weights than"):
        export_adapters(checkpoint(tmp_path), tmp_path / "again")


def test_whole_models_have_no_peft_format(tmp_path: Path) -> None:
    hf_models.save(tmp_path / "base", "llama", words=False)
    hf_models.save_tokenizer(tmp_path / "base-tokenizer")
    text = RUN.format(base=tmp_path / "base", targets="[]").replace("rank = 4\n", "")
    px.trainer(loads(text), checkpoints=tmp_path / "run" / "checkpoints").save()
    with pytest.raises(RunError, match=r"has no \[lora\]"):
        export_adapters(tmp_path / "run" / "checkpoints" / "step-00000000", tmp_path / "out")
