"""Tiny random models of many families of transformers, unmodified. Every size is another one, so that no dimension is taken for another."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from phalanx.models.init import build, reset_buffers
from phalanx.spec import config_text
from phalanx.spec.model import ModelSpec

VOCAB = 330
COMMON = {
    "vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
PLAIN = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4}
GROUPED = PLAIN | {"num_key_value_heads": 2}
WIDE = GROUPED | {"head_dim": 10}
GLM = GROUPED | {"head_dim": 12, "partial_rotary_factor": 0.5}
WINDOW = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_local_experts": 6, "num_experts_per_tok": 2}
ROUTED = {"num_experts": 6, "num_experts_per_tok": 2}
LATENT = PLAIN | {
    "num_key_value_heads": 4, "moe_intermediate_size": 36, "q_lora_rank": 22, "kv_lora_rank": 14, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 12, "n_routed_experts": 8, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
GPT = {"n_embd": 48, "n_head": 4, "n_inner": 80, "n_positions": 64}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "apertus": ("Apertus", GROUPED | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}),
    "arcee": ("Arcee", WIDE),
    "biogpt": ("BioGpt", PLAIN),
    "bloom": ("Bloom", {"hidden_size": 48, "n_head": 4, "hidden_dropout": 0.1}),
    "codegen": ("CodeGen", GPT | {"n_ctx": 64, "rotary_dim": 6}),
    "cohere": ("Cohere", GROUPED),
    "cohere2": ("Cohere2", GROUPED | WINDOW),
    "deepseek_v2": ("DeepseekV2", LATENT),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "ernie4_5": ("Ernie4_5", WIDE),
    "exaone4": ("Exaone4", GROUPED | WINDOW),
    "falcon": (
        "Falcon",
        {"hidden_size": 48, "num_attention_heads": 4, "ffn_hidden_size": 80, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "gemma": ("Gemma", WIDE),
    "gemma2": ("Gemma2", WIDE | WINDOW | {"query_pre_attn_scalar": 10}),
    "gemma3": ("Gemma3Text", WIDE | WINDOW | {"query_pre_attn_scalar": 10}),
    "glm": ("Glm", GLM),
    "glm4": ("Glm4", GLM),
    "glm4_moe": (
        "Glm4Moe",
        GLM | {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    ),
    "gpt2": ("GPT2", GPT),
    "gpt_bigcode": ("GPTBigCode", GPT),
    "gpt_neo": (
        "GPTNeo",
        {
            "hidden_size": 48, "num_heads": 4, "intermediate_size": 80, "num_layers": 2, "window_size": 8,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    "gpt_neox": ("GPTNeoX", PLAIN),
    "gpt_oss": (
        "GptOss",
        WIDE | WINDOW | EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    ),
    "gptj": ("GPTJ", GPT | {"rotary_dim": 6}),
    "granite": ("Granite", GROUPED),
    "granitemoe": ("GraniteMoe", GROUPED | EXPERTS),
    "jamba": ("Jamba", GROUPED | {"num_experts": 2, "num_experts_per_tok": 1, "attn_layer_period": 2, "attn_layer_offset": 1}),
    "llama": ("Llama", WIDE),
    "llama4": (
        "Llama4Text",
        GROUPED
        | {
            "head_dim": 12, "intermediate_size_mlp": 88, "num_local_experts": 6, "num_experts_per_tok": 1, "attention_chunk_size": 8,
            "interleave_moe_layer_step": 1,
        },
    ),
    "mistral": ("Mistral", WIDE | {"sliding_window": 8}),
    "mixtral": ("Mixtral", WIDE | EXPERTS),
    "mpt": ("Mpt", {"d_model": 48, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "expansion_ratio": 2}),
    "nemotron": ("Nemotron", WIDE),
    "olmo": ("Olmo", GROUPED),
    "olmo2": ("Olmo2", GROUPED),
    "olmo3": ("Olmo3", GROUPED | WINDOW),
    "olmoe": ("Olmoe", GROUPED | ROUTED),
    "opt": ("OPT", {"hidden_size": 48, "ffn_dim": 80, "num_attention_heads": 4, "word_embed_proj_dim": 48, "layerdrop": 0.5}),
    "persimmon": ("Persimmon", PLAIN),
    "phi": ("Phi", PLAIN | {"partial_rotary_factor": 0.5}),
    "phi3": ("Phi3", GROUPED | {"tie_word_embeddings": False}),
    "phimoe": ("Phimoe", GROUPED | EXPERTS),
    "qwen2": ("Qwen2", GROUPED),
    "qwen2_moe": ("Qwen2Moe", GROUPED | ROUTED | {"moe_intermediate_size": 36, "shared_expert_intermediate_size": 52}),
    "qwen3": ("Qwen3", WIDE),
    "qwen3_moe": ("Qwen3Moe", WIDE | ROUTED | {"moe_intermediate_size": 36}),
    "seed_oss": ("SeedOss", WIDE),
    "smollm3": ("SmolLM3", GROUPED),
    "stablelm": ("StableLm", GROUPED | {"partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2", GROUPED),
}  # fmt: skip
QUICK = ("deepseek_v3", "falcon", "gemma2", "gpt2", "gpt_oss", "mistral", "olmoe", "phi3")
"""One of each kind: latent attention, its own attention, capped scores, tied weights, sinks, a window, experts, fused matrices."""
ONE_DOCUMENT = ("bloom", "jamba", "mpt")
"""Those that cannot keep documents apart."""


def marked(names: Any) -> list[Any]:
    """Parameters of a test: most of them are slow."""
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


@cache
def config(name: str) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5")
    family, sizes = FAMILIES[name]
    return getattr(transformers, f"{family}Config")(**COMMON | sizes)


def spec(name: str) -> ModelSpec:
    return config_text.spec_of(config_text.parse(config(name).to_json_string(use_diff=False), name))


def theirs(name: str, attention: str = "eager") -> Any:
    """transformers' own model. Weights are larger than initial ones, those of norms and biases random too, so that every part tells."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_config(config(name), attn_implementation=attention).float().eval()
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=dice)
    return model


def ours(name: str, weights: Any) -> Any:
    """The model as it is trained, with the weights of another."""
    model = build(spec(name)).to_empty(device="cpu")
    reset_buffers(model)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(weights.get_parameter(key))
    return model


def batch(rows: int = 3, length: int = 14) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(5))
