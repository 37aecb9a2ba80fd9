"""Weights to start training from: `model.from`, a Hugging Face folder or a run directory. The trainer calls it once, after the
model was built and before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from phalanx.checkpointing.find_checkpoint import find
from phalanx.checkpointing.hf_folder import WeightsFolder
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.checkpointing.restore import load as load_tensors
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.models import hf_mapping, hf_names
from phalanx.spec import hf_config
from phalanx.spec.errors import RunError


def load(tensors: Mapping[str, StateTensor], shapes: Mapping[str, tuple[int, ...]], folder: Path) -> None:
    """Fill this rank's tensors, whole ones or parts, in place, casting where formats differ; `shapes`: of the whole model.

    What serves training only and is not in the folder keeps its initial values: modules of multi-token prediction, a router's
    bias. Anything else that does not fit is refused by name before a value is changed.
    """
    if hf_config.is_folder(folder):
        spec = hf_config.model_spec(folder)
        files = WeightsFolder(folder)
        table = hf_names.match(files, spec, hf_config.interleaved(hf_config.read_config(folder)))
        _fit(folder, shapes, {entry.name: entry.shape for entry in table})
        ours = tuple(entry for entry in table if entry.name in tensors)
        offsets = {name: piece.slice.offset for name, piece in tensors.items()}
        values = {entry.name: _read(tensors[entry.name]) for entry in ours}
        hf_mapping.fill(values, ours, files.rows, offsets)
        for name, value in values.items():
            _write(tensors[name], value)
        return
    checkpoint = find(folder).checkpoint
    saved = CheckpointReader(checkpoint)
    found = {name: shape for name in shapes if (shape := saved.shape(f"model/{name}")) is not None}
    _fit(checkpoint, shapes, found)
    load_tensors(checkpoint, {f"model/{name}": tensors[name] for name in tensors if name in found})


def _read(piece: StateTensor) -> Tensor:
    return piece.tensor if isinstance(piece.tensor, Tensor) else piece.tensor.read()


def _write(piece: StateTensor, value: Tensor) -> None:
    if not isinstance(piece.tensor, Tensor):
        piece.tensor.write(value)


def _fit(folder: Path | Location, shapes: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> None:
    problems = []
    for name, shape in shapes.items():
        if name not in found and not _optional(name):
            problems.append(f"model.from = {folder} lacks {name}, which the model of this run has, of shape {list(shape)}.")
        elif name in found and found[name] != shape:
            problems.append(
                f"model.from = {folder} has {name} of shape {list(found[name])}; the model of this run has {list(shape)}: "
                "take back the sizes that were changed in [model]."
            )
    extra = [name for name in found if name not in shapes and not _optional(name)]
    problems += [f"model.from = {folder} has {name}, which the model of this run lacks." for name in extra]
    if problems:
        raise RunError(problems[:10])


def _optional(name: str) -> bool:
    return name.startswith("mtp.") or name.endswith("router.bias")
