"""Experts, latent attention and YaRN compute what the published models compute: logits against transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from phalanx.models.decoder import Decoder
from phalanx.models.layers import rotary
from phalanx.models.moe import routers
from phalanx.spec.model import Mla, ModelSpec, Moe, RopeScaling

transformers = pytest.importorskip("transformers")

LENGTH = 60
SIZES = {
    "vocab_size": 61, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 0, "attn_implementation": "eager",
}  # fmt: skip
SPEC = ModelSpec(vocab=61, dim=48, ffn=80, layers=3, heads=4, context=512)
LATENT = Mla(kv_rank=24, q_rank=20, nope_dim=16, rope_dim=8, value_dim=12)
DEEPSEEK = Moe(
    experts=8,
    active=3,
    ffn=40,
    shared=2,
    dense_layers=1,
    router="sigmoid",
    scale=2.5,
    groups=4,
    active_groups=2,
    bias_rate=0.001,
)
NAMES = {
    "attention.query": "self_attn.q_proj", "attention.key": "self_attn.k_proj", "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj", "attention.query_norm": "self_attn.q_norm", "attention.key_norm": "self_attn.k_norm",
    "attention.query_down": "self_attn.q_a_proj", "attention.query_rank_norm": "self_attn.q_a_layernorm",
    "attention.query_up": "self_attn.q_b_proj", "attention.kv_down": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_rank_norm": "self_attn.kv_a_layernorm", "attention.kv_up": "self_attn.kv_b_proj",
    "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj", "mlp.router": "mlp.gate",
    "mlp.shared.gate": "mlp.shared_experts.gate_proj", "mlp.shared.up": "mlp.shared_experts.up_proj",
    "mlp.shared.down": "mlp.shared_experts.down_proj",
}  # fmt: skip
OUTSIDE = {"embed.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight", "head.weight": "lm_head.weight"}


def ours(name: str, theirs: dict[str, Tensor]) -> Tensor:
    """Our tensor out of a transformers model's."""
    if name in OUTSIDE:
        return theirs[OUTSIDE[name]]
    _, number, *middle, kind = name.split(".")
    layer, where = f"model.layers.{number}", ".".join(middle)
    if where == "mlp.experts":
        if kind == "down":
            return theirs[f"{layer}.mlp.experts.down_proj"]
        return theirs[f"{layer}.mlp.experts.gate_up_proj"].chunk(2, dim=1)[kind == "up"]
    if (where, kind) == ("mlp.router", "bias"):
        return theirs[f"{layer}.mlp.gate.e_score_correction_bias"]
    return theirs[f"{layer}.{NAMES[where]}.{kind}"]


def mixtral() -> tuple[Any, ModelSpec]:
    moe = Moe(experts=5, active=2, ffn=80)
    config = transformers.MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2, rms_norm_eps=1e-5, rope_theta=1e6
    )
    return transformers.MixtralForCausalLM(config), replace(SPEC, kv_heads=2, rope_theta=1e6, moe=moe)


def qwen(normalize: bool) -> tuple[Any, ModelSpec]:
    moe = Moe(experts=8, active=3, ffn=36, dense_layers=1, normalize=normalize)
    config = transformers.Qwen3MoeConfig(
        **SIZES, num_key_value_heads=2, head_dim=16, moe_intermediate_size=36, num_experts=8, num_experts_per_tok=3,
        norm_topk_prob=normalize, mlp_only_layers=[0], rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False,
    )  # fmt: skip
    spec = replace(SPEC, kv_heads=2, head_dim=16, qk_norm=True, norm_eps=1e-6, rope_theta=1e6, moe=moe)
    return transformers.Qwen3MoeForCausalLM(config), spec


def deepseek(mla: Mla = LATENT, scaling: RopeScaling | None = None) -> tuple[Any, ModelSpec]:
    config = transformers.DeepseekV3Config(
        **SIZES, num_key_value_heads=4, kv_lora_rank=mla.kv_rank, q_lora_rank=mla.q_rank, qk_nope_head_dim=mla.nope_dim,
        qk_rope_head_dim=mla.rope_dim, v_head_dim=mla.value_dim, moe_intermediate_size=40, n_routed_experts=8,
        num_experts_per_tok=3, n_shared_experts=2, first_k_dense_replace=1, n_group=4, topk_group=2, norm_topk_prob=True,
        routed_scaling_factor=2.5, rms_norm_eps=1e-5, rope_interleave=False, rope_theta=10000.0, num_nextn_predict_layers=0,
        **({} if scaling is None else {"rope_scaling": theirs_of(scaling)}),
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config), replace(SPEC, mla=mla, moe=DEEPSEEK, rope_scaling=scaling)


