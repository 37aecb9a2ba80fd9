"""A few training steps on ranks whose state is spread, and the same in one process. Imported by tests as `sharded`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from gathering import wholes
from ranks import run_ranks
from torch import Tensor, nn

from phalanx.models.init import build, materialize
from phalanx.parallel import data_parallel, expert
from phalanx.parallel.buckets import ModelParam
from phalanx.parallel.data_parallel import DataParallel, Sharding
from phalanx.parallel.fsdp import FullySharded
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import OwnedParam, ParamShard, Recipe, ShardedModel
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec, Moe
from phalanx.training.build import recipe
from phalanx.training.micro_batch import objective, summed_loss
from phalanx.transforms.precision import computing

# Nothing here is a multiple of 4, and a fourth of the rows of a key matrix leaves the last rank without any.
ODD = ModelSpec(vocab=257, dim=18, layers=5, heads=3, kv_heads=1, ffn=30, tied=False, init_std=0.1)
GPT = ModelSpec(
    vocab=257, dim=18, layers=2, heads=3, ffn=30, norm="layer", positions="learned", bias=True, activation="gelu", init_std=0.1
)
MOE = ModelSpec(
    vocab=257,
    dim=16,
    layers=3,
    heads=2,
    ffn=24,
    moe=Moe(experts=6, active=2, ffn=8, shared=1, dense_layers=1, balance_loss=0.01),
    mtp_depth=1,
    init_std=0.2,
)
TIED = replace(ODD, layers=4, tied=True)
SPECS = {"odd": ODD, "gpt": GPT, "moe": MOE, "tied": TIED}
LENGTH, EACH, STEPS, RATE = 12, 3, 3, 0.5
Engine = DataParallel | FullySharded
SAMPLE_AXES = ("data", "shard", "context")


@dataclass
class Trained:
    """What a few steps came to, everything gathered by name."""

    initial: dict[str, Tensor]
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    final: dict[str, Tensor]
    norms: list[float]
    after: float = 0.0
    """Loss of another batch in the end."""


@dataclass(frozen=True)
class Batch:
    tokens: Tensor
    targets: Tensor
    documents: Tensor | None = None


def batch(number: int) -> Batch:
    tokens = torch.randint(257, (2, LENGTH + 1), generator=torch.Generator().manual_seed(number))
    return Batch(tokens[:, :-1], tokens[:, 1:].contiguous())


def loss(model: nn.Module, number: int, compute: str, replicas: int) -> Tensor:
    one = batch(number)
    with computing(compute, torch.device("cpu")):
        found = model(one.tokens, torch.arange(LENGTH).expand(2, LENGTH), one.documents)
        logits, *ahead = found if isinstance(found, tuple) else (found,)
        return objective(summed_loss(logits, one.targets), ahead, one, 0.3, summed_loss) / (
            replicas * EACH * one.tokens.numel()
        )


@torch.no_grad()
def evaluate(model: nn.Module, compute: str) -> float:
    return loss(model, 5, compute, 1).item()


def numbers(step: int, replica: int, replicas: int) -> list[int]:
    """The micro-batches of a replica in a step."""
    return [1000 * step + index * replicas + replica for index in range(EACH)]


@cache
def alone(kind: str, replicas: int, compute: str = "fp32") -> Trained:
    """One process, torch's own autograd and nothing else."""
    model = materialize(build(SPECS[kind]), 3, torch.device("cpu"))
    named = dict(model.named_parameters())
    trained = Trained({name: p.detach().clone() for name, p in named.items()}, [], [], {}, [])
    for step in range(STEPS):
        model.zero_grad()
        total = 0.0
        for replica in range(replicas):
            for number in numbers(step, replica, replicas):
                term = loss(model, number, compute, replicas)
                term.backward()
                total += term.item()
        gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named.items()}
        trained.losses.append(total)
        trained.gradients.append(gradients)
        trained.norms.append(torch.cat([gradient.flatten() for gradient in gradients.values()]).norm().item())
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.sub_(RATE * gradients[name])
    trained.final = {name: p.detach().clone() for name, p in named.items()}
    trained.after = evaluate(model, compute)
    return trained


def engine_of(mesh: Mesh, parts: list[nn.Module], whole: Recipe, zero: int, compute: str, keep: bool = False) -> Engine:
    spots = {name: ParamShard.full(parameter) for part in parts for name, parameter in part.named_parameters()}
    spots = expert.split(parts, spots, whole.axes, mesh)
    sharding = Sharding(zero=zero, axes=SAMPLE_AXES, compute=compute, keep_gathered=keep)
    builder = FullySharded if zero == 3 else data_parallel.build
    return builder(parts, spots, mesh, whole, sharding)


