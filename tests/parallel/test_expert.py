"""Experts on several ranks against experts on one: outputs, losses, gradients, and what happens where nobody comes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gathering import wholes
from ranks import ALONE, run_ranks, tiny_run, tiny_trainer
from sharded import SAMPLE_AXES, replicated
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from phalanx.events.records import Evaluated, Step
from phalanx.models.decoder import AXES
from phalanx.models.init import build, materialize
from phalanx.models.moe import MoE, dispatch_locally, router_sizes, routers
from phalanx.parallel import data_parallel, expert, tensor, vocab_parallel
from phalanx.parallel.data_parallel import Sharding
from phalanx.parallel.expert import Dispatch, Loads
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard, Recipe, ShardedModel, extract
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec, Moe
from phalanx.spec.plan import Place
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.training.build import recipe
from phalanx.training.micro_batch import summed_loss

CPU = torch.device("cpu")
SEQUENCES, LENGTH = 8, 12
SOFTMAX = Moe(experts=8, active=2, ffn=24, bias_rate=0.01)
SIGMOID = Moe(experts=8, active=3, ffn=24, shared=1, router="sigmoid", groups=4, active_groups=2, scale=2.5, balance_loss=0.5)
ODD = replace(SIGMOID, ffn=23, dense_layers=1)  # rows of no whole 16 bytes
NARROW = replace(SOFTMAX, ffn=5, balance_loss=0.5)  # over four ranks: 2, 2, 1 and none
KINDS = {"softmax": SOFTMAX, "sigmoid": SIGMOID, "odd": ODD, "narrow": NARROW}

LAYOUTS = {
    "data2 expert2": (Layout(data=2, expert=2), "softmax"),
    "data2 slices2": (Layout(data=2, expert_tensor=2), "odd"),
    "data4 expert2": (Layout(data=4, expert=2), "sigmoid"),
    "data4 expert4": (Layout(data=4, expert=4), "softmax"),
    "data4 slices4": (Layout(data=4, expert_tensor=4), "narrow"),
    "shard4 expert2 slices2": (Layout(data=1, shard=4, expert=2, expert_tensor=2), "odd"),
    "data2 tensor2 expert4": (Layout(data=2, tensor=2, expert=4), "sigmoid"),
    "tensor4 sequence expert2 slices2": (Layout(data=1, tensor=4, sequence=True, expert=2, expert_tensor=2), "odd"),
    "data4 shard2 expert4": (Layout(data=4, shard=2, expert=4), "sigmoid"),
    "data2 shard4 expert4 slices2": (Layout(data=2, shard=4, expert=4, expert_tensor=2), "odd"),
}


def spec(kind: str) -> ModelSpec:
    return ModelSpec(vocab=41, dim=16, layers=2, heads=4, ffn=32, context=64, init_std=0.2, moe=KINDS[kind])


def steer(model: nn.Module, crowded: bool) -> None:
    """Crowded: every token wants the first experts, so that most of them, and most ranks, get nothing."""
    for router in routers(model).values():
        router.loss_scale = 1 / (SEQUENCES * LENGTH)
        if crowded:
            assert router.bias is not None
            router.bias[: router.moe.active] += 100


def place(mesh: Mesh, model: nn.Module, given: Recipe) -> ShardedModel:
    """One rank's share of a model; ranks that would share its state are more replicas here."""
    spots = {name: ParamShard.full(parameter) for name, parameter in model.named_parameters()}
    sequence, group = mesh.layout.sequence, mesh.group("tensor", use="tensor")
    spots = tensor.split([model], spots, given.axes, mesh, sequence=sequence)
    loss = vocab_parallel.swap([model], group, chunk=None, sequence=sequence, loss=given.loss)
    spots = expert.split([model], spots, given.axes, mesh)
    return ShardedModel([model], mesh, data_parallel.build([model], spots, mesh, given, Sharding(axes=SAMPLE_AXES)), loss)


def loss(model: nn.Module, first: int, stop: int, measure: Callable[[Any, Tensor], Tensor] = summed_loss) -> Tensor:
    tokens = torch.randint(41, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(4))[first:stop]
    logits = model(tokens, torch.arange(LENGTH).expand_as(tokens))
    return measure(logits, tokens.roll(-1, 1)) / (SEQUENCES * LENGTH)


