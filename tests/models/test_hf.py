"""The decoder computes what the published models compute: logits against transformers, for the same random weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from phalanx.models.dense import Decoder
from phalanx.spec.model import ModelSpec, RopeScaling

transformers = pytest.importorskip("transformers")

VOCAB = 61
LLAMA_NAMES = {
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
}
GPT_NAMES = {
    "attention.output": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
}
OUTSIDE = {
    "embed.weight": ("model.embed_tokens.weight", "transformer.wte.weight"),
    "places.weight": ("", "transformer.wpe.weight"),
    "norm.weight": ("model.norm.weight", "transformer.ln_f.weight"),
    "norm.bias": ("", "transformer.ln_f.bias"),
    "head.weight": ("lm_head.weight", ""),
}


def of_llama(name: str, theirs: dict[str, Tensor]) -> Tensor:
    """Our parameter out of a Llama's or Qwen3's."""
    if name in OUTSIDE:
        return theirs[OUTSIDE[name][0]]
    _, number, *middle, kind = name.split(".")
    return theirs[f"model.layers.{number}.{LLAMA_NAMES['.'.join(middle)]}.{kind}"]


def of_gpt(name: str, theirs: dict[str, Tensor]) -> Tensor:
    """Our parameter out of a GPT-2's: its matrices are [in, out], and query, key and value are columns of one."""
    if name in OUTSIDE:
        return theirs[OUTSIDE[name][1]]
    _, number, *middle, kind = name.split(".")
    where = ".".join(middle)
    thirds = ("attention.query", "attention.key", "attention.value")
    if where in thirds:
        tensor = theirs[f"transformer.h.{number}.attn.c_attn.{kind}"].chunk(3, dim=-1)[thirds.index(where)]
    else:
        tensor = theirs[f"transformer.h.{number}.{GPT_NAMES[where]}.{kind}"]
    return tensor.T if tensor.ndim == 2 else tensor


def llama(**values: Any) -> Any:
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_implementation": "eager",
    }
    return sizes | values


def llama_spec(**values: Any) -> ModelSpec:
    sizes: dict[str, Any] = {"vocab": VOCAB, "dim": 48, "ffn": 80, "layers": 3, "heads": 6, "kv_heads": 2, "context": 512}
    return ModelSpec(**(sizes | values))


def llama_2(tied: bool) -> tuple[Any, ModelSpec]:
    config = transformers.LlamaConfig(**llama(rope_theta=10000.0, rms_norm_eps=1e-5, tie_word_embeddings=tied))
    return transformers.LlamaForCausalLM(config), llama_spec(tied=tied)


def llama_3_stretched(tied: bool) -> tuple[Any, ModelSpec]:
    # Of the eight frequencies of a head some are kept, some blended and some slowed: see the test of the frequencies.
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    theirs = scaling | {"rope_type": "llama3", "original_max_position_embeddings": 64}
    config = transformers.LlamaConfig(
        **llama(rope_theta=5000.0, rms_norm_eps=1e-5, rope_scaling=theirs, head_dim=16, tie_word_embeddings=tied)
    )
    ours = RopeScaling(**scaling, original_context=64)
    return transformers.LlamaForCausalLM(config), llama_spec(rope_theta=5000.0, rope_scaling=ours, head_dim=16, tied=tied)


def qwen_3() -> tuple[Any, ModelSpec]:
    config = transformers.Qwen3Config(**llama(rope_theta=1e6, rms_norm_eps=1e-6, head_dim=12, tie_word_embeddings=True))
    spec = llama_spec(rope_theta=1e6, norm_eps=1e-6, head_dim=12, qk_norm=True, tied=True)
    assert spec.head != spec.dim // spec.heads
    return transformers.Qwen3ForCausalLM(config), spec


def gpt_2() -> tuple[Any, ModelSpec]:
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_positions=64,
        n_embd=48,
        n_layer=3,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation="eager",
    )
    spec = ModelSpec(
        vocab=VOCAB, dim=48, layers=3, heads=4, context=64,
        norm="layer", activation="gelu", positions="learned", bias=True, tied=True,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), spec


FAMILIES = {
    "llama-2": lambda: llama_2(tied=False),
    "llama-2-tied": lambda: llama_2(tied=True),
    "llama-3.1": lambda: llama_3_stretched(tied=False),
    "llama-3.2-tied": lambda: llama_3_stretched(tied=True),
    "qwen3": qwen_3,
    "gpt2": gpt_2,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str) -> None:
    theirs, spec = FAMILIES[family]()
    theirs.eval()
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():  # larger than initial weights, so that every part of the model tells
            centre = 1.0 if parameter.ndim == 1 else 0.0
            parameter.copy_(centre + 0.15 * torch.randn(parameter.shape, generator=dice))
    state = theirs.state_dict()
    ours = Decoder(spec)
    of = of_gpt if family == "gpt2" else of_llama
    ours.load_state_dict({name: of(name, state) for name, _ in ours.named_parameters()})
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
    tokens = torch.randint(VOCAB, (2, 60), generator=dice)
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits
        got = ours(tokens, torch.arange(60).expand(2, 60))
    assert expected.std() > 0.5  # there is something to compare
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_the_stretched_llama_keeps_blends_and_slows_frequencies() -> None:
    # Guards the comparison above: were no frequency in one of the three ranges, it would not test that range.
    plain, (stretched, _) = llama_2(tied=False)[0], llama_3_stretched(tied=False)
    assert plain.model.rotary_emb.inv_freq[0] == 1.0
    bases = 5000.0 ** -(torch.arange(0, 16, 2) / 16)
    ratios = stretched.model.rotary_emb.inv_freq / bases
    kept, slowed = torch.isclose(ratios, torch.tensor(1.0)), torch.isclose(ratios, torch.tensor(1 / 8))
    assert kept.any()
    assert slowed.any()
    assert (~kept & ~slowed).any()
