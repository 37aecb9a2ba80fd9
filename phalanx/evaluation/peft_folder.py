"""Writes the LoRA adapters of a checkpoint as a folder that Hugging Face's PEFT loads onto the same base model: adapter_config.json and
adapter_model.safetensors. Called by `phalanx export --format peft`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
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
_NOTE = "Adapters of routed experts need transformers 5 and a PEFT with target_parameters (0.17 or newer)."

_LIKE_EXPERTS = ("gate_proj", "up_proj", "down_proj")
"""Names of linear layers that PEFT takes for experts in a model that has some: of shared experts and dense blocks."""
_EXPERTS = re.compile(r"blocks\.(\d+)\.mlp\.experts\.(gate|up|down)")

Matrices = tuple[Tensor, Tensor]
"""A, [rank, in], and B, [out, rank], of one of their linear layers. Of stacked experts, [experts, rank, in] and [experts, out, rank]."""


class Adapters(NamedTuple):
    """The adapters of a checkpoint under the names of transformers."""

    layers: dict[str, Matrices]
    """Of linear layers."""
    parameters: dict[str, Matrices]
    """Of parameters, all of one rank: those that stack the experts of a block, "….mlp.experts.gate_up_proj" and "….mlp.experts.down_proj", and
    weights of linear layers that PEFT would take for experts."""
    rank: int
    """Of parameters, or of layers if there are none."""


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
        for layer, pair in (adapters.layers | _wrapped(adapters.parameters)).items()
        for which, matrix in zip("AB", pair, strict=True)
    }
    with offline_writer.atomic_directory(out) as unfinished:
        (unfinished / CONFIG).write_text(json.dumps(_config(run, adapters, source), indent=2) + "\n")
        save_file(tensors, unfinished / WEIGHTS, {"format": "pt"})
    return Converted(
        path=out, family=hf_config_write.family(run.model), parameters=sum(tensor.numel() for tensor in tensors.values()),
        bytes=sum(tensor.nbytes for tensor in tensors.values()), files=1, dtype=dtype or "fp32",
        notes=(_NOTE,) if adapters.parameters else (),
        source=LocatedCheckpoint(found.checkpoint, found.damaged),
    )  # fmt: skip


def _adapters(run: Run, saved: CheckpointReader, source: str | None) -> Adapters:
    folder = None if source is None else origin_folder(source)
    published = folder is None or not hf_config.is_folder(folder)
    interleaved = published or hf_config.interleaved(hf_config.read_config(folder))  # type: ignore[arg-type]
    parts: dict[str, list[tuple[HFPart, Matrices]]] = {}
    experts: dict[str, dict[str, Matrices]] = {}
    written = set()
    for entry in hf_mapping.table(run.model, interleaved=interleaved):
        a, b = adapter_of(f"model/{entry.name}")
        if saved.shape(a) is None:
            continue
        pair, part = (saved.read(a).float(), saved.read(b).float()), entry.parts[0]
        if stacked := _EXPERTS.fullmatch(entry.name):
            experts.setdefault(f"model.layers.{stacked[1]}.mlp.experts", {})[stacked[2]] = pair
        elif part.expert is None:
            parts.setdefault(part.hf_name.removesuffix(".weight"), []).append((part, pair))
        else:
            continue
        written |= {a, b}
    others = [name for name in saved.names if name.startswith("model/") and name not in written]
    if others:
        raise RunError(
            f"{saved.path} has {others[0].removeprefix('model/')}, which transformers' model does not have: export the merged model "
            "with --format hf."
        )
    layers = {layer: _joined(own) for layer, own in parts.items()}
    like_experts = [layer for layer in layers if run.model.moe is not None and layer.endswith(_LIKE_EXPERTS)]
    parameters = {f"{layer}.weight": layers.pop(layer) for layer in like_experts}
    parameters |= {f"{path}.{name}": pair for path, own in experts.items() for name, pair in _fused(own).items()}
    rank = max([a.shape[-2] for a, _ in parameters.values()], default=run.lora.rank or 0)
    return Adapters(layers, {name: _widened(*pair, rank) for name, pair in parameters.items()}, rank)


def _fused(own: dict[str, Matrices]) -> dict[str, Matrices]:
    """The adapters of one block's experts, as transformers 5 stacks them: gate above up in one parameter, whose ranks add up."""
    fused = {}
    if upper := {name: own[name] for name in ("gate", "up") if name in own}:
        a = torch.cat([pair[0] for pair in upper.values()], 1)
        count, height = next(iter(upper.values()))[1].shape[:2]
        b, column = torch.zeros(count, 2 * height, a.shape[1]), 0
        for name, (_, part) in upper.items():
            top = height if name == "up" else 0
            b[:, top : top + height, column : column + part.shape[2]] = part
            column += part.shape[2]
        fused["gate_up_proj"] = (a, b)
    return fused | ({"down_proj": own["down"]} if "down" in own else {})


def _widened(a: Tensor, b: Tensor, rank: int) -> Matrices:
    """An adapter of another rank, filled up with zeros: PEFT reads a rank for each layer, but warns that it ignores those of parameters."""
    missing = rank - a.shape[-2]
    return F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))


def _wrapped(parameters: dict[str, Matrices]) -> dict[str, Matrices]:
    """As PEFT names and shapes them. It wraps the module of experts once for each parameter, gate and up first, which are inside then."""
    wrapped = {}
    for name, (a, b) in parameters.items():
        module, _, parameter = name.rpartition(".")
        inside = parameter == "gate_up_proj" and f"{module}.down_proj" in parameters
        stacked = a.ndim == 3
        matrices = (a.flatten(0, 1), b.permute(1, 2, 0).flatten(1)) if stacked else (a, b)
        wrapped[f"{module}.base_layer" if inside else module] = matrices
    return wrapped


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


def _config(run: Run, adapters: Adapters, source: str | None) -> dict[str, object]:
    lora: Lora = run.lora
    rank = adapters.rank
    others = {layer: len(a) for layer, (a, _) in adapters.layers.items() if len(a) != rank}
    config: dict[str, object] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": source,
        "r": rank,
        "lora_alpha": lora.scale * rank,
        "rank_pattern": others,
        "alpha_pattern": {layer: lora.scale * own for layer, own in others.items()},
        "target_modules": list(adapters.layers),
        "lora_dropout": 0.0 if adapters.parameters else lora.dropout,  # which PEFT does not have for parameters
        "bias": "none",
        "fan_in_fan_out": hf_config_write.family(run.model) == "gpt2",
        "inference_mode": True,
    }
    return config | ({"target_parameters": list(adapters.parameters)} if adapters.parameters else {})
