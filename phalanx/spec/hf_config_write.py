"""Writes a ModelSpec as the config.json of the Hugging Face family that computes the same, for `phalanx export`. A model that no family
can express is refused by the key that prevents it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from phalanx.spec import config_text
from phalanx.spec.errors import RunError, toml
from phalanx.spec.hf_config import DECODER, EXPERTS, GPT2, LATENT, LAYER_TYPES, ROPE_FIELDS
from phalanx.spec.json_value import JsonObject
from phalanx.spec.model import ModelSpec

_GPT2: JsonObject = {"activation_function": "gelu_new", "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
_QWEN3: JsonObject = {"attention_bias": False}
_GEMMA: JsonObject = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False, "attention_dropout": 0.0}
_FAMILIES: dict[str, tuple[str, str, JsonObject]] = {
    "llama": ("Llama", "LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False}),
    "mistral": ("Mistral", "MistralForCausalLM", {}),
    "qwen2": ("Qwen2", "Qwen2ForCausalLM", {}),
    "phi3": ("Phi-3", "Phi3ForCausalLM", {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gemma2": ("Gemma 2", "Gemma2ForCausalLM", _GEMMA),
    "gemma3_text": ("Gemma 3", "Gemma3ForCausalLM", _GEMMA),
    "qwen3": ("Qwen3", "Qwen3ForCausalLM", _QWEN3),
    "qwen3_moe": ("Qwen3-MoE", "Qwen3MoeForCausalLM", _QWEN3 | {"decoder_sparse_step": 1, "mlp_only_layers": []}),
    "mixtral": ("Mixtral", "MixtralForCausalLM", {}),
    "gpt2": ("GPT-2", "GPT2LMHeadModel", _GPT2),
    "deepseek_v3": ("DeepSeek-V3", "DeepseekV3ForCausalLM", {"attention_bias": False, "rope_interleave": True}),
}
"""Hugging Face's `model_type` to the family's name, its class and the keys that are the same in all its models."""
NAMES = {model_type: name for model_type, (name, *_) in _FAMILIES.items()}


def family(spec: ModelSpec) -> str:
    """The `model_type` that computes the same as this model; RunError names each key that no family can express."""
    if spec.config is not None:
        return config_text.model_type(spec.config)
    if spec.module is not None:
        raise RunError(f'model.module = "{spec.module}": a custom model has no counterpart in transformers to export to.')
    if spec.export_as is not None or spec.rope_fraction != 1.0:
        name = "phi3"
    elif spec.mla is not None:
        name = "deepseek_v3"
    elif spec.positions == "learned" or spec.norm == "layer":
        name = "gpt2"
    elif spec.norm_place == "both":
        name = "gemma3_text" if spec.qk_norm else "gemma2"
    elif spec.moe is not None:
        name = "qwen3_moe" if spec.qk_norm else "mixtral"
    elif spec.qkv_bias:
        name = "qwen2"
    elif spec.qk_norm:
        name = "qwen3"
    else:  # the same architecture, but Llama has no window, and transformers refuses one whose heads do not divide its width
        name = "mistral" if spec.dim % spec.heads or spec.window is not None else "llama"
    rules = _gpt2_rules(spec) if name == "gpt2" else [*_decoder_rules(spec, name), *_moe_rules(spec, name)]
    settings = {key: value for key, value in spec.variations.items() if key not in _VARIATIONS.get(name, ())}
    rules += [(True, f"model.{key} = {toml(value)}", "has no such setting") for key, value in settings.items()]
    problems = [f"{key}: Hugging Face's {NAMES[name]}, the nearest family, {why}." for wrong, key, why in rules if wrong]
    if problems:
        raise RunError(problems)
    return name


def config(spec: ModelSpec, *, dtype: str = "float32", tokens: Mapping[str, int | None] | None = None) -> JsonObject:
    """A config.json that `AutoModelForCausalLM` loads. `dtype`: torch's name; `tokens`: token ids by key, such as eos_token_id."""
    name = family(spec)
    if spec.config is not None:  # as it was, but for what the weights and the tokenizer are now
        given = {key: value for key, value in (tokens or {}).items() if value is not None}
        values: JsonObject = json.loads(spec.config)
        return values | {"dtype" if "dtype" in values else "torch_dtype": dtype} | given
    _, architecture, fixed = _FAMILIES[name]
    common: JsonObject = {
        "architectures": [architecture],
        "model_type": name,
        "torch_dtype": dtype,  # newer versions write "dtype" but read this too
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
    }
    fields = GPT2 if name == "gpt2" else DECODER
    spec = replace(spec, vocab=spec.rows, ffn=spec.hidden, kv_heads=spec.kv, head_dim=spec.head)
    values = common | dict(tokens or {}) | fixed | {key: getattr(spec, field) for key, field in fields.items()}
    more: JsonObject = {"n_ctx": spec.context} if name == "gpt2" else _decoder(spec, name)
    return values | more


_EVERYWHERE = ("mistral", "mixtral", "qwen3_moe", "phi3")
"""Families with a sliding window in all layers or in none."""
_SOFT_CAPS = ("query_scalar", "attention_cap", "logit_cap")
_GEMMAS = ("window", "norm_place", "norm_zero_centered", "scale_embedding", *_SOFT_CAPS)
_VARIATIONS = {
    "mistral": ("window",), "qwen2": ("window", "qkv_bias"), "qwen3": ("window",), "mixtral": ("window",), "qwen3_moe": ("window",),
    "phi3": ("window", "rope_fraction"), "gemma2": _GEMMAS, "gemma3_text": (*_GEMMAS, "rope_local_theta"),
}  # fmt: skip
"""Of the settings that a Llama does not have, those that a family has."""
_Rules = list[tuple[bool, str, str]]
"""Whether the family cannot express the model; the key to blame; what the family has instead."""


def _gpt2_rules(spec: ModelSpec) -> _Rules:
    with_norms = "with layer norms"
    return [
        (spec.norm != "layer", f'model.norm = "{spec.norm}" with learned positions', "has layer norms"),
        (spec.positions != "learned", f'model.positions = "{spec.positions}" {with_norms}', "has learned positions"),
        (spec.activation != "gelu", f'model.activation = "{spec.activation}" {with_norms}', "has GELU"),
        (not spec.bias, f"model.bias = false {with_norms}", "has biases"),
        (spec.qk_norm, f"model.qk_norm = true {with_norms}", "does not normalize queries and keys"),
        (spec.kv != spec.heads, f"model.kv_heads = {spec.kv}", f"has as many as heads ({spec.heads})"),
        (spec.head * spec.heads != spec.dim, f"model.head_dim = {spec.head}", "has heads of dim / heads"),
        (spec.moe is not None, "model.moe", "has no experts"),
    ]


def _decoder_rules(spec: ModelSpec, name: str) -> _Rules:
    latent, uneven = spec.mla is not None, len({spec.window_of(layer) for layer in range(spec.layers)}) > 1
    gemma, needed = name.startswith("gemma"), "geglu" if name.startswith("gemma") else "swiglu"
    return [
        (spec.activation != needed, f'model.activation = "{spec.activation}" with rotary positions', f'has "{needed}"'),
        (gemma and not spec.norm_zero_centered, "model.norm_zero_centered = false", "has zero-centered norms"),
        (gemma and not spec.scale_embedding, "model.scale_embedding = false", "scales the embedding"),
        (
            name == "gemma3_text" and spec.window is not None and spec.rope_local_theta is None,
            "model.rope_local_theta",
            "has it",
        ),
        (spec.bias, "model.bias = true with rotary positions", "has no such biases"),
        (name == "qwen2" and spec.qk_norm, "model.qk_norm = true with model.qkv_bias", "does not normalize queries and keys"),
        (uneven and name in _EVERYWHERE, f"model.window = {spec.window} in some blocks", "has the window in all of them"),
        *(_phi3_rules(spec) if name == "phi3" else []),
        (latent and spec.qk_norm, "model.qk_norm = true with model.mla", "does not normalize heads"),
        (latent and spec.norm != "rms", f'model.norm = "{spec.norm}" with model.mla', "has RMS norms"),
        (latent and spec.positions != "rope", f'model.positions = "{spec.positions}" with model.mla', "has rotary positions"),
    ]


def _phi3_rules(spec: ModelSpec) -> _Rules:
    return [
        (spec.mla is not None, "model.mla", "has no latent attention"),
        (spec.moe is not None, "model.moe", "has no experts"),
        (spec.norm != "rms", f'model.norm = "{spec.norm}"', "has RMS norms"),
        (spec.positions != "rope", f'model.positions = "{spec.positions}"', "has rotary positions"),
        (spec.qk_norm, "model.qk_norm = true", "does not normalize queries and keys"),
        (spec.rope_scaling is not None, "model.rope_scaling", "does not scale frequencies so"),
        (spec.head * spec.heads != spec.dim, f"model.head_dim = {spec.head}", "has heads of dim / heads"),
    ]


