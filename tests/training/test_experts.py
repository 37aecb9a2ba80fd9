"""Mixtures of experts and prediction further ahead, in training: what the ranks agree on, what is kept, what is balanced."""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor

from phalanx.data.pack import IGNORED
from phalanx.events.records import Step, StepSkipped
from phalanx.models.moe import routers
from phalanx.parallel.expert import Loads, imbalance
from phalanx.parallel.mesh import Mesh
from phalanx.spec.load import loads
from phalanx.training.trainer import Trainer

MOE = (
    "model.moe.experts=4",
    "model.moe.active=2",
    "model.moe.ffn=32",
    "model.moe.bias_rate=0.01",
    "model.moe.balance_loss=0.01",
)


def moe_trainer(mesh: Mesh, directory: Path, *overrides: str) -> Trainer:
    return tiny_trainer(mesh, tiny_run(*MOE, *overrides), directory / str(mesh.ranks))


def biases(trainer: Trainer) -> list[Tensor]:
    return [router.bias.clone() for router in routers(trainer.model).values() if router.bias is not None]


def train(mesh: Mesh, directory: Path, *overrides: str) -> tuple[list[Any], dict[str, Tensor]]:
    trainer = moe_trainer(mesh, directory, *overrides)
    told = [(e.step, e.loss, e.grad_norm, e.expert_load) for e in trainer.events() if isinstance(e, Step)]
    return told, copied(trainer.tensors())


@pytest.mark.parametrize("overrides", [(), ("model.mtp_depth=2",)], ids=["experts", "ahead"])
def test_moe_losses_do_not_depend_on_the_number_of_ranks(overrides: tuple[str, ...], tmp_path: Path) -> None:
    told, final = train(ALONE, tmp_path, *overrides)
    assert any(name.endswith("mlp.router.bias") and tensor.any() for name, tensor in final.items())
    assert not any("counts" in name for name in final), "what is counted in a step is no state"
    for ranks in (2, 4):
        for other_told, other_final in run_ranks(train, ranks, tmp_path, *overrides):
            assert other_told == told
            assert differing(other_final, final) == []


def test_moe_run_stopped_within_a_step_resumes_exactly(tmp_path: Path) -> None:
    told, final = train(ALONE, tmp_path / "whole")
    one = moe_trainer(ALONE, tmp_path / "parts")
    taken = [one.step(), one.step()]
    before, forwards = copied(one.tensors()), []
    # Two of the four micro-batches have been counted when the stop comes.
    one.model.register_forward_hook(lambda *_: forwards.append(1) or (one.stop("by hand") if len(forwards) == 2 else None))
    assert [event.kind for event in one.events()] == ["saved", "stopped"]
    assert differing(before, one.tensors()) == []
    two = moe_trainer(ALONE, tmp_path / "parts")
    two.restore()
    assert differing(before, two.tensors()) == []
    taken += two.events()  # type: ignore[arg-type]
    assert [(e.step, e.loss, e.grad_norm) for e in taken if isinstance(e, Step)] == [record[:3] for record in told]
    assert differing(two.tensors(), final) == []


def test_a_skipped_step_changes_no_router_bias(tmp_path: Path) -> None:
    trainer = moe_trainer(ALONE, tmp_path)
    trainer.step()
    before = copied(trainer.tensors())
    hook = trainer.model.register_forward_hook(lambda module, inputs, logits: logits * math.nan)
    assert isinstance(trainer.step(), StepSkipped)
    assert differing(before, trainer.tensors()) == []
    hook.remove()
    assert isinstance(trainer.step(), Step)
    assert "model/blocks.0.mlp.router.bias" in differing(before, trainer.tensors())
    trainer.close()


def test_router_biases_follow_the_loads_of_the_global_batch(tmp_path: Path) -> None:
    """Counted here by watching what the routers choose."""
    trainer = moe_trainer(ALONE, tmp_path)
    chosen: dict[int, list[Tensor]] = {}
    for layer, router in enumerate(routers(trainer.model).values()):
        router.register_forward_hook(lambda module, inputs, out, layer=layer: chosen.setdefault(layer, []).append(out[0]))
    whole: list[Tensor] = []  # of both steps: the load is told over several
    for _ in range(2):
        before, alone = biases(trainer), [deepcopy(router) for router in routers(trainer.model).values()]
        chosen.clear()
        step = trainer.step()
        assert isinstance(step, Step)
        counts = [torch.bincount(torch.cat(layer).flatten(), minlength=4).double() for layer in chosen.values()]
        assert [int(count.sum()) for count in counts] == [2 * 8 * 24] * 2, "every token reaches two experts of every layer"
        whole = [old + new for old, new in zip(whole, counts, strict=True)] if whole else counts
        assert step.expert_load == pytest.approx(max(float(count.max() / count.mean()) for count in whole))
        for old, new, count, router in zip(before, biases(trainer), counts, alone, strict=True):
            assert torch.equal((new - old).sign(), (count.mean() - count).sign().float()), "the fuller, the harder to choose"
            router.rebalance(count)
            assert router.bias is not None and torch.equal(new, router.bias)
    trainer.evaluate()  # reads batches too, but teaches the routers nothing
    assert not any(router.counts.sum() > 2 * 8 * 24 for router in routers(trainer.model).values())
    trainer.close()


