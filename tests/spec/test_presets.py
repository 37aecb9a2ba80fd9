"""Presets against the published sizes of the models they are named after."""

import pytest

from phalanx.spec.check import check
from phalanx.spec.model import PRESETS
from phalanx.spec.run import Run, Train

PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "phi3-mini": 3_821_079_552,
    "phi3-medium": 13_960_238_080,
    "phi4": 14_659_507_200,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    # Without the part that reads images: 416,866,032 parameters, and a projection of 1,152 values with a norm of them.
    "gemma3-4b": 4_300_079_472 - 416_866_032 - 1152 * (2560 + 1),
    "gemma3-12b": 12_187_325_040 - 416_866_032 - 1152 * (3840 + 1),
    "gemma3-27b": 27_432_406_640 - 416_866_032 - 1152 * (5376 + 1),
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
    # The published count holds the routers' biases, 256 in each of 58 blocks, which no gradient trains.
    "deepseek-v3": 671_026_419_200 - 58 * 256,
}
ROUGHLY = {"gpt3-175b": 175e9, "mt-nlg-530b": 530e9, "palm-540b": 540.35e9}  # published rounded only
TINY = {"tiny-dense", "tiny-window", "tiny-gemma2", "tiny-gemma3", "tiny-moe", "tiny-mla"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert PRESETS[name].parameters() == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUGHLY)
def test_parameters_are_near_the_published_ones(name: str) -> None:
    assert PRESETS[name].parameters() == pytest.approx(ROUGHLY[name], rel=0.005)


def test_every_preset_is_compared() -> None:
    assert set(PRESETS) == {*PUBLISHED, *ROUGHLY, *TINY}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_a_legal_model_under_its_own_name(name: str) -> None:
    assert PRESETS[name].preset == name
    assert check(Run(model=PRESETS[name], train=Train(batch=1, steps=1, sequence_length=1024))) == []


def test_only_the_test_models_take_the_tokenizers_vocabulary() -> None:
    assert {name for name, model in PRESETS.items() if model.vocab is None} == TINY


def test_active_parameters_are_the_published_ones() -> None:
    active = {name: model.active_parameters() for name, model in PRESETS.items() if name not in TINY}
    assert active["mixtral-8x7b"] == pytest.approx(12.9e9, rel=0.005)
    assert int(active["qwen3-30b-a3b"] / 1e8) == 33  # published as 3.3 B, not rounded
    # DeepSeek says 37 B, and 36.7 B where it describes the weights. The tensors of its config that work on a token are
    # 37.55 B; without the embedding, which looks a row up and multiplies nothing, 36.62 B.
    assert active["deepseek-v3"] == 37_552_282_624
    embedding = PRESETS["deepseek-v3"].rows * PRESETS["deepseek-v3"].dim
    assert active["deepseek-v3"] - embedding == pytest.approx(36.7e9, rel=0.005)
    assert round((active["deepseek-v3"] - embedding) / 1e9) == 37
    assert {name for name, count in active.items() if count != PRESETS[name].parameters()} == {
        "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v3",
    }  # fmt: skip


def test_tiny_presets_are_tiny_and_of_their_kind() -> None:
    for name in TINY:
        assert 64 <= PRESETS[name].dim <= 256
    moe, latent = PRESETS["tiny-moe"], PRESETS["tiny-mla"]
    assert moe.moe is not None and (moe.moe.experts, moe.moe.active) == (8, 2) and moe.moe.bias_rate > 0
    assert latent.mla is not None and latent.moe is not None and latent.moe.router == "sigmoid"
    assert latent.moe.shared and latent.moe.dense_layers and latent.moe.groups > latent.moe.active_groups
