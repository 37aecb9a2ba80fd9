from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phalanx.models.custom import axes_of
from phalanx.models.init import build, materialize
from phalanx.models.sampling import Sampling, generate
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec

CPU = torch.device("cpu")
GOOD = """
import torch
from torch import nn

AXES = {"embed.weight": ("vocab", "model"), "*norm.weight": ("model",), "head.*": ("vocab",), "mix.weight": ("model", "model")}
INITIAL = {"mix.*": "residual"}


class Mixer(nn.Module):
    def __init__(self, spec):
        super().__init__()
        self.embed = nn.Embedding(spec.vocab, spec.dim)
        self.norm = nn.RMSNorm(spec.dim)
        self.mix = nn.Linear(spec.dim, spec.dim, bias=False)
        self.head = nn.ParameterDict({"bias": nn.Parameter(torch.empty(spec.vocab))})
        self.slope = float(spec.option("slope", 0.5))
        self.register_buffer("weights", torch.empty(spec.context), persistent=False)

    def reset_buffers(self):
        self.weights.copy_(torch.arange(1.0, len(self.weights) + 1) ** self.slope)

    def forward(self, tokens, positions, documents=None):
        x = self.embed(tokens)
        w = self.weights[positions][..., None]
        x = x + self.mix(self.norm((x * w).cumsum(1) / w.cumsum(1)))
        return x @ self.embed.weight.T + self.head["bias"]
"""
BAD = {
    "no such module": (None, "nowhere_at_all:Mixer", ("nowhere_at_all", "No module named")),
    "not of the form": (None, "nowhere", ("package.module:Class",)),
    "an error on import": ("import math\nmath.sqrt(-1)", "Mixer", ("ValueError", "math domain error")),
    "a mistake in Python": ("class Mixer(", "Mixer", ("SyntaxError",)),
    "no such class": (GOOD, "Mixture", ("no class Mixture", "Mixer")),
    "not a module": ("def Mixer(spec): ...", "Mixer", ("Mixer is not a torch.nn.Module",)),
    "an error when built": (GOOD.replace("spec.dim, bias", "spec.width, bias"), "Mixer", ("AttributeError", "width")),
    "no table": (GOOD.replace("AXES = {", "AXES = 3; AXIS = {"), "Mixer", ("AXES", "is no table")),
    "segments without sizes": (GOOD.replace('"mix.weight": ("model", "model")', '"mix.weight": (("a", "b"), "model")'), "Mixer", ("mix.weight", "does not name the 2 dimensions")),
    "a parameter left out": (GOOD.replace('"mix.weight"', '"mixed.weight"'), "Mixer", ("mix.weight", "[8, 8]")),
    "wrong number of dimensions": (
        GOOD.replace('("vocab",)', '("vocab", "model")'), "Mixer", ("head.bias", "1 dimensions", "('vocab', 'model')")
    ),
    "no words for dimensions": (GOOD.replace('("vocab",)', "None"), "Mixer", ("head.bias", "None")),
    "an unknown rule": (GOOD.replace('"residual"', '"xavier"'), "Mixer", ("xavier", "residual", "mix.*")),
    "a buffer nobody fills": (GOOD.replace("reset_buffers", "reset"), "Mixer", ("weights", "reset_buffers")),
    "a forward of another form": (GOOD.replace("positions, documents=None", "mask=None"), "Mixer", ("tokens, mask", "positions_BS")),
    "nothing to train": (GOOD.split("class")[0] + "class Mixer(nn.Module):\n    def __init__(self, spec):\n        super().__init__()\n    def forward(self, a, b, c=None): ...\n", "Mixer", ("no parameters",)),
}  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A name for a module in the working directory, another one each time, as Python remembers what it imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    return f"own_{abs(hash(request.node.name))}"


def spec(module: str) -> ModelSpec:
    return ModelSpec(vocab=23, dim=8, layers=2, context=64, module=module, options=(("slope", 0.25),), init_std=0.4)


def test_a_module_of_the_working_directory_becomes_a_model(place: str) -> None:
    Path(f"{place}.py").write_text(GOOD)
    module = f"{place}:Mixer"
    model = build(spec(module))
    assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    assert axes_of(model)["mix.weight"] == ("model", "model")
    one, other = (materialize(build(spec(module)), 3, CPU) for _ in range(2))
    values = dict(one.named_parameters())
    assert all(torch.equal(values[name], again) for name, again in other.named_parameters())
    assert torch.equal(values["norm.weight"], torch.ones(8))  # by name and shape, where INITIAL is silent
    assert torch.equal(values["head.bias"], torch.zeros(23))
    assert 0.3 < values["embed.weight"].std() < 0.5
    assert 0.1 < values["mix.weight"].std() < 0.3  # "residual": divided by sqrt(2 · layers)
    torch.testing.assert_close(one.weights, torch.arange(1.0, 65) ** 0.25)


def test_a_table_is_optional(place: str) -> None:
    Path(f"{place}.py").write_text(GOOD.replace("AXES =", "AXIS ="))
    table = axes_of(build(spec(f"{place}:Mixer")))
    assert table["mix.weight"] == ("inner", "inner")


def test_it_generates_without_a_memory_of_its_own(place: str) -> None:
    Path(f"{place}.py").write_text(GOOD)
    model = materialize(build(spec(f"{place}:Mixer")), 3, CPU).eval()
    text = [3, 4]
    for _ in range(12):
        text.append(int(model(torch.tensor([text]), torch.arange(len(text))[None])[0, -1].argmax()))
    assert len(set(text)) > 3
    assert list(generate(model, [3, 4], 12, -1, Sampling(temperature=0))) == text[2:]


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_trained_is_refused_with_the_reason(case: str, place: str) -> None:
    text, name, words = BAD[case]
    module = name
    if text is not None:
        Path(f"{place}.py").write_text(text)
        module = f"{place}:{name}"
    with pytest.raises(RunError) as refused:
        build(spec(module))
    assert len(refused.value.problems) == 1, refused.value.problems
    assert module in str(refused.value)
    for word in words:
        assert word in str(refused.value), str(refused.value)


def test_everything_that_is_wrong_is_told_at_once(place: str) -> None:
    Path(f"{place}.py").write_text(
        GOOD.replace('"mix.weight"', '"m"').replace('("vocab",)', '("v", "m")').replace("reset_b", "b")
    )
    with pytest.raises(RunError) as refused:
        build(spec(f"{place}:Mixer"))
    assert len(refused.value.problems) == 3


def test_the_built_in_decoder_can_be_derived_from(place: str) -> None:
    Path(f"{place}.py").write_text(
        "from phalanx.models.decoder import AXES, INITIAL, Decoder\n\nclass Louder(Decoder):\n"
        "    def forward(self, *arguments, **named):\n        return 2 * super().forward(*arguments, **named)\n"
    )
    plain = materialize(build(replace(spec(""), module=None, options=())), 3, CPU)
    louder = materialize(build(spec(f"{place}:Louder")), 3, CPU)
    tokens, positions = torch.tensor([[1, 2, 3]]), torch.arange(3)[None]
    assert torch.equal(louder(tokens, positions), 2 * plain(tokens, positions))
    assert axes_of(plain) is axes_of(louder)