def gradients(mesh: Mesh, kind: str, crowded: bool, compute: torch.dtype | None) -> tuple[float, dict[str, Tensor], list[Any]]:
    """Loss, whole gradients and shapes held, of the whole batch; ranks take theirs in micro-batches of at most two."""
    model = build(spec(kind))
    placed = place(mesh, model, recipe(model, 3))
    steer(model, crowded)
    own = torch.arange(SEQUENCES).chunk(mesh.layout.replicas)[mesh.replica]
    batches = own.split(SEQUENCES if mesh.ranks == 1 else 2)
    placed.engine.begin(len(batches))
    total = torch.zeros(1, dtype=torch.float64)
    for batch in batches:
        with torch.autocast("cpu", dtype=compute or torch.bfloat16, enabled=compute is not None):
            found = loss(model, int(batch[0]), int(batch[-1]) + 1, placed.loss)
        total += found.detach()
        found.backward()
        placed.engine.after_backward()
    placed.finish()
    boxes = {one.name: (one.gradient, one.shard) for one in placed.owned if one.gradient is not None}
    found_wholes = wholes(boxes, mesh)
    for name, (gradient, spot) in boxes.items():  # what several ranks hold is alike on all
        torch.testing.assert_close(gradient, extract(spot.slice, found_wholes[name]), rtol=1e-5, atol=1e-6)
    shapes = [tuple(one.value.shape) for one in placed.owned if ".experts." in one.name]
    return mesh.all_reduce(total).item() / mesh.layout.tensor, found_wholes, shapes


def farthest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest difference of any parameter's gradient, relative to its norm."""
    assert found.keys() == expected.keys()
    assert all(expected[name].norm() > 0 for name in expected)
    return max(((found[name] - expected[name]).norm() / expected[name].norm()).item() for name in expected)


@pytest.mark.parametrize(("layout", "kind"), LAYOUTS.values(), ids=LAYOUTS.keys())
def test_losses_and_gradients_are_those_of_one_process(layout: Layout, kind: str) -> None:
    expected_loss, expected, whole = gradients(ALONE, kind, False, None)
    got = run_ranks(gradients, layout.ranks, kind, False, None, layout=layout)
    for found_loss, found, _ in got:
        assert abs(found_loss - expected_loss) <= 1e-6 * expected_loss
        assert farthest(found, expected) <= 1e-5
    parts = layout.expert * layout.expert_tensor
    held = sum(torch.Size(shape).numel() for rank in got[:parts] for shape in rank[2])
    assert held == sum(torch.Size(shape).numel() for shape in whole), "between them they hold everything once"


@pytest.mark.parametrize(("layout", "kind"), [LAYOUTS["data4 expert4"], (Layout(data=4, expert=2, expert_tensor=2), "sigmoid")])
def test_experts_and_ranks_that_nobody_comes_to(layout: Layout, kind: str) -> None:
    expected_loss, expected, _ = gradients(ALONE, kind, True, None)
    for found_loss, found, _ in run_ranks(gradients, layout.ranks, kind, True, None, layout=layout):
        assert abs(found_loss - expected_loss) <= 1e-6 * expected_loss
        assert farthest(found, expected) <= 1e-5
        visited = KINDS[kind].active
        assert not any(found[f"blocks.0.mlp.experts.{name}"][visited:].any() for name in ("gate", "up", "down"))


def test_in_bf16_they_differ_by_its_rounding_alone() -> None:
    exact = gradients(ALONE, "sigmoid", False, None)[1]
    expected_loss, expected, _ = gradients(ALONE, "sigmoid", False, torch.bfloat16)
    layout = LAYOUTS["data2 shard4 expert4 slices2"][0]
    found_loss, found, _ = run_ranks(gradients, 8, "sigmoid", False, torch.bfloat16, layout=layout)[0]
    assert abs(found_loss - expected_loss) <= 1e-3 * expected_loss
    assert farthest(found, exact) < 1.5 * farthest(expected, exact)


def lively(moe: Moe) -> MoE:
    """A layer with the same values on every rank."""
    layer = MoE(16, moe)
    dice = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=dice) * 0.3)
    return layer


def shared(mesh: Mesh, moe: Moe) -> tuple[MoE, dict[str, ParamShard]]:
    """This rank's part of `lively`, and where it lies."""
    whole = lively(moe)
    with torch.device("meta"):
        layer = MoE(16, moe)
    model = nn.ModuleDict({"0": nn.ModuleDict({"mlp": layer})})
    spots = {name: ParamShard.full(parameter) for name, parameter in model.named_parameters()}
    found = {name.removeprefix("0.mlp."): spot for name, spot in expert.split([model], spots, AXES, mesh).items()}
    layer.to_empty(device=CPU)
    layer.router.reset_buffers()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(extract(found[name].slice, whole.get_parameter(name)))
    return layer, found


