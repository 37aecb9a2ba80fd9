"""Reads Hugging Face's config.json into a ModelSpec, for `model.from` and `phalanx import`. `spec/hf_config_write` is the inverse.
An unsupported setting that would change what the model computes is refused by key and value; settings that affect only the noise of
training (dropout, router jitter) are ignored."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from phalanx.spec import safetensors_index
from phalanx.spec.errors import RunError
from phalanx.spec.json_value import Json, JsonObject
from phalanx.spec.keys import KEYS
from phalanx.spec.model import Mla, ModelSpec, Moe, RopeScaling

CONFIG = "config.json"
_FULL, _SLIDING = LAYER_TYPES = ("full_attention", "sliding_attention")
"""Kinds of layers: without and with a sliding window."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "attention_bias mlp_bias": (False,),
    "add_cross_attention scale_attn_by_inverse_layer_idx is_encoder_decoder": (False,),
    "scale_attn_weights": (True,),
    "logit_scale logits_scaling residual_multiplier embedding_multiplier decoder_sparse_step moe_layer_freq": (1,),
    "quantization_config final_logit_softcapping attn_logit_softcapping attention_multiplier": (),
    "mlp_only_layers": ([],),
    "use_bidirectional_attention": (False,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
"""Keys that may be absent, null or one of these values in a family that has no default for them; any other value would change the model."""
ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "llama3": ("low_freq_factor", "high_freq_factor"),
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
}
"""Keys of each kind of rotary settings, which RopeScaling has too."""
_ROPE_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"}
_YARN_KEYS = {"attention_factor", "truncate"}

_ANY = {"vocab_size": "vocab", "tie_word_embeddings": "tied", "initializer_range": "init_std"}
DECODER = _ANY | {
    "hidden_size": "dim", "num_hidden_layers": "layers", "num_attention_heads": "heads", "num_key_value_heads": "kv_heads",
    "intermediate_size": "ffn", "max_position_embeddings": "context", "rms_norm_eps": "norm_eps",
}  # fmt: skip
GPT2 = _ANY | {
    "n_embd": "dim", "n_layer": "layers", "n_head": "heads", "n_inner": "ffn", "n_positions": "context",
    "layer_norm_epsilon": "norm_eps",
}  # fmt: skip
LATENT = {
    "kv_lora_rank": "kv_rank", "q_lora_rank": "q_rank", "qk_nope_head_dim": "nope_dim", "qk_rope_head_dim": "rope_dim",
    "v_head_dim": "value_dim",
}  # fmt: skip
_ROUTED = {"num_experts_per_tok": "active", "moe_intermediate_size": "ffn", "norm_topk_prob": "normalize"}
EXPERTS = {
    "mixtral": {"num_local_experts": "experts", "num_experts_per_tok": "active", "intermediate_size": "ffn"},
    "qwen3_moe": _ROUTED | {"num_experts": "experts"},
    "deepseek_v3": _ROUTED | {
        "n_routed_experts": "experts", "n_shared_experts": "shared", "first_k_dense_replace": "dense_layers",
        "routed_scaling_factor": "scale", "n_group": "groups", "topk_group": "active_groups",
    },
}  # fmt: skip
"""Their keys to the fields of ModelSpec, Mla and Moe, by `model_type` where it differs; read here, written by `spec/hf_config_write`."""
_NULLABLE = ("num_key_value_heads", "n_inner", "q_lora_rank", "n_group", "topk_group", "initializer_range")
"""Keys for which null means the default of our field."""
_BIAS_RATE = 0.001
"""DeepSeek-V3's balancing rate, from its paper; its config does not contain it."""


class UnsupportedModel(RunError):
    """A model that the built-in decoder does not compute; transformers may."""

    is_known = True
    """Whether it is the built-in decoder's architecture, with a setting that it does not have."""


class Unsupported(ValueError):
    """A setting that would change what the model computes: its key, its value and what is supported."""


class Malformed(Unsupported):
    """A setting that no model could have."""


def number(key: str, value: Any, kind: type = float, zero: bool = False) -> Any:
    """The value as an int or a float, if it is a number above 0, or 0 if `zero`."""
    valid = isinstance(value, int | float) and not isinstance(value, bool) and (0 < value < math.inf or (zero and value == 0))
    if not valid:
        raise Malformed(key, value, f"a number {'of 0 or more' if zero else 'above 0'} is needed here.")
    with contextlib.suppress(OverflowError):
        if kind(value) == value:
            return kind(value)
    raise Malformed(key, value, "a whole number is needed here." if kind is int else "it is too large.")


