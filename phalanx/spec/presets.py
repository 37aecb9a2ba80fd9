"""Published models by name, as settings of one decoder; their parameter counts are the published ones, kept by a test.
Read by `spec/load` for `model = "…"`, by `spec/schema`, and by `phalanx models`."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.model import Mla, ModelSpec, Moe, RopeScaling

_GPT = ModelSpec(vocab=50257, norm="layer", activation="gelu", positions="learned", bias=True, tied=True)
_LLAMA2 = ModelSpec(vocab=32000, context=4096)
_LLAMA3 = ModelSpec(vocab=128256, kv_heads=8, rope_theta=500000.0)
_QWEN3 = ModelSpec(
    vocab=151936, kv_heads=8, head_dim=128, qk_norm=True, rope_theta=1e6, norm_eps=1e-6, context=40960
)  # head_dim is not dim / heads: 0.6b, 4b and 32b have wider attention than residual stream

# fmt: off
_MODELS = {
    "gpt2-124m": replace(_GPT, dim=768, layers=12, heads=12, context=1024),
    "gpt3-175b": replace(_GPT, dim=12288, layers=96, heads=96, context=2048),
    "mt-nlg-530b": replace(_GPT, dim=20480, layers=105, heads=128, context=2048, vocab=51200),
    "llama2-7b": replace(_LLAMA2, dim=4096, layers=32, heads=32, ffn=11008),
    "llama2-13b": replace(_LLAMA2, dim=5120, layers=40, heads=40, ffn=13824),
    "llama2-70b": replace(_LLAMA2, dim=8192, layers=80, heads=64, kv_heads=8, ffn=28672),
    "llama3-8b": replace(_LLAMA3, dim=4096, layers=32, heads=32, ffn=14336),
    "llama3-70b": replace(_LLAMA3, dim=8192, layers=80, heads=64, ffn=28672),
    "llama3-405b": replace(
        _LLAMA3, dim=16384, layers=126, heads=128, ffn=53248, context=131072, rope_scaling=RopeScaling(factor=8.0)
    ),
    "llama3.2-1b": replace(
        _LLAMA3, dim=2048, layers=16, heads=32, ffn=8192, tied=True, context=131072, rope_scaling=RopeScaling(factor=32.0)
    ),
    "qwen3-0.6b": replace(_QWEN3, dim=1024, layers=28, heads=16, ffn=3072, tied=True),
    "qwen3-1.7b": replace(_QWEN3, dim=2048, layers=28, heads=16, ffn=6144, tied=True),
    "qwen3-4b": replace(_QWEN3, dim=2560, layers=36, heads=32, ffn=9728, tied=True),
    "qwen3-8b": replace(_QWEN3, dim=4096, layers=36, heads=32, ffn=12288),
    "qwen3-14b": replace(_QWEN3, dim=5120, layers=40, heads=40, ffn=17408),
    "qwen3-32b": replace(_QWEN3, dim=5120, layers=64, heads=64, ffn=25600),
    "qwen3-30b-a3b": replace(
        _QWEN3, dim=2048, layers=48, heads=32, kv_heads=4, ffn=6144, moe=Moe(experts=128, active=8, ffn=768, balance_loss=0.001)
    ),
    "mixtral-8x7b": ModelSpec(
        vocab=32000, dim=4096, layers=32, heads=32, kv_heads=8, ffn=14336, rope_theta=1e6, context=32768,
        moe=Moe(experts=8, active=2, ffn=14336, balance_loss=0.02),
    ),
    "deepseek-v3": ModelSpec(
        vocab=129280, dim=7168, layers=61, heads=128, ffn=18432, norm_eps=1e-6, context=163840,
        rope_scaling=RopeScaling(kind="yarn", factor=40.0, original_context=4096, mscale=1.0, mscale_all_dim=1.0),
        mla=Mla(kv_rank=512, q_rank=1536, nope_dim=128, rope_dim=64, value_dim=128),
        moe=Moe(
            experts=256, active=8, ffn=2048, shared=1, dense_layers=3, router="sigmoid", scale=2.5,
            groups=8, active_groups=4, bias_rate=0.001, balance_loss=0.0001,
        ),
    ),
    # The sizes of PaLM; its blocks run attention and feed-forward side by side, these one after the other.
    "palm-540b": ModelSpec(
        vocab=256000, dim=18432, layers=118, heads=48, kv_heads=1, head_dim=256, ffn=73728, tied=True, context=2048
    ),
    # Small enough for a laptop's CPU in tests; without a vocabulary, so that they take the tokenizer's.
    "tiny-dense": ModelSpec(dim=64, layers=2, heads=4, kv_heads=2, context=1024),
    "tiny-moe": ModelSpec(
        dim=64, layers=2, heads=4, kv_heads=2, context=1024, moe=Moe(experts=8, active=2, ffn=64, bias_rate=0.01)
    ),
    "tiny-mla": ModelSpec(
        dim=64, layers=3, heads=4, ffn=192, context=1024,
        mla=Mla(kv_rank=32, q_rank=48, nope_dim=16, rope_dim=8, value_dim=16),
        moe=Moe(
            experts=8, active=2, ffn=32, shared=1, dense_layers=1, router="sigmoid", scale=2.5,
            groups=4, active_groups=2, bias_rate=0.01, balance_loss=0.0001,
        ),
    ),
}
# fmt: on

PRESETS = {name: replace(model, preset=name) for name, model in _MODELS.items()}
"""Every preset, each carrying its own name."""