def test_the_balancing_loss_is_scaled_as_the_loss_is(tmp_path: Path) -> None:
    trainer = moe_trainer(ALONE, tmp_path)
    trainer.step()
    trainer.close()
    assert [router.loss_scale for router in routers(trainer.model).values()] == [1 / (8 * 24)] * 2


def test_a_dense_model_reports_no_expert_load(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run(), tmp_path)
    step = trainer.step()
    assert isinstance(step, Step) and step.expert_load is None
    trainer.close()


def test_expert_loads_are_summed_as_one_row() -> None:
    counts = {"one": torch.tensor([1, 3]), "three": torch.tensor([2, 2, 5])}
    sizes = {"one": 2, "two": 4, "three": 3}  # another stage has the second layer
    all_layers = Loads(sizes, counts)
    row = torch.zeros(all_layers.size, dtype=torch.float64)
    all_layers.put(row)
    assert row.tolist() == [1, 3, 0, 0, 0, 0, 2, 2, 5]
    row[2:6] = 1
    split = all_layers.split(2 * row)
    assert {name: part.tolist() for name, part in split.items()} == {"one": [2, 6], "two": [2] * 4, "three": [4, 4, 10]}
    assert imbalance(all_layers.split(row).values()).item() == pytest.approx(5 / 3)
    all_layers.reset()
    assert [int(count.sum()) for count in counts.values()] == [0, 0]
    assert Loads({}, {}).split(row[:0]) == {}


def test_mtp_counts_in_the_gradient_but_not_in_the_reported_loss(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run("model.mtp_depth=2", "model.mtp_loss_weight=0.5", "train.clip=inf"), tmp_path)
    micro = [trainer.feed.prepare(trainer.data.train.batch(torch.arange(n, n + 2).numpy())) for n in range(0, 8, 2)]
    total, objective, tokens = 0.0, torch.zeros(()), 0
    for batch in micro:
        logits, *further = trainer.model(batch.tokens, batch.positions, batch.documents)
        rows = [plainly(logits, batch.targets)]
        for depth, ahead in enumerate(further, start=1):
            later = torch.full_like(batch.targets, IGNORED)
            for row, column in (batch.targets >= IGNORED).nonzero().tolist():
                inside = column + depth < 24 and batch.documents[row, column] == batch.documents[row, column + depth]  # type: ignore[index]
                if inside:
                    later[row, column] = batch.targets[row, column + depth]
            rows.append(plainly(ahead, later))
        total, tokens = total + rows[0].item(), tokens + batch.counted
        objective = objective + rows[0] + 0.5 * (rows[1] + rows[2]) / 2
    gradient = torch.autograd.grad(objective / tokens, list(trainer.model.parameters()))
    step = trainer.step()
    assert isinstance(step, Step)
    assert step.loss == pytest.approx(total / tokens, rel=1e-6)
    assert step.grad_norm == pytest.approx(math.sqrt(sum(g.square().sum().item() for g in gradient)), rel=1e-5)
    evaluated = trainer.evaluate()
    assert evaluated is not None and math.isfinite(evaluated.loss)
    trainer.close()


def plainly(logits_BSV: Tensor, targets_BS: Tensor) -> Tensor:
    logs = logits_BSV.log_softmax(-1)
    rows, columns = (targets_BS >= 0).nonzero(as_tuple=True)
    return -logs[rows, columns, targets_BS[rows, columns]].sum()


BALANCE = """
[model]
preset = "tiny-moe"
[data]
source = "stdlib"
[train]
batch = 16
micro_batch = 4
sequence_length = 128
steps = 200
[optimizer]
learning_rate = 3e-3
warmup_steps = 20
[cluster]
device = "cpu"
threads = 1
"""


def loads_of(directory: Path, steps: int, *overrides: str) -> list[float]:
    trainer = tiny_trainer(ALONE, loads(BALANCE, overrides=overrides), directory)
    taken = [trainer.step() for _ in range(steps)]
    trainer.close()
    return [step.expert_load for step in taken if isinstance(step, Step) and step.expert_load is not None]


@pytest.mark.slow
def test_router_bias_alone_balances_the_load_within_200_steps(tmp_path: Path) -> None:
    assert loads_of(tmp_path, 200)[-1] < 1.3  # over the last 20 steps
    assert loads_of(tmp_path, 60, "model.moe.bias_rate=0")[-1] > 2