class Config(NamedTuple):
    """A config.json with the defaults of its family."""

    values: JsonObject
    defaults: JsonObject

    def get(self, key: str) -> Any:
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def number(self, key: str, kind: type = int, zero: bool = False) -> Any:
        """A number that the model cannot be built without; `zero`: it may be 0."""
        if key not in self.values and key not in self.defaults:
            raise Malformed(key, None, "the key is missing.")
        return number(key, self.get(key), kind, zero)

    def is_null(self, key: str) -> bool:
        """Whether it is null, which unlike an absent key means none."""
        return self.values.get(key, self.defaults.get(key)) is None

    def fields(self, table: str, fields: Mapping[str, str]) -> dict[str, Any]:
        """The fields of a table of our run file, by the keys that name them here."""
        values: dict[str, Any] = {}
        for key, field in fields.items():
            ours = KEYS[f"{table}.{field}"]
            if ours.kind is bool:
                values[field] = self.flag(key)
            elif key not in _NULLABLE or not self.is_null(key):
                values[field] = self.number(key, ours.kind, zero=ours.metadata["low"] == 0)
        return values

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise Malformed(key, value, "true or false is needed here.")
        return bool(value)


def model_spec(folder: Path) -> ModelSpec:
    """The model that a Hugging Face folder describes; RunError says what in its config.json is not supported."""
    values = read_config(folder)
    family = _family(folder / CONFIG, values)
    read, defaults = FAMILIES[family]
    config = Config(values, defaults)
    try:
        for key, allowed in ((key, allowed) for keys, allowed in _ONLY.items() for key in keys.split()):
            if key not in defaults and (value := values.get(key)) is not None:
                _only(key, value, allowed)
        spec = _windowed(config, read(config))
        return replace(spec, mtp_depth=_mtp_depth(config, spec, folder)) if family == "DeepseekV3ForCausalLM" else spec
    except Unsupported as problem:
        key, value, remedy = problem.args
        kind = RunError if isinstance(problem, Malformed) else UnsupportedModel
        raise kind(f"{folder / CONFIG}: {key} = {json.dumps(value, default=str)}: {remedy}") from None
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RunError(f"{folder / CONFIG}: a value is not of the kind it should be ({error}).") from None


def is_folder(path: Path) -> bool:
    """Whether a directory is a Hugging Face model, rather than a run directory or a checkpoint."""
    markers = (CONFIG, safetensors_index.SINGLE, safetensors_index.INDEX)
    return any((path / marker).is_file() for marker in markers) and not (path / "run.toml").is_file()