def theirs_of(scaling: RopeScaling) -> dict[str, Any]:
    return {
        "rope_type": "yarn", "factor": scaling.factor, "original_max_position_embeddings": scaling.original_context,
        "beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow,
        "mscale": scaling.mscale, "mscale_all_dim": scaling.mscale_all_dim,
    }  # fmt: skip


YARN = RopeScaling(kind="yarn", factor=16.0, original_context=32, beta_fast=4.0, beta_slow=0.5, mscale=1.0, mscale_all_dim=1.0)
UNEVEN = replace(YARN, mscale=0.7, mscale_all_dim=1.3)
FAMILIES = {
    "mixtral": mixtral,
    "qwen3-moe": lambda: qwen(normalize=True),
    "qwen3-moe, weights as they are": lambda: qwen(normalize=False),
    "deepseek": deepseek,
    "deepseek, queries straight": lambda: deepseek(replace(LATENT, q_rank=None)),
    "deepseek, yarn": lambda: deepseek(scaling=YARN),
    "deepseek, yarn with two strengths": lambda: deepseek(scaling=UNEVEN),
}


def shake(model: nn.Module, dice: torch.Generator) -> None:
    """Larger than initial weights, so that every part of the model tells; and router biases that change choices."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            centre = 1.0 if name.endswith("norm.weight") else 0.0
            tensor.copy_(centre + 0.15 * torch.randn(tensor.shape, generator=dice))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(family: str) -> None:
    theirs, spec = FAMILIES[family]()
    dice = torch.Generator().manual_seed(1)
    shake(theirs.eval(), dice)
    model = Decoder(spec)
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in theirs.parameters())
    state = theirs.state_dict()
    model.load_state_dict({name: ours(name, state) for name in model.state_dict()})
    tokens = torch.randint(61, (2, LENGTH), generator=dice)
    with torch.no_grad():
        expected = theirs(input_ids=tokens).logits
        got = model(tokens, torch.arange(LENGTH).expand(2, LENGTH))
    assert expected.std() > 0.5  # there is something to compare
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_router_chooses_and_weighs_as_deepseek_does() -> None:
    theirs, spec = deepseek()
    dice = torch.Generator().manual_seed(3)
    shake(theirs, dice)
    state = theirs.state_dict()
    model = Decoder(spec)
    model.load_state_dict({name: ours(name, state) for name in model.state_dict()})
    x = torch.randn(2, 50, 48, generator=dice)
    for index, router in enumerate(routers(model).values(), start=1):
        _, weights, experts = theirs.model.layers[index].mlp.gate(x)
        chosen, weighed = router(x)
        assert torch.equal(chosen.sort().values, experts.sort().values)
        table, expected = torch.zeros(2, 100, 8).unbind(0)
        torch.testing.assert_close(
            table.scatter(1, chosen, weighed), expected.scatter(1, experts, weights), atol=1e-6, rtol=1e-6
        )
        with torch.no_grad():
            assert router.bias is not None
            router.bias.zero_()
        assert not torch.equal(router(x)[0].sort().values, experts.sort().values)  # so the bias had its part in the choice


@pytest.mark.parametrize("theta", [100.0, 10000.0, 1e6])
@pytest.mark.parametrize(
    "scaling", [YARN, UNEVEN, replace(YARN, mscale_all_dim=0.0), replace(YARN, beta_fast=32.0, beta_slow=1.0)]
)
def test_dense_models_stretch_rotary_positions_as_yarn_does(theta: float, scaling: RopeScaling) -> None:
    config = transformers.LlamaConfig(**SIZES, head_dim=32, rope_theta=theta, rope_scaling=theirs_of(scaling))
    theirs = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    positions = torch.arange(0, 500, 7)[None]
    expected = theirs(torch.zeros(1), positions)
    got = rotary(replace(SPEC, head_dim=32, rope_theta=theta, rope_scaling=scaling), positions)
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine[:, 0], other[..., :16], atol=2e-5, rtol=2e-5)


def test_yarn_keeps_blends_and_slows_frequencies() -> None:
    # Guards the comparisons above: were no frequency in one of the three ranges, they would not test that range.
    plain = transformers.DeepseekV3Model(deepseek()[0].config).rotary_emb.inv_freq
    ratios = deepseek(scaling=YARN)[0].model.rotary_emb.inv_freq / plain
    kept, slowed = torch.isclose(ratios, torch.tensor(1.0)), torch.isclose(ratios, torch.tensor(1 / 16))
    assert kept.any() and slowed.any() and (~kept & ~slowed).any()
