"""Tensor parallelism of modules that are not the built-in decoder: what their own table says is done, or refused."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
import torch.nn.functional as F
from gathering import wholes
from ranks import ALONE, run_ranks
from sharded import replicated
from torch import Tensor, nn

from phalanx.models.init import fill
from phalanx.parallel import tensor, vocab_parallel
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import Loss, OwnedParam, ParamShard, ShardedModel
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.training.micro_batch import summed_loss

SPEC = ModelSpec(vocab=37, dim=12, layers=1, heads=4, kv_heads=2, init_std=0.3)
AXES = {
    "words.weight": ("vocab", "model"),
    "mixer.read.*": ("heads", "model"),
    "mixer.write.weight": ("model", "heads"),
    "mixer.write.bias": ("model",),
    "out.weight": ("vocab", "model"),
    "out.bias": ("vocab",),
    "scale.weight": ("model",),
}
TOKENS = torch.randint(37, (2, 7), generator=torch.Generator().manual_seed(3))


class Mixer(nn.Module):
    """Every head keeps a running sum of what it reads."""

    def __init__(self, dim: int):
        super().__init__()
        self.read = nn.Linear(dim, 8, bias=False)
        self.write = nn.Linear(8, dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.write(torch.tanh(self.read(x_BSD).cumsum(1)))


class Own(nn.Module):
    """Nothing in it is called as in the built-in decoder."""

    def __init__(self, spec: ModelSpec, tied: bool):
        super().__init__()
        self.spec = spec
        self.words = nn.Embedding(spec.rows, spec.dim)
        self.mixer = Mixer(spec.dim)
        self.scale = nn.RMSNorm(spec.dim)
        self.out = None if tied else nn.Linear(spec.dim, spec.rows)

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        x_BSD = self.words(tokens_BS)
        x_BSD = self.scale(x_BSD + self.mixer(x_BSD))
        return F.linear(x_BSD, self.words.weight) if self.out is None else self.out(x_BSD)


class Opened(Own):
    """Gives its logits through the seam of the built-in decoder."""

    def __init__(self, spec: ModelSpec):
        super().__init__(spec, tied=True)
        self.project = F.linear

    def forward(self, tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None) -> Tensor:
        x_BSD = self.words(tokens_BS)
        return self.project(self.scale(x_BSD + self.mixer(x_BSD)), self.words.weight)


def cut(model: nn.Module, mesh: Mesh, axes: Mapping[str, tuple[str, ...]], sequence: bool) -> dict[str, ParamShard]:
    spots = {name: ParamShard.full(parameter) for name, parameter in model.named_parameters()}
    return tensor.split([model], spots, axes, mesh, sequence=sequence)


def train(mesh: Mesh, tied: bool, sequence: bool, length: int) -> tuple[float, dict[str, Tensor], dict[str, ParamShard]]:
    with torch.device("meta"):
        model = Own(SPEC, tied)
    spots = cut(model, mesh, AXES, sequence)
    loss = vocab_parallel.swap([model], mesh.group("tensor", use="tensor"), chunk=None, sequence=sequence, loss=summed_loss)
    return step(model, mesh, spots, loss, length)


def step(
    model: nn.Module, mesh: Mesh, spots: dict[str, ParamShard], loss: Loss, length: int
) -> tuple[float, dict[str, Tensor], dict[str, ParamShard]]:
    model.to_empty(device="cpu")
    held = [OwnedParam(name, parameter, spots[name]) for name, parameter in model.named_parameters()]
    with torch.no_grad():
        for one in held:
            fill(one.value, 1, one.name, SPEC, one.shard.slice, {"*": "normal"})
    placed = ShardedModel([model], mesh, replicated(held, mesh), loss)
    placed.engine.begin(1)
    total = loss(model(TOKENS[:, :length], torch.arange(length).expand(2, length)), TOKENS.roll(1)[:, :length])
    total.backward()
    placed.engine.after_backward()
    placed.finish()
    return total.item(), wholes({one.name: (one.gradient, one.shard) for one in placed.owned}, mesh), spots


@pytest.mark.parametrize(("tied", "sequence", "length"), [(False, False, 7), (True, False, 7), (False, True, 6)])
def test_a_model_of_ones_own(tied: bool, sequence: bool, length: int) -> None:
    loss, gradients, _ = train(ALONE, tied, False, length)
    for got_loss, got, spots in run_ranks(train, 2, tied, sequence, length, layout=Layout(tensor=2)):
        assert got_loss == pytest.approx(loss, rel=1e-6)
        for name, want in gradients.items():
            torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-5 * want.abs().max().item(), msg=name)
        cut_ones = {name for name, spot in spots.items() if spot.split}
        always = {"mixer.read.weight", "mixer.write.weight"}
        # Nobody can step in where a model multiplies by its embedding itself: then every rank has all of it.
        assert cut_ones == (always if tied else always | {"words.weight", "out.weight", "out.bias"})


def train_opened(mesh: Mesh, chunk: int | None) -> tuple[float, dict[str, Tensor], dict[str, ParamShard]]:
    """Its table keeps the vocabulary whole."""
    with torch.device("meta"):
        model = Opened(SPEC)
    spots = cut(model, mesh, AXES | {"words.weight": ("rows", "model")}, sequence=False)
    loss = vocab_parallel.swap([model], mesh.group("tensor", use="tensor"), chunk=chunk, sequence=False, loss=summed_loss)
    return step(model, mesh, spots, loss, 7)


@pytest.mark.parametrize("chunk", [None, 3])
def test_a_whole_vocabulary_behind_the_seam_of_the_head(chunk: int | None) -> None:
    loss, gradients, _ = train_opened(ALONE, None)
    for got_loss, got, spots in run_ranks(train_opened, 2, chunk, layout=Layout(tensor=2)):
        assert got_loss == pytest.approx(loss, rel=1e-6) and not spots["words.weight"].split
        for name, want in gradients.items():
            torch.testing.assert_close(got[name], want, rtol=1e-5, atol=1e-5 * want.abs().max().item(), msg=name)


class Beside(nn.Module):
    """A norm stands beside the layers that are cut, so their input goes around them too."""

    def __init__(self, spec: ModelSpec):
        super().__init__()
        self.spec = spec
        self.words = nn.Embedding(spec.rows, spec.dim)
        self.mixer = Mixer(spec.dim)
        self.mixer.scale = nn.RMSNorm(spec.dim)
        self.read = nn.Linear(spec.dim, 8)


def refusals(mesh: Mesh) -> list[str]:
    def refused(model: nn.Module, axes: Mapping[str, tuple[str, ...]], sequence: bool = False) -> str:
        with pytest.raises(RunError) as caught:
            cut(model, mesh, axes, sequence)
        return str(caught.value)

    with torch.device("meta"):
        beside, odd, tied = Beside(SPEC), Own(ModelSpec(vocab=37, dim=12, heads=3), False), Own(SPEC, True)
        narrow, opened = Own(ModelSpec(vocab=37, dim=12, heads=6), False), Opened(SPEC)
    keys = AXES | {"mixer.read.*": ("kv_heads", "model")}
    few = Own(ModelSpec(vocab=37, dim=12, heads=4, kv_heads=1), False)
    return [
        refused(beside, {"*scale.weight": ("model",), "read.bias": ("ffn",), "read.weight": ("ffn", "model"), **AXES}),
        refused(odd, AXES),
        refused(narrow, AXES),
        refused(tied, AXES, True),
        refused(opened, AXES | {"words.weight": ("rows", "model")}, True),
        refused(few, keys),
    ]


def test_what_would_not_be_exact_is_refused() -> None:
    beside, odd, narrow, tied, opened, few = run_ranks(refusals, 2, layout=Layout(tensor=2))[0]
    assert "mixer.scale.weight is in one module with linear layers that layout.tensor = 2 cuts" in beside
    assert "AXES names a dimension of read.weight 'ffn'" in beside
    assert "layout.tensor = 2 does not divide model.heads = 3" in odd
    assert "model.heads = 6 does not divide its 8 elements" in narrow
    assert "layout.sequence = true needs a model that gives its logits through" in tied and tied == opened
    assert "layout.tensor = 2 does not divide model.kv_heads = 1, and mixer has no attribute `attend`" in few
