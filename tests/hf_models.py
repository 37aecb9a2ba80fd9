"""Tiny random models of every Hugging Face family, with a real tokenizer, for tests of import and export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

VOCAB = 320
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0}
DEEPSEEK = SIZES | {
    "num_key_value_heads": 6,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_nextn_predict_layers": 0,
}
GEMMA = SIZES | {"head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16, "pad_token_id": None}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SIZES | {"rope_theta": 10000.0}),
    "llama-tied": ("Llama", SIZES | {"tie_word_embeddings": True, "head_dim": 16}),
    "llama-3.1": ("Llama", SIZES | {"rope_theta": 5000.0, "rope_scaling": LLAMA3, "head_dim": 16}),
    "mistral": ("Mistral", SIZES | {"sliding_window": None}),
    "mistral-window": ("Mistral", SIZES | {"sliding_window": 7}),
    "qwen2": ("Qwen2", SIZES | {"rope_theta": 1e6, "tie_word_embeddings": True}),
    "qwen2-window": ("Qwen2", SIZES | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3-window": (
        "Qwen3",
        SIZES | {"use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 20}),
    "gemma2-long": ("Gemma2", GEMMA | {"num_hidden_layers": 4, "sliding_window": 512}),
    "gemma3": (
        "Gemma3",
        GEMMA | {"rope_theta": 5e4, "rope_local_base_freq": 100.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}, "sliding_window_pattern": 3},
    ),
    "gemma3-untied": ("Gemma3", GEMMA | {"tie_word_embeddings": False, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 7}),
    "phi3": ("Phi3", SIZES | {"pad_token_id": None, "original_max_position_embeddings": 512}),
    "phi3-window": (
        "Phi3",
        SIZES | {"pad_token_id": None, "original_max_position_embeddings": 512, "sliding_window": 9, "partial_rotary_factor": 0.75, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", SIZES | {"rope_theta": 1e6, "head_dim": 12, "tie_word_embeddings": True}),
    "qwen3-yarn": ("Qwen3", SIZES | {"rope_theta": 1e4, "head_dim": 16, "rope_scaling": YARN}),
    "gpt2": ("GPT2", {"vocab_size": VOCAB, "n_positions": 96, "n_embd": 48, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}),
    "gpt2-untied": (
        "GPT2",
        {
            "vocab_size": VOCAB, "n_positions": 96, "n_embd": 48, "n_layer": 2, "n_head": 4, "n_inner": 72,
            "bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral-window": ("Mixtral", SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 11}),
    "qwen3-moe": (
        "Qwen3Moe",
        SIZES | {"head_dim": 12, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "deepseek": ("DeepseekV3", DEEPSEEK),
    "deepseek-no-q-rank": ("DeepseekV3", DEEPSEEK | {"q_lora_rank": None, "norm_topk_prob": False}),
    "deepseek-yarn": ("DeepseekV3", DEEPSEEK | {"rope_scaling": YARN | {"mscale": 0.8, "mscale_all_dim": 1.2}}),
}  # fmt: skip
"""The families, and variants of them: tied heads, grouped queries, stretched contexts, windows, queries without a rank."""
SIX = ("llama", "qwen3", "qwen3-moe", "mixtral", "gpt2", "deepseek")


def config_class(family: str) -> Any:
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")


def make(name: str, **changes: Any) -> Any:
    """A transformers model with weights larger than initial ones, so that every part of it tells."""
    transformers = pytest.importorskip("transformers")
    family, values = CONFIGS[name]
    config = config_class(family)(**values | changes)
    suffix = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family}{suffix}")(config).eval()
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            centre = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(centre + 0.15 * torch.randn(parameter.shape, generator=dice))
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=dice))
    return model


def save(folder: Path, name: str, words: bool = True, **changes: Any) -> Any:
    """The model, saved by transformers as people publish them; returns it."""
    shard = changes.pop("max_shard_size", "5GB")
    model = make(name, **changes)
    model.save_pretrained(folder, max_shard_size=shard)
    if words:
        save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """A byte-level BPE trained on a few lines, with an end token of id 0, as transformers saves it."""
    transformers = pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    lines = [
        "the quick brown fox jumps over the lazy dog",
        "pack my box with five dozen liquor jugs",
        "the five boxing wizards",
    ] * 20
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(lines, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)


def tokens(length: int = 60) -> torch.Tensor:
    return torch.randint(VOCAB, (2, length), generator=torch.Generator().manual_seed(2))


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits
