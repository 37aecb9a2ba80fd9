"""Tiny random models of many Hugging Face families, unmodified. Every size is different, so that no dimension is mistaken for another. Imported
by tests as `hf_zoo`."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

VOCAB = 248
_COMMON = {
    "vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 64, "use_cache": False,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GQA = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 8, "num_key_value_heads": 4}
_HEAD = _GQA | {"head_dim": 10}
_MHA = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4}
_MLA = {
    "hidden_size": 48, "intermediate_size": 80, "moe_intermediate_size": 36, "num_attention_heads": 4, "num_key_value_heads": 4,
    "q_lora_rank": 22, "kv_lora_rank": 14, "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 12, "n_routed_experts": 6,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
}  # fmt: skip
_GPT2 = {
    "n_embd": 48, "n_head": 4, "n_inner": 80, "n_positions": 64, "n_layer": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}

ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _HEAD),
    "mistral": ("Mistral", _HEAD | {"sliding_window": 8}),
    "qwen2": ("Qwen2", _GQA),
    "qwen3": ("Qwen3", _HEAD),
    "gemma": ("Gemma", _HEAD),
    "gemma2": ("Gemma2", _HEAD | _SLIDING | {"query_pre_attn_scalar": 10}),
    "gemma3": ("Gemma3Text", _HEAD | _SLIDING | {"query_pre_attn_scalar": 10}),
    "phi3": ("Phi3", _GQA | {"tie_word_embeddings": False}),
    "phi": ("Phi", _MHA | {"partial_rotary_factor": 0.5}),
    "gpt_neox": ("GPTNeoX", _MHA),
    "gpt2": ("GPT2", _GPT2),
    "gptj": ("GPTJ", _GPT2 | {"rotary_dim": 6}),
    "codegen": ("CodeGen", _GPT2 | {"rotary_dim": 6}),
    "olmo": ("Olmo", _GQA),
    "olmo2": ("Olmo2", _GQA),
    "olmo3": ("Olmo3", _GQA | _SLIDING),
    "falcon": (
        "Falcon",
        {"hidden_size": 48, "num_attention_heads": 8, "ffn_hidden_size": 80, "multi_query": False, "new_decoder_architecture": True, "num_kv_heads": 4},
    ),
    "bloom": ("Bloom", {"hidden_size": 48, "n_head": 4, "n_layer": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "mpt": ("Mpt", {"d_model": 48, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64}),
    "cohere": ("Cohere", _GQA),
    "cohere2": ("Cohere2", _GQA | _SLIDING),
    "granite": ("Granite", _GQA),
    "stablelm": ("StableLm", _GQA | {"hidden_size": 64, "partial_rotary_factor": 0.5}),
    "starcoder2": ("Starcoder2", _GQA | {"residual_dropout": 0.0, "embedding_dropout": 0.0}),
    "glm": ("Glm", _HEAD | {"partial_rotary_factor": 0.5}),
    "glm4": ("Glm4", _HEAD | {"partial_rotary_factor": 0.5}),
    "nemotron": ("Nemotron", _HEAD),
    "smollm3": ("SmolLM3", _GQA),
    "ernie4_5": ("Ernie4_5", _HEAD),
    "mixtral": ("Mixtral", _HEAD | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2Moe",
        _GQA | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36, "shared_expert_intermediate_size": 52},
    ),
    "qwen3_moe": ("Qwen3Moe", _HEAD | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 36}),
    "olmoe": ("Olmoe", _GQA | {"num_experts": 6, "num_experts_per_tok": 2}),
    "granitemoe": ("GraniteMoe", _GQA | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "gpt_oss": ("GptOss", _HEAD | _SLIDING | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "deepseek_v3": ("DeepseekV3", _MLA),
    "opt": ("OPT", {"hidden_size": 48, "ffn_dim": 80, "num_attention_heads": 4, "word_embed_proj_dim": 48, "dropout": 0.0}),
}  # fmt: skip
_EAGER = ("bloom", "mpt", "gptj", "codegen", "gpt_oss", "gemma2")
_NO_POSITIONS = ("bloom", "mpt")


class Plain(nn.Module):
    """Tokens and positions in, logits out, as Phalanx calls a model."""

    def __init__(self, model: Any, positions: bool):
        super().__init__()
        self.model, self.positions = model, positions

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        more = {"position_ids": positions_BS} if self.positions else {}
        return self.model(input_ids=tokens_BS, use_cache=False, **more).logits


def config(name: str, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    family, values = ZOO[name]
    kind = getattr(transformers, f"{family}Config", None)
    if kind is None:
        pytest.skip(f"this transformers has no {family}")
    made = kind(**_COMMON | values | changes)
    made._experts_implementation = "batched_mm"  # a loop over experts depends on data and has no graph
    return made


def make(name: str, device: str = "meta", **changes: Any) -> nn.Module:
    """On the CPU with weights larger than initial ones, so that every part of it tells."""
    transformers = pytest.importorskip("transformers")
    attention = "eager" if name in _EAGER else "sdpa"
    settings = config(name, **changes)
    torch.manual_seed(0)
    with warnings.catch_warnings(), torch.device(device):
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation=attention).float().train()
    if device == "cpu":
        dice = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=dice)
    return Plain(model, name not in _NO_POSITIONS)


def batch(rows: int = 2, length: int = 17) -> tuple[Tensor, Tensor]:
    """Tokens and targets."""
    tokens = torch.randint(3, VOCAB, (rows, length + 1), generator=torch.Generator().manual_seed(5))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