def _moe_rules(spec: ModelSpec, name: str) -> _Rules:
    moe = spec.moe
    if moe is None:
        return []
    if name == "deepseek_v3":
        return [
            (moe.router != "sigmoid", f'model.moe.router = "{moe.router}" with model.mla', 'has a router of "sigmoid"'),
            (moe.shared == 0, "model.moe.shared = 0 with model.mla", "has at least one shared expert"),
            (moe.experts // moe.groups < 2, f"model.moe.groups = {moe.groups}", "needs two experts in a group"),
        ]
    only = {"shared": 0, "dense_layers": 0, "groups": 1, "scale": 1.0}
    given = {key: getattr(moe, key) for key in only}
    others = "other values need model.mla"
    sums = "always divides weights by their sum; Qwen3-MoE, with model.qk_norm, does not have to"
    return [
        (moe.router != "softmax", f'model.moe.router = "{moe.router}"', 'has a router of "softmax"; "sigmoid" needs model.mla'),
        (moe.bias_rate > 0, f"model.moe.bias_rate = {moe.bias_rate:g}", "has no bias in its router; it needs model.mla"),
        *((given[key] != n, f"model.moe.{key} = {given[key]}", f"supports only {n}; {others}") for key, n in only.items()),
        (name == "mixtral" and not moe.normalize, "model.moe.normalize = false", sums),
    ]


def _decoder(spec: ModelSpec, name: str) -> JsonObject:
    """What is neither the same in the whole family nor one of our fields."""
    values: JsonObject = {**_rope(spec), **_window(spec, name)}
    values |= _gemma(spec) if name.startswith("gemma") else {"hidden_act": "silu", "attention_dropout": 0.0}
    moe = spec.moe
    if name == "phi3":
        values |= {"partial_rotary_factor": spec.rope_fraction, "original_max_position_embeddings": spec.context}
    elif spec.mla is None:
        values["head_dim"] = spec.head
    else:
        values |= {key: getattr(spec.mla, field) for key, field in LATENT.items()}
        values |= {"num_nextn_predict_layers": spec.mtp_depth, "first_k_dense_replace": spec.layers}
    if moe is None:
        return values
    values |= {key: getattr(moe, field) for key, field in EXPERTS[name].items()}
    if name == "deepseek_v3":
        return values | {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    coefficient: JsonObject = {"router_aux_loss_coef": moe.balance_loss} if moe.balance_loss else {}
    return values | {"output_router_logits": moe.balance_loss > 0} | coefficient


def _gemma(spec: ModelSpec) -> JsonObject:
    local: JsonObject = {} if spec.rope_local_theta is None else {"rope_local_base_freq": spec.rope_local_theta}
    return local | {
        "query_pre_attn_scalar": spec.head if spec.query_scalar is None else spec.query_scalar,
        "attn_logit_softcapping": spec.attention_cap,
        "final_logit_softcapping": spec.logit_cap,
        "sliding_window_pattern": spec.global_every,
    }


def _window(spec: ModelSpec, name: str) -> JsonObject:
    if name in ("llama", "deepseek_v3"):
        return {}
    gemma = name.startswith("gemma")
    values: JsonObject = {"sliding_window": spec.context if gemma and spec.window is None else spec.window}
    if name.startswith("qwen"):
        values["use_sliding_window"] = spec.window is not None
    if gemma or (name not in _EVERYWHERE and spec.window is not None):
        layers = range(spec.layers)
        values |= {"max_window_layers": spec.window_from} if name.startswith("qwen") else {}
        values["layer_types"] = [LAYER_TYPES[spec.window_of(layer) is not None] for layer in layers]
    return values


def _rope(spec: ModelSpec) -> JsonObject:
    """The rotary settings, in the keys that every version of transformers reads."""
    scaling = spec.rope_scaling
    if scaling is None:
        return {"rope_theta": spec.rope_theta, "rope_scaling": None}
    table: JsonObject = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "linear":
        return {"rope_theta": spec.rope_theta, "rope_scaling": table}
    table["original_max_position_embeddings"] = scaling.original_context
    table |= {
        key: getattr(scaling, key)
        for key in ROPE_FIELDS[scaling.kind]
        if scaling.mscale_all_dim or not key.startswith("mscale")
    }
    return {"rope_theta": spec.rope_theta, "rope_scaling": table}