def read_config(folder: Path) -> JsonObject:
    """The folder's config.json."""
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(f"{folder} is not a Hugging Face model: it has no {CONFIG}.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError(f"{path} cannot be read ({error}).") from None
    if not isinstance(values, dict):
        raise RunError(f"{path} is not a table of settings.")
    return values


def interleaved(values: JsonObject) -> bool:
    """Whether DeepSeek's rotated channels are stored as neighboring pairs (the default)."""
    return values.get("rope_interleave") is not False


def _family(path: Path, values: JsonObject) -> str:
    named = values.get("architectures")
    names = named if isinstance(named, list) else [named]
    known = [name for name in names if isinstance(name, str) and name in FAMILIES]
    if not known:
        unknown = UnsupportedModel(
            f"{path}: architectures = {json.dumps(named)} is not known; supported are {', '.join(FAMILIES)}."
        )
        unknown.is_known = False
        raise unknown
    return str(known[0])


def _windowed(config: Config, spec: ModelSpec) -> ModelSpec:
    """The model with its sliding window. One at least as long as the context has no effect."""
    types = config.get("layer_types") or []
    if not isinstance(types, list):
        raise Malformed("layer_types", types, "a list with the kind of each layer is needed here.")
    for kind in types:
        _only("layer_types", kind, (_FULL, _SLIDING) if "layer_types" in config.defaults else (_FULL,))
    used = config.flag("use_sliding_window")
    if "use_sliding_window" not in config.defaults:
        _only("use_sliding_window", used, (False,))
        used = "sliding_window" in config.defaults
    window = None if not used or config.is_null("sliding_window") else int(config.number("sliding_window"))
    if window is None and _SLIDING in types:
        raise Unsupported("layer_types", _SLIDING, "such layers need a sliding_window, and use_sliding_window in a Qwen.")
    if window is None or (window >= spec.context and spec.rope_local_theta is None):
        return spec
    first = min(config.number("max_window_layers", zero=True), spec.layers) if "max_window_layers" in config.defaults else 0
    every = config.values.get("_sliding_window_pattern") or config.get("sliding_window_pattern")
    every = None if every is None else int(number("sliding_window_pattern", every, int))
    return _pattern(replace(spec, window=window, window_from=first, global_every=every), types)


def _pattern(spec: ModelSpec, types: list[Any]) -> ModelSpec:
    """The model, with the window in the layers of these kinds; `spec` says in which ones it is if no kinds are given."""
    wanted = [kind == _SLIDING for kind in types] or _slides(spec)
    if not any(wanted):
        return replace(spec, window=None, window_from=0, global_every=None, rope_local_theta=None)
    if len(wanted) != spec.layers:
        raise Unsupported("layer_types", types, f"it names {len(wanted)} layers of {spec.layers}.")
    begins, every = (0, wanted.index(True)), (None, *range(2, spec.layers + 1))
    others = (replace(spec, window_from=first, global_every=step) for first in begins for step in every)
    found = next((choice for choice in (spec, *others) if _slides(choice) == wanted), None)
    if found is None:
        order = "the window may begin after some layers, and every N-th layer may be without it; no other order is supported."
        raise Unsupported("layer_types", types, order)
    return found


def _slides(spec: ModelSpec) -> list[bool]:
    return [spec.window_of(layer) is not None for layer in range(spec.layers)]


def _only(key: str, value: Any, allowed: Collection[Any]) -> None:
    if value not in allowed:
        raise Unsupported(key, value, f"not supported; only {' or '.join(map(json.dumps, allowed)) or 'null'} is.")


def _decoder(config: Config, latent: bool = False) -> ModelSpec:
    """What all families except GPT-2 have in common."""
    if "hidden_act" in config.defaults:
        _only("hidden_act", config.get("hidden_act"), ("silu", "swish"))
    theta, scaling = _rope(config.values, config.defaults.get("rope_theta", 10000.0))
    spec = ModelSpec(**config.fields("model", DECODER), rope_theta=theta, rope_scaling=scaling)
    return replace(spec, kv_heads=spec.kv, head_dim=None if latent else _head(config, "hidden_size", spec.heads))


def _head(config: Config, width: str, heads: int) -> int:
    """Width of a head; transformers infers it if it is not given."""
    if config.get("head_dim"):
        return int(config.number("head_dim"))
    if config.number(width) % heads:
        raise Unsupported(width, config.get(width), f"it does not divide among {heads} heads.")
    return int(config.number(width)) // heads


def _qwen2(config: Config) -> ModelSpec:
    return replace(_decoder(config), qkv_bias=True)


def _qwen3(config: Config) -> ModelSpec:
    return replace(_decoder(config), qk_norm=True)


def _gemma2(config: Config) -> ModelSpec:
    _only("hidden_activation", config.get("hidden_activation"), ("gelu_pytorch_tanh",))
    spec, scalar = _decoder(config), int(config.number("query_pre_attn_scalar"))
    return replace(
        spec,
        norm_place="both",
        norm_zero_centered=True,
        activation="geglu",
        scale_embedding=True,
        query_scalar=None if scalar == spec.head else scalar,
        attention_cap=_cap(config, "attn_logit_softcapping"),
        logit_cap=_cap(config, "final_logit_softcapping"),
    )


def _cap(config: Config, key: str) -> float | None:
    return None if config.is_null(key) else float(config.number(key, float))


def _gemma3(config: Config) -> ModelSpec:
    """Like Gemma 2, with two kinds of rotary positions; transformers 5 writes both into one table."""
    table, values = config.values.get("rope_parameters") or {}, config.values
    if isinstance(table, dict) and isinstance(local := table.get(_SLIDING), dict):
        _only(f"rope_parameters.{_SLIDING}.rope_type", local.get("rope_type", "default"), ("default",))
        values = values | {"rope_parameters": table.get(_FULL), "rope_local_base_freq": local.get("rope_theta")}
    config = config._replace(values=values)
    return replace(_gemma2(config), qk_norm=True, rope_local_theta=config.number("rope_local_base_freq", float))


def _phi3(config: Config) -> ModelSpec:
    table: Any = config.values.get("rope_parameters") or config.values.get("rope_scaling") or {}
    given = table.get("partial_rotary_factor") if isinstance(table, dict) else None
    fraction = number("partial_rotary_factor", given or config.get("partial_rotary_factor"))
    whole: JsonObject = {"partial_rotary_factor": None}
    if isinstance(config.values.get("rope_parameters"), dict):
        whole["rope_parameters"] = table | {"partial_rotary_factor": None}
    return replace(_decoder(config._replace(values=config.values | whole)), rope_fraction=fraction, export_as="phi3")


def _mixtral(config: Config) -> ModelSpec:
    moe = Moe(**config.fields("model.moe", EXPERTS["mixtral"]), balance_loss=_balance(config))
    return replace(_decoder(config), moe=moe)


def _qwen3_moe(config: Config) -> ModelSpec:
    if not config.values.get("num_experts"):
        config = config._replace(values=config.values | {"num_experts": config.number("num_local_experts")})
    moe = Moe(**config.fields("model.moe", EXPERTS["qwen3_moe"]), balance_loss=_balance(config))
    return replace(_qwen3(config), moe=moe)


def _balance(config: Config) -> float:
    """transformers adds the load-balancing loss only with `output_router_logits`."""
    enabled = config.flag("output_router_logits")
    return config.number("router_aux_loss_coef", float, zero=True) if enabled else 0.0


def _deepseek(config: Config) -> ModelSpec:
    spec = _decoder(config, latent=True)
    if spec.kv != spec.heads:
        raise Unsupported(
            "num_key_value_heads", spec.kv, f"latent attention has as many as num_attention_heads = {spec.heads}."
        )
    spec = replace(spec, kv_heads=None, mla=Mla(**config.fields("model.mla", LATENT)))
    if config.number("first_k_dense_replace", zero=True) >= spec.layers:
        return spec
    config.number("n_shared_experts")  # unlike `model.moe.shared`, not 0
    values = config.fields("model.moe", EXPERTS["deepseek_v3"])
    values.setdefault("active_groups", values.get("groups", 1))
    return replace(spec, moe=Moe(**values, router="sigmoid", bias_rate=_BIAS_RATE))


def _mtp_depth(config: Config, spec: ModelSpec, folder: Path) -> int:
    """Modules of multi-token prediction, if their weights are in the folder; transformers does not save them."""
    given = int(config.number("num_nextn_predict_layers", zero=True))
    matches = (re.match(r"model\.layers\.(\d{1,9})\.", name) for name in safetensors_index.names(folder))
    beyond = {int(match[1]) - spec.layers for match in matches if match}
    return given if any(0 <= layer < given for layer in beyond) else 0


def _gpt2(config: Config) -> ModelSpec:
    _only("activation_function", config.get("activation_function"), ("gelu_new", "gelu_pytorch_tanh"))
    spec = ModelSpec(**config.fields("model", GPT2), norm="layer", activation="gelu", positions="learned", bias=True)
    _head(config, "n_embd", spec.heads)
    return replace(spec, ffn=spec.hidden)


def _rope(config: JsonObject, theta: Json) -> tuple[float, RopeScaling | None]:
    """(base, scaling). `theta`: the family's default base. transformers 5 writes `rope_parameters`, older versions `rope_scaling`."""
    where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    settings = config.get(where) or {}
    if not isinstance(settings, dict):
        raise Malformed(where, settings, "it is a table of rotary settings.")
    nested = [name for name, value in settings.items() if isinstance(value, dict)]
    if nested:
        raise Unsupported(
            f"{where}.{nested[0]}", settings[nested[0]], "different rotary positions per layer are not supported."
        )
    base = number("rope_theta", settings.get("rope_theta") or config.get("rope_theta") or theta)
    rotated = settings.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if rotated not in (None, 1, 1.0):
        raise Unsupported("partial_rotary_factor", rotated, "only 1.0 is supported: whole heads are rotated.")
    kind: Any = settings.get("rope_type") or settings.get("type") or "default"
    if kind not in ROPE_FIELDS:
        raise Unsupported(f"{where}.rope_type", kind, f"supported are {', '.join(ROPE_FIELDS)}.")
    if kind == "default":
        return base, None
    unknown = set(settings) - _ROPE_KEYS - set(ROPE_FIELDS[kind]) - (_YARN_KEYS if kind == "yarn" else set())
    if unknown:
        name = min(unknown)
        raise Unsupported(f"{where}.{name}", settings[name], f"it is unknown for rope_type {kind!r}.")
    longest = config.get("max_position_embeddings")
    if kind == "linear":
        return base, RopeScaling(kind=kind, factor=number(f"{where}.factor", settings.get("factor")))
    original = config.get("original_max_position_embeddings") or settings.get("original_max_position_embeddings") or longest
    original = number(f"{where}.original_max_position_embeddings", original, int)
    factor = settings.get("factor")
    if factor is None:
        factor = number("max_position_embeddings", longest) / original
    factor = number(f"{where}.factor", factor)
    return base, _scaling(settings, where, RopeScaling(kind=kind, factor=factor, original_context=original))


def _scaling(settings: JsonObject, where: str, plain: RopeScaling) -> RopeScaling:
    """A scaling with the settings of its kind; an absent one, null and in YaRN 0 are the default."""
    if settings.get("truncate", True) is not True:
        raise Unsupported(
            f"{where}.truncate", settings["truncate"], "only true is supported: YaRN's range is rounded to whole channels."
        )
    keys = [key for key in (*ROPE_FIELDS[plain.kind], "attention_factor") if settings.get(key) is not None]
    given = {key: number(f"{where}.{key}", settings[key], zero=True) for key in keys}
    stated = given.pop("attention_factor", None)
    if plain.kind == "yarn":
        given = {key: value for key, value in given.items() if value}
        if "mscale_all_dim" in given:
            given.setdefault("mscale", 0.0)
    scaling = replace(plain, **given)
    if stated is not None and not math.isclose(stated, scaling.rotation_size, rel_tol=1e-6):
        only = f"only the value that follows from the factor is supported, {scaling.rotation_size:g}."
        raise Unsupported(f"{where}.attention_factor", stated, only)
    return scaling


_LLAMA: JsonObject = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_QWEN: JsonObject = {**_LLAMA, "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096}
_LAYERS: JsonObject = {"max_window_layers": 28, "layer_types": None}
_MISTRAL: JsonObject = {**_LLAMA, "max_position_embeddings": 131072, "num_key_value_heads": 8}
_GEMMA: JsonObject = {
    "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6, "max_position_embeddings": 8192, "head_dim": 256,
    "num_key_value_heads": 4, "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096, "layer_types": None,
}  # fmt: skip
FAMILIES: dict[str, tuple[Callable[[Config], ModelSpec], JsonObject]] = {
    "LlamaForCausalLM": (_decoder, _LLAMA),
    "MistralForCausalLM": (_decoder, {**_MISTRAL, "sliding_window": 4096}),
    "Qwen2ForCausalLM": (_qwen2, {**_QWEN, **_LAYERS, "num_key_value_heads": 32}),
    "Qwen3ForCausalLM": (_qwen3, {**_QWEN, **_LAYERS, "head_dim": 128, "num_key_value_heads": 32}),
    "Qwen3MoeForCausalLM": (
        _qwen3_moe,
        {**_QWEN, "num_key_value_heads": 4, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001},
    ),
    "Gemma2ForCausalLM": (
        _gemma2, {**_GEMMA, "sliding_window_pattern": 2, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": (
        _gemma3,
        {
            **_GEMMA, "max_position_embeddings": 131072, "sliding_window_pattern": 6, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
            "attn_logit_softcapping": None, "final_logit_softcapping": None,
        },
    ),
    "Phi3ForCausalLM": (
        _phi3, {**_LLAMA, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "sliding_window": None, "partial_rotary_factor": 1.0},
    ),
    "MixtralForCausalLM": (
        _mixtral,
        {
            **_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001, "sliding_window": None,
        },
    ),
    "GPT2LMHeadModel": (_gpt2, {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024, "tie_word_embeddings": True}),
    "DeepseekV3ForCausalLM": (
        _deepseek,
        {
            **_LLAMA, "max_position_embeddings": 4096, "q_lora_rank": 1536, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
            "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0, "v_head_dim": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512,
        },
    ),
}  # fmt: skip
"""Each architecture's reader, and transformers' defaults for absent keys."""
