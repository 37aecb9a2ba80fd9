"""Presets against the published sizes of the models they are named after."""

import pytest

from phalanx.spec.check import check
from phalanx.spec.presets import PRESETS
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
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
}
ROUGHLY = {"gpt3-175b": 175e9, "mt-nlg-530b": 530e9}  # published in whole billions only


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name: str) -> None:
    assert PRESETS[name].parameters() == PUBLISHED[name]


@pytest.mark.parametrize("name", ROUGHLY)
def test_parameters_are_near_the_published_ones(name: str) -> None:
    assert PRESETS[name].parameters() == pytest.approx(ROUGHLY[name], rel=0.005)


def test_every_preset_is_compared() -> None:
    assert set(PRESETS) == {*PUBLISHED, *ROUGHLY, "tiny-dense"}


@pytest.mark.parametrize("name", PRESETS)
def test_preset_is_a_legal_model_under_its_own_name(name: str) -> None:
    assert PRESETS[name].preset == name
    assert check(Run(model=PRESETS[name], train=Train(batch=1, steps=1, sequence_length=1024))) == []


def test_only_the_test_model_takes_the_tokenizers_vocabulary() -> None:
    assert [name for name, model in PRESETS.items() if model.vocab is None] == ["tiny-dense"]
