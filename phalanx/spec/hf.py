"""Hugging Face's config.json as a ModelSpec. Called where `model.from` names a folder, and by `phalanx import`.

Whatever a config says that would change what the model computes, and that is not supported, is refused by name and value.
What only training noise depends on (dropout, router jitter) is left aside. `spec/hf_write` goes the other way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.spec import hf_rope, safefiles
from phalanx.spec.errors import RunError
from phalanx.spec.hf_rope import Unsupported
from phalanx.spec.model import Mla, ModelSpec, Moe

CONFIG = "config.json"
DTYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""How config.json calls the formats that weights come in, and how a run file does."""

_OFF: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "quantization_config": (),
    "logit_scale": (1,),
    "logits_scaling": (1,),
    "final_logit_softcapping": (),
    "attn_logit_softcapping": (),
    "residual_multiplier": (1,),
    "embedding_multiplier": (1,),
    "attention_multiplier": (),
    "use_sliding_window": (False,),
    "add_cross_attention": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "is_encoder_decoder": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
}
"""Keys that may be left out, or null, or have these values; any other would change the model."""


class Config:
    """A config.json with what its family means by a key that is not there."""

    def __init__(self, path: Path, values: dict[str, Any], defaults: dict[str, Any]):
        self.path, self.values, self.defaults = path, values, defaults

    def get(self, key: str) -> Any:
        value = self.values.get(key)
        return self.defaults.get(key) if value is None else value

    def number(self, key: str, kind: type = int) -> Any:
        """A value that the model cannot be built without."""
        value = self.get(key)
        right = isinstance(value, int | float) and not isinstance(value, bool) and kind(value) == value and value > 0
        if not right:
            raise Unsupported(key, value, "a positive number is needed here." if key in self.values else "the key is missing.")
        return kind(value)


def model_spec(folder: Path) -> ModelSpec:
    """The model that a Hugging Face folder describes; RunError says what in its config.json is not supported."""
    values = read_config(folder)
    family = _family(folder / CONFIG, values)
    read, defaults = FAMILIES[family]
    config = Config(folder / CONFIG, values, defaults)
    try:
        for key, allowed in _OFF.items():
            value = values.get(key)
            if value is not None and value not in allowed:
                only = " or ".join(json.dumps(item) for item in allowed) or "null"
                raise Unsupported(key, value, f"not supported; only {only} is.")
        _no_window(config)
        spec = read(config)
    except Unsupported as problem:
        value = json.dumps(problem.value, default=str)
        raise RunError([f"{folder / CONFIG}: {problem.key} = {value}: {problem.remedy}"]) from None
    except (TypeError, ValueError, AttributeError) as error:
        raise RunError([f"{folder / CONFIG}: a value is not of the kind it should be ({error})."]) from None
    if family == "DeepseekV3ForCausalLM":
        return replace(spec, ahead=_ahead(config, spec, safefiles.names(folder)))
    return spec


def is_folder(path: Path) -> bool:
    """Whether a directory is a model of Hugging Face's, rather than a run directory or a checkpoint."""
    marks = (CONFIG, safefiles.SINGLE, safefiles.INDEX)
    return any((path / mark).is_file() for mark in marks) and not (path / "run.toml").is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json, as it stands."""
    path = folder / CONFIG
    try:
        values = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError([f"{folder} is not a Hugging Face model: it has no {CONFIG}."]) from None
    except (OSError, ValueError, RecursionError) as error:
        raise RunError([f"{path} cannot be read ({error})."]) from None
    if not isinstance(values, dict):
        raise RunError([f"{path} is not a table of settings."])
    return values


def interleaved(values: dict[str, Any]) -> bool:
    """Whether a DeepSeek's rotated channels are stored as neighbouring pairs, as they are unless its config says otherwise."""
    return values.get("rope_interleave") is not False


def dtype(values: dict[str, Any]) -> str | None:
    """The format that a config gives for the weights, as a run file writes it; None: not said, or another one."""
    name = values.get("dtype") or values.get("torch_dtype")
    return DTYPES.get(str(name).removeprefix("torch."))