def replicated(owned: Iterable[OwnedParam], mesh: Mesh, reduce_dtype: torch.dtype = torch.float32) -> DataParallel:
    """ZeRO-0 over parameters that have their values already."""
    params = [ModelParam(one.name, one.value, one.shard) for one in owned]
    return DataParallel(params, mesh, lambda name, tensor, shard: None, Sharding(axes=SAMPLE_AXES, reduce_dtype=reduce_dtype))


def make(mesh: Mesh, spec: ModelSpec, zero: int, compute: str = "fp32") -> tuple[nn.Module, Engine]:
    model = build(spec)
    return model, engine_of(mesh, [model], recipe(model, 3), zero, compute)


def descend(engine: Engine) -> None:
    with torch.no_grad():
        for one in engine.owned:
            assert one.gradient is not None
            one.value.sub_(RATE * one.gradient.to(one.value.dtype))
    engine.updated()


def values(engine: Engine, mesh: Mesh) -> dict[str, Tensor]:
    return wholes({one.name: (one.value.clone(), one.shard) for one in engine.owned}, mesh)


def gradients(engine: Engine, mesh: Mesh) -> dict[str, Tensor]:
    return wholes({one.name: (one.gradient.float(), one.shard) for one in engine.owned if one.gradient is not None}, mesh)


def accumulate(engine: Engine, model: nn.Module, of: list[int], compute: str, replicas: int) -> float:
    total = 0.0
    engine.begin(len(of))
    for number in of:
        term = loss(model, number, compute, replicas)
        term.backward()
        total += term.item()
        engine.after_backward()
    engine.finish()
    return total


def train(mesh: Mesh, kind: str, zero: int, compute: str = "fp32", give_up: int | None = None) -> Trained:
    model, engine = make(mesh, SPECS[kind], zero, compute)
    placed = ShardedModel([model], mesh, engine, lambda logits, targets: logits)
    replicas = mesh.layout.replicas
    trained = Trained(values(engine, mesh), [], [], {}, [])
    places = {one.name: one.value.data_ptr() for one in engine.owned}
    for step in range(STEPS):
        if give_up is not None:  # on all ranks: a step that nobody applies
            engine.begin(EACH)
            for number in numbers(step, mesh.replica, replicas)[:give_up]:
                loss(model, number + 7, compute, replicas).backward()
                engine.after_backward()
            engine.finish()
        term = accumulate(engine, model, numbers(step, mesh.replica, replicas), compute, replicas)
        copies = mesh.ranks / replicas
        trained.losses.append(mesh.all_reduce(torch.tensor(term, dtype=torch.float64)).item() / copies)
        trained.gradients.append(gradients(engine, mesh))
        trained.norms.append(placed.norm().item())
        evaluate(model, compute)  # whatever it gathers must not outlive the update
        descend(engine)
        trained.after = evaluate(model, compute)
    trained.final = values(engine, mesh)
    assert places == {one.name: one.value.data_ptr() for one in engine.owned}
    return trained


def worst(got: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> float:
    """Largest relative difference of any tensor."""
    assert got.keys() == want.keys()
    # A key's bias moves all scores of a query alike: its true gradient is zero, and what is computed is noise.
    noise = {name for name in want if name.endswith("key.bias")}
    assert all((got[name] - want[name]).norm() < 1e-6 for name in noise)
    return max(((got[name] - want[name]).norm() / (want[name].norm() + 1e-12)).item() for name in want if name not in noise)


def agree(got: Trained, want: Trained) -> None:
    assert all(torch.equal(got.initial[name], want.initial[name]) for name in want.initial)
    assert got.losses == pytest.approx(want.losses, rel=1e-6)
    for step in range(STEPS):
        assert worst(got.gradients[step], want.gradients[step]) < 1e-5
    assert got.norms == pytest.approx(want.norms, rel=1e-5)
    assert worst(got.final, want.final) < 1e-5
    assert got.after == pytest.approx(want.after, rel=1e-6)


def prove(layout: Layout, kind: str, zeros: tuple[int, ...] = (1, 2, 3), **more: Any) -> None:
    """The layout trains as one process does."""
    want = alone(kind, layout.replicas)  # before the ranks are forked, so that none of them has to

    def on_ranks(mesh: Mesh) -> None:
        for zero in zeros:
            agree(train(mesh, kind, zero, **more), want)

    run_ranks(on_ranks, layout.ranks, layout=layout, timeout=150)
