"""Reads the model of a checkpoint that holds LoRA adapters: the weights below them come from `model.from`, or follow from the seed, and the
adapters are added as rows are read. Opening and exporting a model read it like a checkpoint of whole weights."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from phalanx.checkpointing import directory
from phalanx.checkpointing.base_digest import check_base
from phalanx.checkpointing.find_checkpoint import FoundCheckpoint, find
from phalanx.checkpointing.restore import CheckpointReader
from phalanx.models import hf_mapping, init
from phalanx.models.custom import axes_of
from phalanx.spec import hf_config
from phalanx.spec.adapted_layers import A, B
from phalanx.spec.model import ModelSpec
from phalanx.spec.origin import origin_folder
from phalanx.spec.run import Run
from phalanx.spec.tensor_slice import Box, TensorSlice
from phalanx.training.hf_weights import open_weights
from phalanx.transforms.quantize import quantized_matrices, rounded

_BLOCK = 64 << 20
"""Bytes to read at a time."""


class SavedWeights(Protocol):
    """The tensors of a model by name, such as "model/embed.weight", read a few rows at a time."""

    def shape(self, name: str) -> tuple[int, ...] | None: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def row_ranges(self, name: str, multiple: int = 1) -> list[tuple[int, int]]: ...
    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor: ...


def saved_weights(found: FoundCheckpoint, run: Run) -> SavedWeights:
    """The weights of a checkpoint's model; with LoRA, merged with its adapters. Raises RunError if the weights below them are not those that
    they were trained on."""
    saved = CheckpointReader(found.checkpoint)
    return saved if run.lora.rank is None else MergedWeights(saved, found, run)


def base_of(found: FoundCheckpoint) -> str | None:
    """The `model.from` of a checkpoint's run file."""
    given = tomllib.loads(found.run).get("model", {}).get("from")
    return given if isinstance(given, str) else None


def checked_base(found: FoundCheckpoint) -> str | None:
    """As `base_of`, after a comparison with the digest in the checkpoint."""
    source = base_of(found)
    check_base(source, directory.read_marker(found.checkpoint).run.base, found.checkpoint)
    return source


def adapter_of(name: str) -> tuple[str, str]:
    """Names of the adapter of a model's tensor, if it has one."""
    stem = f"{name.removesuffix('.weight')}." if name.endswith(".weight") else f"{name}_"
    return stem + A, stem + B


class MergedWeights:
    """The model of a checkpoint of adapters. With `lora.base`, adapters are added to the quantized weights that they were trained on. Values are in fp32, to be converted to `dtype`: that of the weights below."""

    def __init__(self, saved: CheckpointReader, found: FoundCheckpoint, run: Run):
        self._saved, self._scale, self._format = saved, run.lora.scale, run.lora.base
        model = init.build(run.model)
        self._shapes = {f"model/{name}": tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        self._quantized = {f"model/{name}" for name in quantized_matrices(model, axes_of(model))}
        self._initial, self._seed, self._spec = init.table(model), run.train.seed, run.model
        source, self._base = checked_base(found), None
        if source is not None:
            folder = origin_folder(source)
            self._base = (
                _FolderWeights(folder, run.model) if hf_config.is_folder(folder) else CheckpointReader(find(folder).checkpoint)
            )

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._shapes.get(name)

    def dtype(self, name: str) -> torch.dtype:
        has = self._base is not None and self._base.shape(name) is not None
        return self._base.dtype(name) if has and self._base is not None else torch.float32

    def row_ranges(self, name: str, multiple: int = 1) -> list[tuple[int, int]]:
        shape = self._shapes[name] or (1,)
        step = max(1, _BLOCK // max(1, 4 * math.prod(shape[1:]) * multiple)) * multiple
        return [(first, min(first + step, shape[0])) for first in range(0, shape[0], step)]

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        """Rows first … last with the adapter added."""
        end = self._shapes[name][0] if last is None else last
        rows = self._frozen(name, first, end).float()
        if self._format is not None and name in self._quantized:
            rows = rounded(rows, self._format)  # what the adapters were trained on
        a, b = adapter_of(name)
        if self._saved.shape(a) is None:
            return rows
        left = self._saved.read(b, first, end).float()
        right = self._saved.read(a, first, end) if rows.ndim == 3 else self._saved.read(a)  # stacked experts have one each
        return rows.add_(torch.matmul(left, right.float()), alpha=self._scale)

    def _frozen(self, name: str, first: int, last: int) -> Tensor:
        if self._base is not None and self._base.shape(name) is not None:
            return self._base.read(name, first, last)
        # Weights that the folder lacks have their initial values, as in training.
        shape, plain = self._shapes[name], name.removeprefix("model/")
        values = torch.zeros(last - first, *shape[1:])
        if not plain.endswith("router.bias"):
            box = Box((first, *[0] * (len(shape) - 1)), tuple(values.shape))
            init.fill(values, self._seed, plain, self._spec, TensorSlice(shape, (box,)), self._initial)
        return values


class _FolderWeights:
    """The weights of a Hugging Face folder under our names."""

    def __init__(self, folder: Path, model: ModelSpec):
        self._files, _, table = open_weights(folder, model)
        self._entries = {f"model/{entry.name}": entry for entry in table}

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self._entries[name].shape if name in self._entries else None

    def dtype(self, name: str) -> torch.dtype:
        return self._files.dtype(self._entries[name].parts[0].hf_name)

    def read(self, name: str, first: int = 0, last: int | None = None) -> Tensor:
        entry = self._entries[name]
        end = entry.shape[0] if last is None else last
        box = Box((first, *[0] * (len(entry.shape) - 1)), (end - first, *entry.shape[1:]))
        values = torch.empty(box.shape, dtype=self.dtype(name))
        hf_mapping.fill({entry.name: values}, (entry,), self._files.rows, {entry.name: TensorSlice(entry.shape, (box,))})
        return values