def _family(path: Path, values: dict[str, Any]) -> str:
    named = values.get("architectures")
    names = named if isinstance(named, list) else [named]
    known = [name for name in names if name in FAMILIES]
    if not known:
        raise RunError([f"{path}: architectures = {json.dumps(named)} is not known; supported are {', '.join(FAMILIES)}."])
    return str(known[0])


def _no_window(config: Config) -> None:
    """Attention reaches back over everything; a window at least as long as the context does not matter."""
    window, longest = config.values.get("sliding_window"), config.values.get("max_position_embeddings")
    if "sliding_window" in config.defaults:  # families that use it without being told to
        window = config.values.get("sliding_window", config.defaults["sliding_window"])
        longest = config.get("max_position_embeddings")
        if window is not None and window < longest:
            raise Unsupported(
                "sliding_window", window, f"attention over a window is not supported; only null, or at least {longest}."
            )
    types = config.values.get("layer_types") or []
    other = [kind for kind in types if kind != "full_attention"]
    if other:
        raise Unsupported("layer_types", other[0], 'not supported; only "full_attention" is.')


def _activation(config: Config, key: str, same: Collection[str]) -> None:
    if config.get(key) not in same:
        raise Unsupported(key, config.get(key), f"not supported; only {' or '.join(json.dumps(name) for name in same)} is.")


def _decoder(config: Config, latent: bool = False) -> ModelSpec:
    """What all families but GPT-2 have in common."""
    _activation(config, "hidden_act", ("silu", "swish"))
    theta, scaling = hf_rope.read(config.values, config.defaults.get("rope_theta", 10000.0))
    heads = config.number("num_attention_heads")
    return ModelSpec(
        vocab=config.number("vocab_size"), dim=config.number("hidden_size"), layers=config.number("num_hidden_layers"),
        heads=heads, kv_heads=config.get("num_key_value_heads") or heads, head_dim=None if latent else _head(config, "hidden_size", heads),
        ffn=config.number("intermediate_size"), norm_eps=config.number("rms_norm_eps", float),
        context=config.number("max_position_embeddings"), rope_theta=theta, rope_scaling=scaling,
        tied=bool(config.get("tie_word_embeddings")), init_std=float(config.get("initializer_range") or 0.02),
    )  # fmt: skip


def _head(config: Config, width: str, heads: int) -> int:
    """Width of a head, which transformers infers where it is not given."""
    if config.get("head_dim"):
        return int(config.number("head_dim"))
    if config.number(width) % heads:
        raise Unsupported(width, config.get(width), f"it does not divide among {heads} heads.")
    return int(config.number(width)) // heads


def _llama(config: Config) -> ModelSpec:
    return _decoder(config)


def _qwen3(config: Config) -> ModelSpec:
    return replace(_decoder(config), qk_norm=True)


def _mixtral(config: Config) -> ModelSpec:
    spec = _decoder(config)
    experts, active = config.number("num_local_experts"), config.number("num_experts_per_tok")
    return replace(spec, moe=Moe(experts=experts, active=active, ffn=spec.hidden, balance_loss=_balance(config)))


def _qwen3_moe(config: Config) -> ModelSpec:
    experts = config.number("num_experts" if config.values.get("num_experts") else "num_local_experts")
    moe = Moe(
        experts=experts, active=config.number("num_experts_per_tok"), ffn=config.number("moe_intermediate_size"),
        normalize=bool(config.get("norm_topk_prob")), balance_loss=_balance(config),
    )  # fmt: skip
    return replace(_decoder(config), qk_norm=True, moe=moe)


def _balance(config: Config) -> float:
    """transformers adds the balancing loss only where the router's scores are asked for."""
    return float(config.get("router_aux_loss_coef")) if config.get("output_router_logits") else 0.0


