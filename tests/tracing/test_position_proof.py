from __future__ import annotations

import sys
from pathlib import Path

import hf_zoo
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models.decoder import Decoder
from phalanx.spec.model import ModelSpec
from phalanx.tracing.position_proof import positions_meet


class Mixing(nn.Module):
    def __init__(self, mix: object):
        super().__init__()
        self.embed = nn.Embedding(50, 20)
        self.mix = mix
        self.conv = nn.Conv1d(20, 20, 3, padding=1)
        self.head = nn.Linear(20, 50)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        return self.head(self.mix(self, self.embed(tokens_BS)))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("mix", "operation"),
    [
        (lambda self, x: self.conv(x.transpose(1, 2)).transpose(1, 2), "conv1d in conv"),
        (lambda self, x: x.cumsum(1), "cumsum in the model"),
        (lambda self, x: F.pad(x, (0, 0, 1, 0))[:, :-1], "pad in the model"),
        (lambda self, x: x - x.mean(1, keepdim=True), "mean in the model"),
        (lambda self, x: x.flip(1), "flip in the model"),
        (lambda self, x: (x @ x.transpose(1, 2)).softmax(-1) @ x, "matmul in the model"),
    ],
)
def test_what_mixes_positions_is_named(mix: object, operation: str) -> None:
    found = positions_meet(Mixing(mix))
    assert found.mixed is not None and found.mixed.startswith(operation)


@pytest.mark.parametrize(
    "mix",
    [
        lambda self, x: x.floor() + x.repeat(1, 1, 2)[..., :20],
        lambda self, x: F.silu(x) * 2,
        lambda self, x: F.pad(x, (1, 0))[..., 1:] + x.softmax(-1),
    ],
)
def test_positions_that_never_meet(mix: object) -> None:
    found = positions_meet(Mixing(mix))
    assert found.mixed is None and found.attentions == 0


def test_attentions_are_counted_in_all_layers() -> None:
    with torch.device("meta"):
        model = Decoder(ModelSpec(vocab=42, dim=24, layers=5, heads=4, kv_heads=2, ffn=40, context=32))
    found = positions_meet(model)
    assert found.mixed is None and found.attentions == 5


def test_the_recurrence_of_the_documentation_mixes_by_padding() -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    import own_model

    with torch.device("meta"):
        model = own_model.Recurrent(ModelSpec(vocab=64, dim=48, layers=3))
    assert positions_meet(model).mixed == "pad in blocks.0 mixes positions"


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral"])
def test_families_whose_positions_meet_in_attention(name: str) -> None:
    found = positions_meet(hf_zoo.make(name))
    assert found.mixed is None and found.attentions == 2


def test_an_attention_of_its_own_is_named() -> None:
    found = positions_meet(hf_zoo.make("bloom"))
    assert found.mixed is not None and "self_attention" in found.mixed