def tokens(rank: int) -> Tensor:
    """Of one sequence; each rank has another number of them."""
    return torch.randn(1, 1 + 5 * rank, 16, generator=torch.Generator().manual_seed(rank))


def send(mesh: Mesh, moe: Moe) -> tuple[Tensor, Tensor, bool]:
    layer, _ = shared(mesh, moe)
    x = tokens(mesh.rank)
    with torch.no_grad():
        first = layer(x)
    again = layer(x.requires_grad_())
    again.square().sum().backward()
    assert x.grad is not None
    return first, x.grad, torch.equal(first, again)


@pytest.mark.parametrize(
    "layout", [Layout(data=4, expert=4), Layout(data=4, expert=2, expert_tensor=2)], ids=["expert4", "expert2 slices2"]
)
def test_every_token_reaches_its_experts_however_many_a_rank_has(layout: Layout) -> None:
    layer = lively(SIGMOID)
    for rank, (y, gradient, repeated) in enumerate(run_ranks(send, 4, SIGMOID, layout=layout)):
        assert repeated, "the same rows give the same bits"
        x = tokens(rank).requires_grad_()
        expected = layer(x)
        expected.square().sum().backward()
        torch.testing.assert_close(y, expected.detach(), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(gradient, x.grad, rtol=1e-4, atol=1e-5)


def sequence_gradients(mesh: Mesh, moe: Moe) -> dict[str, Tensor]:
    """Of one layer, whose sequences lie on the ranks of `context` and `tensor` in parts."""
    layer, spots = shared(mesh, moe)
    within = mesh.size("context") * mesh.size("tensor")
    part = mesh.coordinate("context") * mesh.size("tensor") + mesh.coordinate("tensor")
    x = sequences().chunk(mesh.layout.replicas)[mesh.replica].chunk(within, 1)[part]
    held = []
    for name, parameter in layer.named_parameters():
        # What is not the experts' own has whole copies on the ranks of `tensor`, each with other tokens.
        spot = spots[name] if spots[name].expert else replace(spots[name], partial=("tensor",))
        held.append(OwnedParam(name, parameter, spot))
    placed = ShardedModel([layer], mesh, replicated(held, mesh), summed_loss)
    placed.engine.begin(1)
    layer(x).square().sum().backward()
    placed.engine.after_backward()
    placed.finish()
    return wholes({one.name: (one.gradient, one.shard) for one in placed.owned if one.gradient is not None}, mesh)


def sequences() -> Tensor:
    return torch.randn(4, LENGTH, 16, generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize(
    "layout",
    [Layout(data=2, tensor=2, expert=4), Layout(data=1, context=2, tensor=2, expert=2), Layout(data=1, context=2)],
    ids=["data2 tensor2 expert4", "context2 tensor2 expert2", "context2"],
)
def test_sequences_in_parts_are_balanced_as_whole_ones(layout: Layout) -> None:
    layer = lively(SIGMOID)
    layer(sequences()).square().sum().backward()
    expected = {name: parameter.grad for name, parameter in layer.named_parameters() if parameter.grad is not None}
    for found in run_ranks(sequence_gradients, layout.ranks, SIGMOID, layout=layout):
        assert farthest(found, expected) <= 1e-5


def repeated_forward(mesh: Mesh) -> bool:
    """Whether a forward that is repeated in the backward gives the same gradient, bit for bit."""
    layer, _ = shared(mesh, SIGMOID)
    x, found = tokens(mesh.rank), []
    for run in (layer, lambda x: checkpoint(layer, x, use_reentrant=False)):
        layer.zero_grad()
        run(x.requires_grad_()).square().sum().backward()
        found.append([parameter.grad.clone() for parameter in layer.parameters() if parameter.grad is not None])
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_forward_can_be_repeated() -> None:
    assert run_ranks(repeated_forward, 4, layout=Layout(data=4, expert=2, expert_tensor=2)) == [True] * 4


def test_what_was_done_is_read_off_the_parameters() -> None:
    model = build(spec("odd"))
    spots = {name: ParamShard.full(parameter) for name, parameter in model.named_parameters()}
    assert expert.applied([model], spots, AXES) is None
    spots = run_ranks(cut, 4, layout=Layout(data=4, expert=2, expert_tensor=2))
    last, said = spots[3]
    assert said == "blocks.1.mlp.experts.gate: 4 of 8 experts, 11 of 23 rows of each; tokens travel among 4 ranks"
    assert last["blocks.1.mlp.experts.down"] == ParamShard(
        TensorSlice.of((8, 16, 23), (4, 0, 12), (4, 16, 11)), split=("expert", "expert_tensor"), expert=True
    )
    assert {name for name, spot in last.items() if spot.expert} == {
        f"blocks.1.mlp.experts.{one}" for one in ("gate", "up", "down")
    }
    assert all(spot == ParamShard.full(model.get_parameter(name)) for name, spot in last.items() if not spot.expert)


def cut(mesh: Mesh) -> tuple[dict[str, ParamShard], str | None]:
    model = build(spec("odd"))
    spots = {name: ParamShard.full(parameter) for name, parameter in model.named_parameters()}
    # Whoever shares the dense layers may have marked everything that it finds in a layer of experts.
    spots = {name: replace(spot, partial=("tensor",)) if ".experts." in name else spot for name, spot in spots.items()}
    spots = expert.split([model], spots, AXES, mesh)
    return spots, expert.applied([model], spots, AXES)


def test_without_a_degree_experts_stay_where_they_are() -> None:
    model = build(spec("softmax"))
    spots = {name: ParamShard.full(parameter) for name, parameter in model.named_parameters()}
    assert expert.split([model], spots, AXES, replace(ALONE, layout=Layout(data=1))) == spots
    assert all(block.mlp.dispatch is dispatch_locally for block in model.blocks.values())  # type: ignore[union-attr]


class _Undispatched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.weight = nn.Parameter(torch.empty(6, 4, device="meta"))


def test_what_cannot_be_shared_is_refused() -> None:
    mesh = Mesh(Place(rank=0, ranks=4), CPU, Layout(data=4, expert=4, expert_tensor=1))
    model = _Undispatched()
    spots = {name: ParamShard.full(parameter) for name, parameter in model.named_parameters()}
    with pytest.raises(RunError) as refused:
        expert.split([model], spots, {"*": ("expert", "model")}, mesh)
    divides, dispatches = refused.value.problems
    assert divides.startswith("layout.expert = 4 does not divide the 6 experts of experts.weight: set it to 1, 2, 3 or 6,")
    assert "no `dispatch`" in dispatches
    with pytest.raises(RunError, match=r'layout\.expert_tensor = 2 cannot slice experts\.weight.*"ffn"'):
        expert.split([model], spots, {"*": ("expert", "model")}, replace(mesh, layout=Layout(data=4, expert_tensor=2)))


def test_loads_of_stages_add_up_to_those_of_the_whole_model() -> None:
    model = materialize(build(spec("softmax")), 3, CPU)
    loss(model, 0, 8)
    sizes = router_sizes(model)
    rows = torch.zeros(2, sum(sizes.values()), dtype=torch.float64)
    for row, stage in zip(rows, (model.part(0, 1), model.part(1, 2)), strict=True):  # type: ignore[operator]
        loads = Loads(sizes, {name: router.counts for name, router in routers(stage).items()})
        assert len(routers(stage)) == 1
        loads.put(row)
    assert {name: load.tolist() for name, load in loads.split(rows.sum(0)).items()} == {
        name: router.counts.tolist() for name, router in routers(model).items()
    }
    assert rows.sum() == 2 * SEQUENCES * LENGTH * 2


RUN = ("model.preset=tiny-moe", "model.ffn=64", "model.dim=32", "train.steps=30", "optimizer.eps=1e-4")


def train(mesh: Mesh, checkpoints: Path) -> tuple[list[tuple[float, float]], list[float | None], Evaluated]:
    """Losses and norms, experts' loads, and an evaluation in which ranks have different numbers of sequences."""
    trainer = tiny_trainer(mesh, tiny_run(*RUN), checkpoints / str(mesh.ranks))
    if mesh.ranks > 1:
        assert all(isinstance(block.mlp.dispatch, Dispatch) for block in trainer.model.blocks.values())  # type: ignore[union-attr]
    steps = [step for step in (trainer.step() for _ in range(30)) if isinstance(step, Step)]
    measured = trainer.evaluate()
    trainer.close()
    assert measured is not None
    return [(step.loss, step.grad_norm) for step in steps], [step.expert_load for step in steps], measured


def test_training_follows_one_process(tmp_path: Path) -> None:
    alone, loads, measured = train(ALONE, tmp_path)
    assert len(alone) == 30 and alone[-1][0] < 0.4 * alone[0][0]
    for told, loads_told, measured_told in run_ranks(train, 4, tmp_path, layout=Layout(data=4, expert=4)):
        torch.testing.assert_close(torch.tensor(told), torch.tensor(alone), rtol=1e-5, atol=0)
        assert loads_told == loads
        assert measured_told.tokens == measured.tokens and measured_told.loss == pytest.approx(measured.loss, rel=1e-5)
