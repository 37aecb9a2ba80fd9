"""Pipeline stages of modules that were not written for them: exactly what the whole module computes, or refused with what is in the way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import hf_families
import plain_gpt
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.models import stages
from phalanx.models.layer_list import layers_path
from phalanx.spec.errors import RunError
from phalanx.spec.model import ModelSpec

SPEC = ModelSpec(vocab=37, dim=16, layers=4, heads=2, context=32)
TIED = ModelSpec(vocab=37, dim=16, layers=4, heads=2, context=32, options=(("tied", True),))
TOKENS = torch.randint(37, (2, 9), generator=torch.Generator().manual_seed(3))
POSITIONS = torch.cat((torch.arange(5), torch.arange(4))).expand(2, 9)
DOCUMENTS = (torch.arange(9) >= 5).long().expand(2, 9)


def made(kind: Callable[[ModelSpec], nn.Module], spec: ModelSpec = SPEC) -> nn.Module:
    torch.manual_seed(0)
    model = kind(spec)
    model.spec = spec  # type: ignore[assignment]
    return model


def through(parts: Sequence[nn.Module], documents: Tensor | None = DOCUMENTS) -> Tensor:
    """The loss of the last stage; gradients travel back from stage to stage."""
    given, sent = TOKENS, []
    for part in parts[:-1]:
        left = part(given, POSITIONS, documents)
        given = left.detach().requires_grad_()
        sent.append((left, given))
    loss = F.cross_entropy(parts[-1](given, POSITIONS, documents).flatten(0, 1), TOKENS.roll(-1, 1).flatten())
    loss.backward()
    for left, given in reversed(sent):
        left.backward(given.grad)
    return loss.detach()


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("cuts", [(0, 2, 4), (0, 1, 3, 4)], ids=["two", "three"])
def test_stages_compute_what_the_module_computes(spec: ModelSpec, cuts: tuple[int, ...]) -> None:
    whole, divided = made(plain_gpt.GPT, spec), made(plain_gpt.GPT, spec)
    expected = through([whole])
    parts = [stages.part(divided, first, stop) for first, stop in pairwise(cuts)]
    assert torch.equal(through(parts), expected)
    for (name, ours), theirs in zip(divided.named_parameters(), whole.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert torch.equal(ours.grad, theirs.grad), name


def test_a_stage_holds_its_own_parameters_under_their_names() -> None:
    model = made(plain_gpt.GPT, TIED)
    first, middle, last = (stages.part(model, *cut) for cut in ((0, 1), (1, 3), (3, 4)))
    held = [{name for name, _ in part.named_parameters()} for part in (first, middle, last)]
    assert {name.split(".")[2] for name in held[1]} == {"1", "2"} and len(held[1]) == 2 * 10
    around = [{name for name in names if not name.startswith("inner.")} for names in held]
    assert around == [
        {"words.weight", "places.weight", "first_norm.weight", "first_norm.bias"},
        set(),
        {"words.weight", "last_norm.weight", "last_norm.bias"},
    ]
    assert held[0] | held[1] | held[2] == {name for name, _ in model.named_parameters()}
    assert stages.use_of(model).tied == "words.weight"
    assert [part.is_first_stage for part in (first, middle, last)] == [True, False, False]


def test_the_model_itself_stays_as_it_was() -> None:
    model = made(plain_gpt.GPT)
    before = model(TOKENS, POSITIONS, DOCUMENTS)
    stages.part(model, 1, 3)
    assert torch.equal(model(TOKENS, POSITIONS, DOCUMENTS), before)
    assert model.training and all(module.training for module in model.modules())


def test_costs_are_the_matrices_of_layers_and_head() -> None:
    blocks, last = stages.costs(made(plain_gpt.GPT))
    assert blocks == (16 * 48 + 16 * 16 + 2 * 16 * 64,) * 4 and last == 37 * 16


class Layers(nn.Module):
    """A chain of linear layers, whose `run` a test replaces."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.words = nn.Embedding(spec.rows, spec.dim)
        self.layers = nn.ModuleList(nn.Linear(spec.dim, spec.dim) for _ in range(spec.layers))
        self.out = nn.Linear(spec.dim, spec.rows)

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        return self.out(self.run(self.words(tokens)))

    def run(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Twice(Layers):
    def run(self, x: Tensor) -> Tensor:
        for layer in [*self.layers, self.layers[1]]:
            x = layer(x)
        return x


class Backwards(Layers):
    def run(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = layer(x)
        return x


class Between(Layers):
    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class Skip(Layers):
    """The first layer's result is added at the end, as in a U-Net."""

    def run(self, x: Tensor) -> Tensor:
        results = []
        for layer in self.layers:
            x = layer(x)
            results.append(x)
        return x + results[0]


class Shared(Layers):
    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x + self.layers[0].bias  # type: ignore[operator]


class ByValue(Layers):
    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if x.sum().item() > 0 else -x


class Widened(Layers):
    def __init__(self, spec: ModelSpec):
        super().__init__(spec)
        self.widen = nn.Linear(spec.dim, 2 * spec.dim)
        self.layers = nn.ModuleList(nn.Linear(2 * spec.dim, 2 * spec.dim) for _ in range(spec.layers))
        self.out = nn.Linear(2 * spec.dim, spec.rows)

    def run(self, x: Tensor) -> Tensor:
        x = self.widen(x)
        for layer in self.layers:
            x = layer(x)
        return x


class Listing(nn.Linear):
    """A layer that returns more than its state, as the oldest models of transformers do."""

    def forward(self, x: Tensor) -> Any:
        return [super().forward(x), None]


class Listed(Layers):
    kind: type[nn.Module] = Listing

    def __init__(self, spec: ModelSpec):
        super().__init__(spec)
        self.layers = nn.ModuleList(self.kind(spec.dim, spec.dim) for _ in range(spec.layers))

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return x


class Naming(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {0: super().forward(x)}


class Named(Listed):
    kind = Naming


def test_layers_may_return_lists() -> None:
    divided = made(Listed)
    assert torch.equal(through([stages.part(divided, 0, 2), stages.part(divided, 2, 4)]), through([made(Listed)]))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Named, ["layer 0 returns a dict, not a tensor"]),
        (Twice, ["layer 1 is called 2 times"]),
        (Backwards, ["in the order [3, 2, 1, 0]"]),
        (Between, ["layer 1 is not given the result of the layer before it"]),
        (Skip, ["the result of layer 0 is read again after the layers", "add"]),
        (Shared, ["layers.0.bias is read outside of its layer"]),
        (ByValue, ["does not run on tensors without values"]),
        (Widened, ["[1, 8, 32]", "model.dim = 16"]),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_reason(kind: Any, words: list[str]) -> None:
    with pytest.raises(RunError) as refused:
        stages.use_of(made(kind))
    (sentence,) = refused.value.problems
    assert kind.__name__ in sentence and "layout.pipeline" in sentence
    assert [word for word in words if word not in sentence] == []


class Projected(Layers):
    def __init__(self, spec: ModelSpec):
        super().__init__(spec)
        self.words = nn.Embedding(spec.rows, 3)
        self.widen = nn.Linear(3, spec.dim)

    def run(self, x: Tensor) -> Tensor:
        x = self.widen(x)
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_projection_before_the_layers_is_refused_by_name() -> None:
    with pytest.raises(RunError, match=r"widen.*is read before the layers"):
        stages.part(made(Projected), 2, 4)


class NoLayers(nn.Module):
    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.words = nn.Embedding(spec.rows, spec.dim)


def test_a_module_without_a_list_of_layers_is_refused() -> None:
    assert layers_path(made(NoLayers)) is None
    with pytest.raises(RunError, match="holds no list of layers"):
        stages.use_of(made(NoLayers))


def test_the_list_of_layers_is_the_outermost_with_most_parameters() -> None:
    class Nested(nn.Module):
        def __init__(self, spec: ModelSpec):
            super().__init__()
            self.few = nn.ModuleList([nn.Linear(2, 2)])
            self.inner = nn.Module()
            self.inner.many = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3))

    assert layers_path(made(Nested)) == "inner.many"
    assert layers_path(made(plain_gpt.GPT)) == "inner.layers"


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # gpt_bigcode, when it is imported
@pytest.mark.parametrize("name", hf_families.marked(hf_families.FAMILIES))
def test_hugging_face_models_are_divided_exactly(name: str) -> None:
    weights = hf_families.theirs(name)
    whole, divided = hf_families.ours(name, weights), hf_families.ours(name, weights)
    expected = through([whole], None)
    layers = stages.use_of(divided).count
    parts = [stages.part(divided, *cut) for cut in pairwise(range(layers + 1))]
    assert torch.equal(through(parts, None), expected)
    for (key, ours), theirs in zip(divided.named_parameters(), whole.parameters(), strict=True):
        assert (ours.grad is None and theirs.grad is None) or torch.equal(ours.grad, theirs.grad), key
