"""config.json of every family, read and written; what would change the model and is not supported is refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hf_models import CONFIGS, SIZES, YARN, config_class

from phalanx.spec import hf_config, hf_config_write
from phalanx.spec.errors import RunError
from phalanx.spec.model import PRESETS, Mla, ModelSpec, Moe, RopeScaling

LLAMA: dict[str, Any] = SIZES | {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
GPT2: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12}
DEEPSEEK: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
    "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_shared_experts": 1, "n_routed_experts": 256, "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 8,
    "topk_group": 4, "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 3, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "hidden_act": "silu", "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 1, "rope_theta": 10000, "attention_bias": False, "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0,
    },
}  # fmt: skip
MIXTRAL: dict[str, Any] = LLAMA | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2}
QWEN_MOE: dict[str, Any] = LLAMA | {
    "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 12,
}  # fmt: skip


def spec_of(folder: Path, config: Any) -> ModelSpec:
    (folder / "config.json").write_text(json.dumps(config))
    return hf_config.model_spec(folder)


def _balanced(preset: ModelSpec) -> ModelSpec:
    """A preset with what a config.json can say of balancing: of DeepSeek's, nothing."""
    if preset.mla is None or preset.moe is None:
        return preset
    return replace(preset, moe=replace(preset.moe, balance_loss=0.0))


