"""Published models by name, as settings of one decoder; their parameter counts are the published ones, kept by a test.
Read by `spec/load` for `model = "…"`, by `spec/schema`, and by `phalanx models`."""

from __future__ import annotations

from dataclasses import replace

from phalanx.spec.model import ModelSpec, RopeScaling

_GPT = ModelSpec(vocab=50257, norm="layer", activation="gelu", positions="learned", bias=True, tied=True)
_LLAMA2 = ModelSpec(vocab=32000, context=4096)
_LLAMA3 = ModelSpec(vocab=128256, kv_heads=8, rope_theta=500000.0)
_QWEN3 = ModelSpec(
    vocab=151936, kv_heads=8, head_dim=128, qk_norm=True, rope_theta=1e6, norm_eps=1e-6, context=40960
)  # head_dim is not dim / heads: 0.6b, 4b and 32b have wider attention than residual stream

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
    # Small enough for a laptop's CPU in tests; without a vocabulary, so that it takes the tokenizer's.
    "tiny-dense": ModelSpec(dim=64, layers=2, heads=4, kv_heads=2, context=1024),
}

PRESETS = {name: replace(model, preset=name) for name, model in _MODELS.items()}
"""Every preset, each carrying its own name."""
