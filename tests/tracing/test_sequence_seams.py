"""Where positions of the residual stream change hands, and what is refused because it needs the positions of other ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from phalanx.spec.cut_plan import Argument, CutPlan, Result
from phalanx.spec.errors import RunError
from phalanx.tracing.infer_cuts import infer

Inside = Callable[[Any, Tensor, Tensor], Tensor]
"""What a layer does with its state, besides its feed-forward; it is also given the positions."""


class Smooth(nn.Module):
    """Mixes positions, and takes and returns states as the residual stream has them."""

    def __init__(self, dim: int):
        super().__init__()
        self.conv = nn.Conv1d(dim, dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, dim: int, inside: Inside):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 40), nn.Linear(40, dim)
        self.smooth = Smooth(dim)
        self.inside = inside

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.inside(self, x, places)


class Model(nn.Module):
    def __init__(self, inside: Inside = lambda layer, x, places: x, *, rows: int = 50):
        super().__init__()
        self.embed, self.places = nn.Embedding(rows, 20), nn.Embedding(64, 20)
        self.blocks = nn.ModuleList(Layer(20, inside) for _ in range(3))
        self.norm = nn.LayerNorm(20)
        self.head = nn.Linear(20, rows, bias=False)
        self.layers_path = "blocks"

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        x, places = self.embed(tokens_BS), self.places(positions_BS)
        x = x + places
        for block in self.blocks:
            x = block(x, places)
        return self.head(self.norm(x))


def planned(inside: Inside = lambda layer, x, places: x, *, ranks: int = 2, **sizes: int) -> CutPlan:
    with torch.device("meta"):
        model = Model(inside, **sizes)
    return infer(model, ranks, sequence=True)


NUMBERS = range(3)


def test_the_stream_between_regions_is_divided() -> None:
    plan = planned()
    assert plan.sequence is not None
    assert plan.sequence.shared == (Argument("blocks.0", 0),)
    assert set(plan.sequence.gathered) == {Argument("head", 0), *(Argument(f"blocks.{i}.up", 0) for i in NUMBERS)}
    assert plan.sequence.scattered == tuple(f"blocks.{i}.down" for i in NUMBERS)
    assert plan.sequence.joined == () and plan.sequence.returned == ()


def test_whole_parameters_that_read_own_positions_have_partial_gradients() -> None:
    """Norms, and biases that are added after a sum; not what is read before the first layer."""
    norms = {f"blocks.{i}.norm.{leaf}" for i in NUMBERS for leaf in ("weight", "bias")}
    assert planned().partial == norms | {"norm.weight", "norm.bias"} | {f"blocks.{i}.down.bias" for i in NUMBERS}


def test_without_sequence_parallelism_the_plan_is_as_it_was() -> None:
    with torch.device("meta"):
        plain, model = infer(Model(), 2), infer(Model(), 2, sequence=True)
    assert plain.sequence is None and replace(model, sequence=None, partial=plain.partial) == plain


def test_a_module_that_needs_all_positions_is_computed_whole() -> None:
    plan = planned(lambda layer, x, places: x + layer.smooth(layer.inner(x)))
    assert plan.sequence is not None
    assert plan.sequence.joined == tuple(Argument(f"blocks.{i}.smooth", 0) for i in NUMBERS)
    assert plan.sequence.returned == tuple(Result(f"blocks.{i}.smooth", None) for i in NUMBERS)
    assert not any("smooth" in name for name in plan.partial), "every rank computes its whole gradient"


def test_a_value_of_all_positions_is_shared_out_where_a_layer_takes_it() -> None:
    plan = planned(lambda layer, x, places: x + places)
    assert plan.sequence is not None
    assert set(plan.sequence.shared) == {Argument("blocks.0", 0), *(Argument(f"blocks.{i}", 1) for i in NUMBERS)}


def test_a_whole_head_gathers() -> None:
    plan = planned(rows=4, ranks=3)  # parts of two, two and none
    assert plan.sequence is not None and "head.weight" not in plan.params
    assert plan.sequence.joined == (Argument("head", 0),) and "head.weight" not in plan.partial


@pytest.mark.parametrize(
    ("inside", "words"),
    [
        (lambda layer, x, places: x + x.cumsum(1), "cumsum in blocks.0 needs all positions"),
        (lambda layer, x, places: x - x.mean(1, keepdim=True), "mean in blocks.0 needs all positions"),
        (
            lambda layer, x, places: x + layer.smooth.conv(x.transpose(1, 2)).mT,
            "conv1d in blocks.0.smooth.conv needs all positions",
        ),
        (lambda layer, x, places: x + torch.arange(x.shape[1])[None, :, None], "blocks.0"),
        (lambda layer, x, places: x / x.shape[1], "div: .11.* in place of .22"),
        (lambda layer, x, places: x * layer.norm(places.mean(1, keepdim=True)), "norm.weight|is used both|mean in blocks.0"),
    ],
    ids=["cumsum", "mean", "convolution", "arange", "length", "both"],
)
def test_what_needs_all_positions_is_refused_by_name(inside: Inside, words: str) -> None:
    with pytest.raises(RunError, match=words) as refused:
        planned(inside)
    assert "layout.sequence = true" in str(refused.value) and "Remove layout.sequence" in str(refused.value)


def test_a_module_without_layers_is_refused() -> None:
    with torch.device("meta"):
        model = Model()
    del model.layers_path
    with pytest.raises(RunError, match="holds no list of layers"):
        infer(model, 2, sequence=True)
