"""Loads the weights that training starts from: `model.from`, a Hugging Face folder or a run directory. The trainer calls it once, after
the model is built and before the first step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from phalanx.checkpointing.find_checkpoint import find
from phalanx.checkpointing.hf_folder import WeightsFolder
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.checkpointing.restore import load as load_tensors
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.models import hf_mapping
from phalanx.models.hf_mapping import Entry
from phalanx.spec import hf_config
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.training.hf_weights import open_weights
from phalanx.transforms.quantize import QuantizedTensor

Shapes = Mapping[str, tuple[int, ...]]


def load(tensors: Mapping[str, StateTensor], shapes: Shapes, folder: Path, model: ModelSpec | None = None) -> None:
    """Fills this rank's tensors in place and casts them if dtypes differ; `shapes`: those of the whole model. `model`: if it is of transformers.

    Multi-token prediction modules and router biases, which serve training only, keep their initial values if the folder lacks them.
    Any other mismatch is refused by name before a value changes.
    """
    quantized = {name: state.tensor for name, state in tensors.items() if isinstance(state.tensor, QuantizedTensor)}
    if hf_config.is_folder(folder):
        files, _, table = open_weights(folder, model)
        _check(folder, shapes, {entry.name: entry.shape for entry in table})
        values = {name: state.tensor for name, state in tensors.items() if isinstance(state.tensor, Tensor)}
        slices = {name: state.slice for name, state in tensors.items()}
        hf_mapping.fill(values, tuple(entry for entry in table if entry.name in values), files.rows, slices)
        entries = {entry.name: entry for entry in table}
        for name, matrix in quantized.items():
            matrix.fill(partial(_read_entry, entries[name], files))
        return
    checkpoint = find(folder).checkpoint
    reader = CheckpointReader(checkpoint)
    available = {name: shape for name in shapes if (shape := reader.shape(f"model/{name}")) is not None}
    _check(checkpoint, shapes, available)
    plain = [name for name in tensors if name in available and name not in quantized]
    load_tensors(checkpoint, {f"model/{name}": tensors[name] for name in plain})
    for name, matrix in quantized.items():
        matrix.fill(partial(_read_saved, name, checkpoint))


def _read_entry(entry: Entry, files: WeightsFolder, values: Tensor, part: TensorSlice) -> None:
    hf_mapping.fill({entry.name: values}, (entry,), files.rows, {entry.name: part})


def _read_saved(name: str, checkpoint: Location, values: Tensor, part: TensorSlice) -> None:
    load_tensors(checkpoint, {f"model/{name}": StateTensor(values, part)})


def _check(folder: Path | Location, shapes: Shapes, available: Shapes) -> None:
    problems = []
    for name, shape in shapes.items():
        if name not in available and not _optional(name):
            problems.append(f"model.from = {folder} lacks {name}, which the model of this run has, of shape {list(shape)}.")
        elif name in available and available[name] != shape:
            problems.append(
                f"model.from = {folder} has {name} of shape {list(available[name])}; the model of this run has {list(shape)}: "
                "take back the sizes that were changed in [model]."
            )
    extra = [name for name in available if name not in shapes and not _optional(name)]
    problems += [f"model.from = {folder} has {name}, which the model of this run lacks." for name in extra]
    if problems:
        raise RunError(problems[:10])


def _optional(name: str) -> bool:
    return name.startswith("mtp.") or name.endswith("router.bias")