def _deepseek(config: Config) -> ModelSpec:
    spec = _decoder(config, latent=True)
    if spec.kv != spec.heads:
        raise Unsupported(
            "num_key_value_heads", spec.kv, f"latent attention has as many as num_attention_heads = {spec.heads}."
        )
    mla = Mla(
        kv_rank=config.number("kv_lora_rank"), q_rank=config.values.get("q_lora_rank", config.defaults["q_lora_rank"]),
        nope_dim=config.number("qk_nope_head_dim"), rope_dim=config.number("qk_rope_head_dim"),
        value_dim=config.number("v_head_dim"),
    )  # fmt: skip
    dense = config.get("first_k_dense_replace") or 0
    spec = replace(spec, kv_heads=None, mla=mla)
    if dense >= spec.layers:
        return spec
    if not config.get("n_shared_experts"):
        raise Unsupported("n_shared_experts", config.get("n_shared_experts"), "DeepSeek-V3 has at least one.")
    groups = config.values.get("n_group", config.defaults["n_group"]) or 1
    moe = Moe(
        experts=config.number("n_routed_experts"), active=config.number("num_experts_per_tok"),
        ffn=config.number("moe_intermediate_size"), shared=config.number("n_shared_experts"), dense_layers=dense,
        router="sigmoid", normalize=bool(config.get("norm_topk_prob")), scale=config.number("routed_scaling_factor", float),
        groups=groups, active_groups=config.values.get("topk_group", config.defaults["topk_group"]) or groups,
        bias_rate=BIAS_RATE,
    )  # fmt: skip
    return replace(spec, moe=moe)


BIAS_RATE = 0.001
"""DeepSeek-V3's balancing, from its paper; its config does not carry the rate."""


def _ahead(config: Config, spec: ModelSpec, names: Collection[str]) -> int:
    """Modules of multi-token prediction: only where their weights are in the folder, which transformers leaves out."""
    said = int(config.get("num_nextn_predict_layers") or 0)
    found = {int(match[1]) - spec.layers for name in names if (match := re.match(r"model\.layers\.(\d+)\.", name))}
    return said if any(0 <= layer < said for layer in found) else 0


def _gpt2(config: Config) -> ModelSpec:
    _activation(config, "activation_function", ("gelu_new", "gelu_pytorch_tanh"))
    dim = config.number("n_embd")
    _head(config, "n_embd", config.number("n_head"))
    return ModelSpec(
        vocab=config.number("vocab_size"), dim=dim, layers=config.number("n_layer"), heads=config.number("n_head"),
        ffn=config.get("n_inner") or 4 * dim, norm="layer", norm_eps=config.number("layer_norm_epsilon", float),
        activation="gelu", positions="learned", context=config.number("n_positions"), bias=True,
        tied=config.get("tie_word_embeddings") is not False, init_std=float(config.get("initializer_range") or 0.02),
    )  # fmt: skip


_LLAMA: dict[str, Any] = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048}
_QWEN: dict[str, Any] = {**_LLAMA, "max_position_embeddings": 32768}
_MISTRAL: dict[str, Any] = {**_LLAMA, "max_position_embeddings": 131072, "num_key_value_heads": 8}
FAMILIES: dict[str, tuple[Callable[[Config], ModelSpec], dict[str, Any]]] = {
    "LlamaForCausalLM": (_llama, _LLAMA),
    "MistralForCausalLM": (_llama, {**_MISTRAL, "sliding_window": 4096}),
    "Qwen3ForCausalLM": (_qwen3, {**_QWEN, "head_dim": 128, "num_key_value_heads": 32}),
    "Qwen3MoeForCausalLM": (
        _qwen3_moe,
        {**_QWEN, "num_key_value_heads": 4, "num_experts_per_tok": 8, "router_aux_loss_coef": 0.001},
    ),
    "MixtralForCausalLM": (
        _mixtral,
        {
            **_MISTRAL, "rms_norm_eps": 1e-5, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
            "router_aux_loss_coef": 0.001, "sliding_window": None,
        },
    ),
    "GPT2LMHeadModel": (_gpt2, {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_positions": 1024}),
    "DeepseekV3ForCausalLM": (
        _deepseek,
        {
            **_LLAMA, "max_position_embeddings": 4096, "q_lora_rank": 1536, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
            "num_experts_per_tok": 8, "first_k_dense_replace": 3, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "v_head_dim": 128, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "kv_lora_rank": 512,
        },
    ),
}  # fmt: skip
"""Each architecture's reader, and the values transformers takes for keys that are left out."""
