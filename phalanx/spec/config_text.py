"""`model.config`: the text of a config.json, for models of transformers that the built-in decoder does not compute. Reads it from a file, a
folder or the cache of the hub, refuses what can never be trained, and reads off the sizes that plans and checks need. Knows neither torch nor
transformers: whether transformers has such a model is known when it is built (`models/hf_module`)."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.spec import hf_config
from phalanx.spec.errors import RunError, shorten, toml
from phalanx.spec.hub import local_path
from phalanx.spec.json_value import JsonObject
from phalanx.spec.model import ModelSpec

_SIZES: dict[str, tuple[str, ...]] = {
    "dim": ("hidden_size", "n_embd", "d_model"),
    "layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size"),
    "vocab": ("vocab_size",),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx"),
}
"""Fields of ModelSpec, and what configs call them."""
FIELDS = (*_SIZES, "tied", "init_std")
"""Fields of ModelSpec that a config gives."""
_LAYER_KINDS = ("layer_types", "layers_block_type")
"""Lists of the kind of each layer, where a config has no number of layers."""
_NEEDED = ("dim", "layers", "vocab")


def is_text(value: str) -> bool:
    """Whether a value of `model.config` is the text itself, rather than the name of a file, a folder or a model of the hub."""
    return value.lstrip().startswith("{")


def read(value: str) -> str:
    """The canonical text of what a value of `model.config` is or names. Raises RunError."""
    if is_text(value):
        return canonical(parse(value, "model.config"))
    path = local_path(value)
    if not os.path.exists(path):
        raise RunError(
            f"model.config = {toml(value)} does not exist: name a config.json, a folder that holds one, or a model of the Hugging Face hub."
        )
    file = path / hf_config.CONFIG if path.is_dir() else path
    try:
        text = file.read_text()
    except (OSError, ValueError) as error:
        reason = "it is not there" if isinstance(error, FileNotFoundError) else str(error)
        raise RunError(f"model.config = {toml(value)}: {file} cannot be read ({reason}).") from None
    return canonical(parse(text, str(file)))


def parse(text: str, where: str) -> JsonObject:
    """The settings of a config.json. `where` names it in messages."""
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RunError(f"{where} is not JSON ({error}): {shorten(text.strip())}") from None
    if not isinstance(values, dict):
        raise RunError(f"{where} is not a table of settings.")
    return values


def canonical(values: JsonObject) -> str:
    """The same settings as the same text."""
    return json.dumps(values, sort_keys=True, separators=(",", ":"))


def model_of(folder: Path) -> ModelSpec:
    """The model that a folder of Hugging Face weights describes: of the built-in decoder if that computes the same, else of transformers."""
    try:
        return hf_config.model_spec(folder)
    except hf_config.UnsupportedModel as unsupported:
        values = hf_config.read_config(folder)
        if "model_type" not in values and unsupported.is_known:  # an old or a handwritten config: the setting is the problem
            raise
        return spec_of(values, str(folder / hf_config.CONFIG))


def spec_of(values: JsonObject, where: str = "model.config") -> ModelSpec:
    """The model of a config.json that transformers builds. Raises RunError if it can never be trained; `where` names the file."""
    _trainable(values, where)
    sizes: dict[str, Any] = {
        field: size for field, names in _SIZES.items() if (size := _size(values, names, where)) is not None
    }
    kinds = next((found for name in _LAYER_KINDS if isinstance(found := _find(values, name), list) and found), None)
    if "layers" not in sizes and kinds is not None:
        sizes["layers"] = len(kinds)
    for field in _NEEDED:
        if field not in sizes:
            names = " or ".join(_SIZES[field])
            raise RunError(f"{where} has no {names}: save the model again with transformers, which writes it.")
    sizes.setdefault("heads", 1)  # a model without attention
    spec = ModelSpec(config=canonical(values), tied=_find(values, "tie_word_embeddings") is True, **sizes)
    std = _find(values, "initializer_range")
    return replace(spec, init_std=float(std)) if isinstance(std, int | float) and std > 0 else spec


def model_type(text: str) -> str:
    """The `model_type` of a text that `spec_of` has read."""
    return str(json.loads(text)["model_type"])


def _trainable(values: JsonObject, where: str) -> None:
    kind = values.get("model_type")
    if not isinstance(kind, str):
        has = "no model_type" if kind is None else f"model_type = {json.dumps(kind)}, which is no name"
        raise RunError(f'{where} has {has}: add the name by which transformers knows the model, such as "model_type": "phi3".')
    if values.get("auto_map"):
        raise RunError(
            f"{where}: auto_map = {shorten(json.dumps(values['auto_map']))}: the model's code comes with the weights, and such code is not run. "
            "Take a model whose code is in transformers and remove auto_map, or write it as a module of your own (model.module, docs/own-model.md)."
        )
    if values.get("quantization_config"):
        raise RunError(
            f"{where}: quantization_config = {shorten(json.dumps(values['quantization_config']))}: quantized weights cannot be trained. "
            "Name the original weights; lora.base quantizes them while they are loaded."
        )
    if values.get("is_encoder_decoder"):
        raise RunError(f"{where}: is_encoder_decoder = true: only decoders are trained. Name a model without an encoder.")


def _find(values: JsonObject, name: str) -> Any:
    """A setting of the model of text, which a model of text and images has in a table of its own."""
    text = values.get("text_config")
    found = values.get(name)
    return text.get(name) if found is None and isinstance(text, dict) else found


def _size(values: JsonObject, names: tuple[str, ...], where: str) -> int | None:
    for name in names:
        if (value := _find(values, name)) is not None:
            if isinstance(value, list) and value and all(type(each) is int for each in value):  # of each layer
                value = max(value)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise RunError(f"{where}: {name} = {json.dumps(value)}: a whole number above 0 is needed here.")
            return value
    return None
