"""The weights of a Hugging Face folder as a model needs them, with the table that names each tensor. Training, evaluation and the checks before a
run open folders here.

For models of transformers the table is the identity. But some folders have other names, or other shapes, than the model has in memory: experts one
by one, or a prefix of an earlier version. transformers converts such tensors while it loads them; its own conversions are applied here, one tensor
of the model at a time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from phalanx.checkpointing.hf_folder import WeightsFolder
from phalanx.models import hf_mapping, hf_module
from phalanx.models.hf_mapping import Entry
from phalanx.spec import config_text, hf_config
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec
from phalanx.spec.safetensors_index import SIZES


class OpenWeights(NamedTuple):
    """A folder that was compared with its model: every tensor is there, in its shape."""

    files: WeightsFolder
    spec: ModelSpec
    table: tuple[Entry, ...]


def open_weights(folder: Path, model: ModelSpec | None = None) -> OpenWeights:
    """Raises RunError if the folder does not have what the model needs, by the headers of its files. `model`: the one that gets the weights, if it is
    of transformers although the built-in decoder could compute it; otherwise what the folder describes."""
    configured = model is not None and model.config is not None and hf_config.is_folder(folder)
    spec = model if configured and model is not None else config_text.model_of(folder)
    files = WeightsFolder(folder) if spec.config is None else ConvertedWeights(folder, hf_module.build(spec))
    return OpenWeights(files, spec, hf_mapping.match(files, spec))


@dataclass(frozen=True, slots=True)
class _Conversion:
    """Tensors of the model that are computed from several of the folder, or from one in another shape."""

    target: str
    """The first of the model's tensors."""
    transform: Any
    """transformers' WeightConverter."""
    sources: tuple[tuple[str, str], ...]
    """(Pattern, name) of the folder's tensors, in the order in which transformers takes them."""


class ConvertedWeights(WeightsFolder):
    """The tensors of a folder under the names of a model of transformers, on the meta device."""

    def __init__(self, path: Path, model: nn.Module):
        super().__init__(path)
        self._model: Any = model
        self._plain = WeightsFolder(path)
        self._conversions: dict[str, _Conversion] = {}
        self._values: tuple[_Conversion, Mapping[str, Tensor]] | None = None
        renamed, conversions = _plan(model, list(self._plain.tensors))
        self.tensors = {target: self._plain.tensors[source] for target, source in renamed.items()}
        for conversion in conversions:
            self._add(conversion)

    def _add(self, conversion: _Conversion) -> None:
        first = self._plain.tensors[conversion.sources[0][1]]
        unread = {name: torch.empty(self._plain.tensors[name].shape, device="meta") for _, name in conversion.sources}
        try:
            converted = self._convert(conversion, unread)
        except Exception as error:  # tensors that do not fit together may raise anything
            raise RunError(
                f"{self.path}: transformers cannot make {conversion.target} from {conversion.sources[0][1]} and {len(unread) - 1} more tensors: "
                f"{type(error).__name__}: {error}."
            ) from error
        for name, tensor in converted.items():
            self._conversions[name] = conversion
            size = math.prod(tensor.shape) * SIZES.get(first.dtype, 0)
            self.tensors[name] = replace(first, shape=tuple(tensor.shape), begin=0, end=size)

    def rows(self, name: str, first: int, last: int) -> Tensor:
        conversion = self._conversions.get(name)
        if conversion is None:
            return super().rows(name, first, last)
        if self._values is None or self._values[0] is not conversion:
            self._values = None  # frees the last ones before the next are read
            self._values = (
                conversion,
                self._convert(conversion, {source: self._read(source) for _, source in conversion.sources}),
            )
        values = self._values[1][name]
        return values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1)[first:last]

    def _read(self, name: str) -> Tensor:
        shape = self._plain.tensors[name].shape
        count = math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)
        return self._plain.rows(name, 0, count).view(shape)

    def _convert(self, conversion: _Conversion, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        transform = deepcopy(conversion.transform)
        for pattern, name in conversion.sources:
            transform.add_tensor(conversion.target, name, pattern, tensors[name])
        converted = transform.convert(conversion.target, model=self._model, config=self._model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def _plan(model: Any, names: list[str]) -> tuple[dict[str, str], list[_Conversion]]:
    """The folder's name of each of the model's tensors, and those that are converted. A tensor that the model lacks keeps its name."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in mapping if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    renamed: dict[str, str] = {}
    collected: dict[str, tuple[Any, list[tuple[str, str]]]] = {}
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:  # it is in the form of the model already
            target, pattern = rename_source_key(name, [], [], base_model_prefix=prefix, meta_state_dict=state)
        if pattern is None or target not in state:
            renamed[target if target in state else name] = name
        else:
            collected.setdefault(target, (by_pattern[pattern], []))[1].append((pattern, name))
    return renamed, [_Conversion(target, rule, tuple(sources)) for target, (rule, sources) in collected.items()]
