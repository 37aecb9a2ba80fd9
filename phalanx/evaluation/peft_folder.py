"""Writes the LoRA adapters of a checkpoint as a folder that Hugging Face's PEFT loads onto the same base model: adapter_config.json and
adapter_model.safetensors. Called by `phalanx export --format peft`."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from phalanx.checkpointing import offline_writer
from phalanx.checkpointing.find_checkpoint import LocatedCheckpoint, find
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.evaluation.adapters import adapter_of, checked_base
from phalanx.evaluation.convert import TORCH, Converted
from phalanx.evaluation.open_model import run_of
from phalanx.models import hf_mapping
from phalanx.models.hf_mapping import HFPart
from phalanx.spec import hf_config, hf_config_write
from phalanx.spec.errors import RunError
from phalanx.spec.origin import origin_folder
from phalanx.spec.run import Lora, Run

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."

Matrices = tuple[Tensor, Tensor]
"""A, [rank, in], and B, [out, rank], of one of their linear layers."""


def export_adapters(path: Path | str, out: Path, dtype: str | None = None) -> Converted:
    """Write the adapters of a checkpoint. `dtype`: number format of the matrices; None: fp32, as they are saved."""
    found = find(path)
    run = run_of(found)
    if run.lora.rank is None:
        raise RunError(f"{found.source} has no [lora]: the checkpoint holds a whole model. Export it with --format hf.")
    source = checked_base(found)
    adapters = _adapters(run, CheckpointReader(found.checkpoint), source)
    tensors = {
        f"{_PREFIX}{layer}.lora_{which}.weight": matrix.to(TORCH[dtype or "fp32"]).contiguous()
        for layer, pair in adapters.items()
        for which, matrix in zip("AB", pair, strict=True)
    }
    with offline_writer.atomic_directory(out) as unfinished:
        (unfinished / CONFIG).write_text(json.dumps(_config(run, adapters, source), indent=2) + "\n")
        save_file(tensors, unfinished / WEIGHTS, {"format": "pt"})
    return Converted(
        path=out, family=hf_config_write.family(run.model), parameters=sum(tensor.numel() for tensor in tensors.values()),
        bytes=sum(tensor.nbytes for tensor in tensors.values()), files=1, dtype=dtype or "fp32", notes=(),
        source=LocatedCheckpoint(found.checkpoint, found.damaged),
    )  # fmt: skip


def _adapters(run: Run, saved: CheckpointReader, source: str | None) -> dict[str, Matrices]:
    """The adapters by the names of their linear layers in transformers."""
    folder = None if source is None else origin_folder(source)
    published = folder is None or not hf_config.is_folder(folder)
    interleaved = published or hf_config.interleaved(hf_config.read_config(folder))  # type: ignore[arg-type]
    parts: dict[str, list[tuple[HFPart, Matrices]]] = {}
    written = set()
    for entry in hf_mapping.table(run.model, interleaved=interleaved):
        a, b = adapter_of(f"model/{entry.name}")
        if saved.shape(a) is None:
            continue
        written |= {a, b}
        part = entry.parts[0]
        if part.expert is not None:
            raise RunError(
                f"{saved.path} has adapters of routed experts ({entry.name}), and PEFT's format is for linear layers: export the merged "
                "model with --format hf."
            )
        parts.setdefault(part.hf_name.removesuffix(".weight"), []).append(
            (part, (saved.read(a).float(), saved.read(b).float()))
        )
    others = [name for name in saved.names if name.startswith("model/") and name not in written]
    if others:
        raise RunError(
            f"{saved.path} has {others[0].removeprefix('model/')}, which transformers' model does not have: export the merged model "
            "with --format hf."
        )
    return {layer: _joined(own) for layer, own in parts.items()}


def _joined(parts: list[tuple[HFPart, Matrices]]) -> Matrices:
    """The adapter of one of their linear layers, which may hold several of ours side by side, as GPT-2's query, key and value: their ranks
    add up, and each has rows of its own in B."""
    first = parts[0][0]
    rows = first.shape[1] if first.transposed else first.shape[0]
    joined = torch.zeros(rows, sum(a.shape[0] for _, (a, _) in parts))
    column = 0
    for part, (a, b) in parts:
        if part.pairs is not None:
            b = hf_mapping.to_hf(part, b)
        top = (part.columns or (0, 0))[0] if part.transposed else part.rows[0]
        joined[top : top + len(b), column : column + a.shape[0]] = b
        column += a.shape[0]
    return torch.cat([a for _, (a, _) in parts]), joined


def _config(run: Run, adapters: dict[str, Matrices], source: str | None) -> dict[str, object]:
    lora: Lora = run.lora
    assert lora.rank is not None
    alpha = lora.scale * lora.rank
    wider = {layer: len(a) for layer, (a, _) in adapters.items() if len(a) != lora.rank}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": lora.rank,
        "lora_alpha": alpha,
        "rank_pattern": wider,
        "alpha_pattern": {layer: lora.scale * rank for layer, rank in wider.items()},
        "target_modules": list(adapters),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": hf_config_write.family(run.model) == "gpt2",
        "inference_mode": True,
    }