def test_the_published_deepseek_is_the_preset(tmp_path: Path) -> None:
    spec = spec_of(tmp_path, DEEPSEEK)
    preset = _balanced(PRESETS["deepseek-v3"])
    assert replace(spec, mtp_depth=preset.mtp_depth) == replace(preset, preset=None, head_dim=spec.head_dim)
    assert spec.mtp_depth == 0  # no weights of it are in the folder
    index = {"weight_map": {"model.layers.61.eh_proj.weight": "model-00001-of-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert hf_config.model_spec(tmp_path).mtp_depth == 1


def test_keys_left_out_mean_what_transformers_takes_them_for(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    for family, more in (
        ("Llama", {}),
        ("Qwen2", {}),
        ("Gemma2", {}),
        ("Phi3", {"pad_token_id": None}),
        ("Gemma3", {}),
        ("Qwen3", {}),
        ("Mixtral", {}),
        ("Qwen3Moe", {"moe_intermediate_size": 64, "num_experts": 8}),
    ):
        given = {key: LLAMA[key] for key in sizes} | more
        theirs = config_class(family)(**given)
        architecture = f"{family}ForCausalLM"
        short = spec_of(tmp_path, given | {"architectures": [architecture]})
        full = spec_of(tmp_path, theirs.to_dict() | {"architectures": [architecture]})
        assert short == full, family


def test_gpt2_takes_its_defaults_and_ties_its_head(tmp_path: Path) -> None:
    assert spec_of(tmp_path, GPT2) == replace(PRESETS["gpt2-124m"], preset=None, ffn=3072)


@pytest.mark.parametrize("new", [True, False])
def test_both_spellings_of_rotary_settings(tmp_path: Path, new: bool) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 64
    table = {"rope_parameters": scaling | {"rope_theta": 5e5}} if new else {"rope_theta": 5e5, "rope_scaling": scaling}
    spec = spec_of(tmp_path, LLAMA | table)
    assert spec.rope_theta == 5e5
    assert spec.rope_scaling == RopeScaling(factor=8.0, original_context=64)


def test_balancing_follows_the_config(tmp_path: Path) -> None:
    quiet = spec_of(tmp_path, MIXTRAL | {"router_aux_loss_coef": 0.02})
    asked = spec_of(tmp_path, MIXTRAL | {"router_aux_loss_coef": 0.02, "output_router_logits": True})
    assert quiet.moe == Moe(experts=8, active=2, ffn=80)
    assert asked.moe == Moe(experts=8, active=2, ffn=80, balance_loss=0.02)
    deepseek = spec_of(tmp_path, DEEPSEEK).moe
    assert deepseek is not None and deepseek.bias_rate == 0.001


GEMMA: dict[str, Any] = SIZES | {"architectures": ["Gemma2ForCausalLM"], "sliding_window": 7}
QWEN2: dict[str, Any] = LLAMA | {"architectures": ["Qwen2ForCausalLM"]}
SLIDING = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}


@pytest.mark.parametrize(
    ("change", "windows"),
    [
        ({}, [64, 64, 64]),
        ({"max_window_layers": 2}, [None, None, 64]),
        ({"max_window_layers": 28}, [None, None, None]),
        ({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, [64, None, 64]),
        ({"layer_types": ["full_attention", "sliding_attention", "full_attention"]}, [None, 64, None]),
        ({"use_sliding_window": False}, [None, None, None]),
        ({"sliding_window": None}, [None, None, None]),
    ],
)
def test_the_window_is_in_the_layers_that_have_it(tmp_path: Path, change: dict[str, Any], windows: list[int | None]) -> None:
    spec = spec_of(tmp_path, QWEN2 | SLIDING | change)
    assert [spec.window_of(layer) for layer in range(3)] == windows
    assert spec.window == next((window for window in windows if window), None)
    assert spec_of(tmp_path, hf_config_write.config(spec)) == spec


REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (LLAMA, {"architectures": ["OPTForCausalLM"]}, "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"),
    (LLAMA, {"architectures": None}, "architectures = null"),
    (LLAMA, {"attention_bias": True}, "attention_bias = true"),
    (LLAMA, {"mlp_bias": True}, "mlp_bias = true"),
    (LLAMA, {"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
    (LLAMA, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    (LLAMA, {"logit_scale": 0.5}, "logit_scale = 0.5"),
    (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 'rope_scaling.rope_type = "dynamic"'),
    (GEMMA, {"hidden_activation": "gelu"}, 'hidden_activation = "gelu"'),
    (GEMMA, {"attn_logit_softcapping": "soft"}, 'attn_logit_softcapping = "soft"'),
    (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
    (GEMMA, {"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor = null"),
    (
        GEMMA | {"architectures": ["Gemma3ForCausalLM"]},
        {"rope_parameters": {"full_attention": {}, "sliding_attention": {"rope_type": "yarn"}}},
        'rope_parameters.sliding_attention.rope_type = "yarn"',
    ),
    (LLAMA, {"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate = false"),
    (LLAMA, {"rope_scaling": YARN | {"attention_factor": 2.0}}, "rope_scaling.attention_factor = 2.0"),
    (LLAMA, {"rope_scaling": YARN | {"ramp": 3}}, "rope_scaling.ramp = 3"),
    (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    (LLAMA, {"layer_types": ["full_attention", "sliding_attention"]}, 'layer_types = "sliding_attention"'),
    (LLAMA, {"hidden_size": "wide"}, 'hidden_size = "wide"'),
    (LLAMA, {"vocab_size": None}, "vocab_size = null"),
    (LLAMA, {"hidden_size": 50}, "hidden_size = 50"),
    (LLAMA, {"rope_scaling": "yarn"}, 'rope_scaling = "yarn"'),
    (LLAMA, {"rope_scaling": YARN | {"factor": "long"}}, 'rope_scaling.factor = "long"'),
    (LLAMA, {"rope_scaling": YARN | {"mscale": True}}, "rope_scaling.mscale = true"),
    (LLAMA, {"rope_theta": -5}, "rope_theta = -5"),
    (LLAMA, {"architectures": [["LlamaForCausalLM"]]}, 'architectures = [["LlamaForCausalLM"]]'),
    (LLAMA, {"num_hidden_layers": float("inf")}, "num_hidden_layers = Infinity"),
    (LLAMA, {"num_key_value_heads": 2.5}, "num_key_value_heads = 2.5"),
    (LLAMA, {"rms_norm_eps": 10**400}, "rms_norm_eps = 1000"),
    (LLAMA, {"tie_word_embeddings": "yes"}, 'tie_word_embeddings = "yes"'),
    (LLAMA, {"initializer_range": "small"}, 'initializer_range = "small"'),
    (LLAMA, {"layer_types": 5}, "layer_types = 5"),
    (GPT2, {"n_inner": "wide"}, 'n_inner = "wide"'),
    (DEEPSEEK, {"first_k_dense_replace": "all"}, 'first_k_dense_replace = "all"'),
    (DEEPSEEK, {"q_lora_rank": "low"}, 'q_lora_rank = "low"'),
    (DEEPSEEK, {"n_group": "2"}, 'n_group = "2"'),
    (DEEPSEEK, {"num_nextn_predict_layers": "one"}, 'num_nextn_predict_layers = "one"'),
    (QWEN_MOE, {"output_router_logits": True, "router_aux_loss_coef": "x"}, 'router_aux_loss_coef = "x"'),
    (
        LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": None},
        {"sliding_window": "4"},
        'sliding_window = "4"',
    ),
    (GPT2, {"n_head": 11}, "n_embd = 768"),
    (LLAMA, {"use_sliding_window": True}, "use_sliding_window = true"),
    (QWEN2, {"layer_types": ["sliding_attention"] * 3}, 'layer_types = "sliding_attention": such layers need'),
    (QWEN2 | SLIDING, {"layer_types": ["sliding_attention"] * 2}, "it names 2 layers of 3"),
    (QWEN2 | SLIDING, {"layer_types": ["chunked_attention"] * 3}, 'layer_types = "chunked_attention"'),
    (
        QWEN2 | SLIDING | {"num_hidden_layers": 5},
        {"layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "full", "sliding", "full")]},
        "the window may begin after some layers",
    ),
    (QWEN_MOE, {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
    (QWEN_MOE, {"mlp_only_layers": [0]}, "mlp_only_layers = [0]"),
    (GPT2, {"activation_function": "relu"}, 'activation_function = "relu"'),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = true"),
    (GPT2, {"scale_attn_weights": False}, "scale_attn_weights = false"),
    (DEEPSEEK, {"num_key_value_heads": 8}, "num_key_value_heads = 8"),
    (DEEPSEEK, {"topk_method": "greedy"}, 'topk_method = "greedy"'),
    (DEEPSEEK, {"scoring_func": "softmax"}, 'scoring_func = "softmax"'),
    (DEEPSEEK, {"n_shared_experts": 0}, "n_shared_experts = 0: a number above 0"),
    (DEEPSEEK, {"n_shared_experts": -1}, "n_shared_experts = -1: a number above 0"),
]


@pytest.mark.parametrize(("base", "change", "said"), REFUSED, ids=[said.split(",")[0] for _, _, said in REFUSED])
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], said: str
) -> None:
    spec_of(tmp_path, base)  # which itself is fine
    with pytest.raises(RunError) as refused:
        spec_of(tmp_path, base | change)
    (sentence,) = refused.value.problems
    assert said in sentence and str(tmp_path / "config.json") in sentence


@pytest.mark.parametrize("text", ["", "[1]", '{"architectures": ["LlamaForCausalLM"', "null"])
def test_a_broken_config_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(RunError, match=r"config\.json"):
        hf_config.model_spec(tmp_path)


def test_a_window_that_is_never_reached_is_no_window(tmp_path: Path) -> None:
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 512}
    assert spec_of(tmp_path, mistral) == spec_of(tmp_path, mistral | {"sliding_window": None})


@pytest.mark.parametrize("name", [name for name, spec in PRESETS.items() if spec.vocab is not None])
def test_a_preset_survives_the_way_there_and_back(tmp_path: Path, name: str) -> None:
    preset = _balanced(PRESETS[name])
    try:
        config = hf_config_write.config(preset)
    except RunError:
        assert name.startswith("palm"), "no published family is made like PaLM alone"
        return
    back = spec_of(tmp_path, config)
    full = replace(preset, preset=None, mtp_depth=0, kv_heads=back.kv_heads, head_dim=back.head_dim, ffn=back.ffn)
    assert replace(back, mtp_loss_weight=full.mtp_loss_weight) == full
    assert (back.kv, back.hidden) == (preset.kv, preset.hidden)
    assert preset.mla is not None or back.head == preset.head


DENSE = ModelSpec(vocab=64, dim=32, heads=4)
MOE = replace(DENSE, moe=Moe(experts=4, active=2, ffn=16))
UNEXPRESSIBLE = [
    (replace(DENSE, activation="gelu"), 'model.activation = "gelu"'),
    (replace(DENSE, bias=True), "model.bias = true"),
    (replace(DENSE, qkv_bias=True, qk_norm=True), "model.qk_norm = true"),
    (replace(MOE, qkv_bias=True), "model.qkv_bias = true"),
    (replace(DENSE, window=8, global_every=2), "model.window = 8 in some blocks"),
    (
        replace(DENSE, mla=Mla(kv_rank=8), window=8),
        "model.window = 8: Hugging Face's DeepSeek-V3, the nearest family, has no such",
    ),
    (replace(DENSE, rope_fraction=0.5, qk_norm=True), "model.qk_norm = true: Hugging Face's Phi-3"),
    (replace(PRESETS["phi4"], rope_scaling=RopeScaling(factor=8.0)), "model.rope_scaling: Hugging Face's Phi-3"),
    (replace(MOE, export_as="phi3"), "model.moe: Hugging Face's Phi-3"),
    (replace(DENSE, logit_cap=3.0), "model.logit_cap = 3.0: Hugging Face's Llama"),
    (replace(PRESETS["gemma2-2b"], scale_embedding=False), "model.scale_embedding = false"),
    (replace(PRESETS["gemma2-2b"], activation="swiglu"), 'model.activation = "swiglu"'),
    (replace(PRESETS["gemma2-2b"], rope_local_theta=1e4), "model.rope_local_theta = 10000.0"),
    (replace(PRESETS["gemma3-1b"], rope_local_theta=None), "model.rope_local_theta"),
    (replace(DENSE, norm="layer"), 'model.positions = "rope"'),
    (replace(DENSE, positions="learned"), 'model.norm = "rms"'),
    (replace(DENSE, module="mine:Model"), "model.module"),
    (replace(MOE, moe=Moe(experts=4, active=2, ffn=16, shared=1)), "model.moe.shared = 1"),
    (replace(MOE, moe=Moe(experts=4, active=2, ffn=16, router="sigmoid")), 'model.moe.router = "sigmoid"'),
    (replace(MOE, moe=Moe(experts=4, active=2, ffn=16, bias_rate=0.1)), "model.moe.bias_rate = 0.1"),
    (replace(MOE, moe=Moe(experts=4, active=2, ffn=16, normalize=False)), "model.moe.normalize = false"),
    (replace(MOE, mla=Mla(kv_rank=8)), 'model.moe.router = "softmax"'),
    (replace(DENSE, mla=Mla(kv_rank=8), qk_norm=True), "model.qk_norm = true"),
]


@pytest.mark.parametrize(("spec", "said"), UNEXPRESSIBLE, ids=[said for _, said in UNEXPRESSIBLE])
def test_a_model_that_no_family_expresses_is_refused_by_key(spec: ModelSpec, said: str) -> None:
    with pytest.raises(RunError) as refused:
        hf_config_write.config(spec)
    assert any(said in problem for problem in refused.value.problems)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_reads_what_is_written_as_what_was_read(tmp_path: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    family, values = CONFIGS[name]
    theirs = config_class(family)(**values)
    theirs.architectures = [f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}"]
    theirs.save_pretrained(tmp_path)
    spec = hf_config.model_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(hf_config_write.config(spec, tokens={"eos_token_id": 0})))
    back = transformers.AutoConfig.from_pretrained(tmp_path)
    assert hf_config.model_spec(tmp_path) == spec
    assert (back.vocab_size, back.eos_token_id) == (theirs.vocab_size, 0)
    if family != "GPT2":
        assert back.rope_parameters == {key: value for key, value in theirs.rope_parameters.items() if value is not None}
