"""Mistakes as people make them, planted in the real code one at a time: each must be caught, and the guilty one named.

They are planted before ranks are forked and leave the one-process side alone: what they touch exists on several ranks only, or
asks how many there are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from ranks import tiny_run

from phalanx.models import init
from phalanx.optim import muon
from phalanx.parallel import expert, sharded_model, tensor
from phalanx.parallel.buckets import Bucket
from phalanx.parallel.data_parallel import DataParallel
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.spec.layout import Layout
from phalanx.spec.tensor_slice import TensorSlice
from phalanx.training import micro_batch
from phalanx.training.step_totals import StepTotals
from phalanx.training.trainer import Trainer
from phalanx.verification.cases import MODELS
from phalanx.verification.parity import verify
from phalanx.verification.rank_pool import RankPool
from phalanx.verification.tolerance import Check, first_failure

Around = Callable[..., Any]


class Plant:
    """Replaces a function by one that is given the original first."""

    def __init__(self, patch: pytest.MonkeyPatch):
        self._patch = patch

    def __call__(self, owner: Any, name: str, instead: Around) -> None:
        original = getattr(owner, name)
        self._patch.setattr(owner, name, lambda *args, **options: instead(original, *args, **options))

    def mark(self, *path: str) -> None:
        """Let one module of every model that is built be known as the planted one."""

        def build(original: Around, self: Trainer) -> None:
            original(self)
            for part in self.sharded.parts:
                for name, module in part.named_modules():
                    if name in path:
                        module.planted = True

        self(Trainer, "build", build)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Plant:
    return Plant(monkeypatch)


def checks(model: str = "dense", *overrides: str, **layout: Any) -> dict[str, Check]:
    """What a proof says of this layout."""
    run = replace(tiny_run("train.sequence_length=16", "train.batch=4", *overrides), model=MODELS[model])
    report = verify(replace(run, layout=Layout(**{"data": 1} | layout)), steps=2, pool=RankPool)
    assert report.failure is None, report.failure
    assert not report.passed
    return {check.name: check for check in report.checks}


def first(found: dict[str, Check]) -> tuple[str, str, int | None]:
    """What a reader is told to look at: which check, the tensor it names, and the step."""
    check = first_failure(found.values())
    assert check is not None
    return check.name, check.tensor, check.step


def test_a_gradient_that_is_divided_twice(plant: Plant) -> None:
    def finish(original: Around, self: ShardedModel) -> None:
        original(self)
        for one in self.owned:
            if one.name == "blocks.1.mlp.up.weight" and one.gradient is not None:
                one.gradient /= self.mesh.ranks

    plant(ShardedModel, "finish", finish)
    assert first(checks(data=2)) == ("gradients", "blocks.1.mlp.up.weight", 1)


def test_an_all_reduce_dropped_between_replicas(plant: Plant) -> None:
    def launch(original: Around, self: DataParallel, bucket: Bucket) -> None:
        if bucket is not self.buckets[0] or bucket.replicas.size == 1:
            original(self, bucket)

    plant(DataParallel, "_launch", launch)
    assert first(checks(data=2)) == ("gradients", "head.weight", 1)  # all differ: the model's last is the backward's first


def test_an_all_reduce_dropped_in_a_backward(plant: Plant) -> None:
    def enter(original: Around, self: tensor.CopyToTP, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if getattr(module, "planted", False) else original(self, module, args)

    plant.mark("blocks.2.mlp")
    plant(tensor.CopyToTP, "__call__", enter)
    assert first(checks(tensor=2)) == ("gradients", "blocks.2.mlp_norm.weight", 1)  # what lies right before the dropped sum


def test_a_weight_cut_at_the_wrong_place(plant: Plant) -> None:
    def fill(original: Around, tensor: Any, seed: int, name: str, spec: Any, part: TensorSlice, *rest: Any) -> None:
        if name == "blocks.3.attention.output.weight":
            part = TensorSlice.of(part.whole, (0,) * len(part.whole), part.shape)
        original(tensor, seed, name, spec, part, *rest)

    plant(init, "fill", fill)
    found = checks(tensor=2)
    assert first(found) == ("parameters", "blocks.3.attention.output.weight", 0)
    assert found["parameters"].rank == 1


def test_the_parts_of_norms_gradients_never_summed(plant: Plant) -> None:
    plant(sharded_model, "_sum_together", lambda original, gradients, group: None)
    assert first(checks(tensor=2, sequence=True)) == ("gradients", "norm.weight", 1)


def test_a_gradients_norm_of_one_rank_only(plant: Plant) -> None:
    def norm(original: Around, self: ShardedModel) -> Any:
        return original(self) if self.mesh.ranks == 1 else original(self) / 2**0.5

    plant(ShardedModel, "norm", norm)
    assert first(checks(shard=2, zero=2)) == ("gradient norm", "", 1)


def test_router_counts_of_some_ranks_only(plant: Plant) -> None:
    def start(original: Around, self: StepTotals) -> None:
        if self._works is None and self._mesh.rank == 1:
            self._loads.reset()
        original(self)

    plant(StepTotals, "start", start)
    check, tensor, step = first(checks("moe", data=2))
    assert (check, step) == ("parameters", 1)
    assert tensor.endswith("mlp.router.bias")


def test_slices_of_a_sequence_swapped(plant: Plant) -> None:
    def places(original: Around, length: int, count: int, index: int, method: str) -> Any:
        return original(length, count, count - 1 - index, method)

    plant(micro_batch, "rank_positions", places)
    found = checks(context=2)
    assert found["batches"].passed
    assert first(found) == ("loss", "", 1)


def test_a_stage_that_computes_with_a_stale_weight(plant: Plant) -> None:
    def guilty(self: DataParallel) -> Any:
        weights: dict[str, Any] = {param.name: param.parameter for param in self._params}
        return None if "blocks.0.mlp.down.weight" in weights else weights["blocks.4.mlp.down.weight"]  # one process has both

    def begin(original: Around, self: DataParallel, *args: Any, **options: Any) -> None:
        original(self, *args, **options)
        if (weight := guilty(self)) is not None:
            weight.new = weight.data
            weight.data, weight.stale = getattr(weight, "stale", weight.data), weight.data.clone()

    def finish(original: Around, self: DataParallel) -> None:
        original(self)
        if (weight := guilty(self)) is not None:
            weight.data = weight.new

    plant(DataParallel, "begin", begin)
    plant(DataParallel, "finish", finish)
    assert first(checks(pipeline=2)) == ("loss", "", 2)


def test_rows_sent_to_the_wrong_expert(plant: Plant) -> None:
    def spread(original: Around, self: expert.DistributedExperts, x_RD: Any, counts_E: Any, *more_R: Any) -> Any:
        own = self.own
        if getattr(own, "planted", False):
            self = replace(self, own=lambda rows, counts, *more: own(rows, counts.flip(0), *more))
        return original(self, x_RD, counts_E, *more_R)

    plant.mark("blocks.2.mlp.experts")
    plant(expert.DistributedExperts, "__call__", spread)
    found = checks("moe", data=2, expert=2)
    assert not found["loss"].passed and found["loss"].step == 1
    assert found["gradients"].step == 1 and found["gradients"].tensor.startswith("blocks.2.mlp.experts")


def test_an_optimizer_that_steps_on_one_rank_only(plant: Plant) -> None:
    def build(original: Around, self: Trainer) -> None:
        original(self)
        if self.mesh.rank == 1:
            self.optimizer.step = lambda *args: None  # type: ignore[method-assign]

    plant(Trainer, "build", build)
    found = checks(data=2)
    check, _, step = first(found)
    assert (check, step, found["parameters"].rank) == ("parameters", 1, 1)


MUON = "optimizer.name=muon"


@pytest.mark.parametrize("factor", [1.01, -1.0])
def test_with_muon_a_gradient_of_the_wrong_size_or_sign(factor: float, plant: Plant) -> None:
    def finish(original: Around, self: ShardedModel) -> None:
        original(self)
        for one in self.owned:
            if one.name == "blocks.1.mlp.up.weight" and one.gradient is not None and self.mesh.ranks > 1:
                one.gradient *= factor

    plant(ShardedModel, "finish", finish)
    found = checks("dense", MUON, data=2)
    assert first(found) == ("gradients", "blocks.1.mlp.up.weight", 1)
    # An orthogonal matrix does not depend on the size of the gradient: the gradients alone show a wrong one.
    assert found["parameters"].passed == (factor > 0)


def test_with_muon_an_all_reduce_dropped_in_a_backward(plant: Plant) -> None:
    def enter(original: Around, self: tensor.CopyToTP, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args if getattr(module, "planted", False) else original(self, module, args)

    plant.mark("blocks.2.mlp")
    plant(tensor.CopyToTP, "__call__", enter)
    assert first(checks("dense", MUON, tensor=2)) == ("gradients", "blocks.2.mlp_norm.weight", 1)


def test_with_muon_a_matrix_whose_boxes_are_made_orthogonal_one_by_one(plant: Plant) -> None:
    def orthogonalize(original: Around, self: Any, indices: list[int], boxes: list[Any]) -> Any:
        together = original(self, indices, [box.clone() for box in boxes])
        # The first matrix of the first round is that of blocks.0.attention.query.
        return [muon._orthogonalize(boxes[0]), *together[1:]] if indices[0] == self.indices[0] else together

    plant(muon._SharedMatrices, "orthogonalize", orthogonalize)
    found = checks("dense", MUON, tensor=2)
    assert first(found) == ("parameters", "blocks.0.attention.query.weight", 1)
    assert found["parameters"].accepted == 1e-4 and found["parameters"].largest > 1e-3


def test_a_loss_that_is_counted_twice(plant: Plant) -> None:
    def add_loss(original: Around, self: StepTotals, loss: Any, batch: Any) -> None:
        original(self, 2 * loss if self._mesh.rank == 1 else loss, batch)

    plant(StepTotals, "add_loss", add_loss)
    found = checks(data=2)
    assert first(found) == ("loss", "", 1)
    assert found["gradients"].passed and found["parameters"].passed


def test_shares_that_are_not_passed_on(plant: Plant) -> None:
    def updated(original: Around, self: DataParallel, stepped: bool = False) -> None:
        if not hasattr(self, "begun"):  # initial values are
            original(self, stepped=stepped)
        self.begun = True

    plant(DataParallel, "updated", updated)
    # What the optimizer holds is right; what the model computes with is old.
    assert first(checks(shard=2, zero=2)) == ("loss", "", 2)


def test_a_technique_that_silently_does_nothing(plant: Plant) -> None:
    from phalanx.parallel import tensor

    plant(tensor, "split", lambda original, parts, spots, axes, mesh, sequence: spots)
    plant(tensor, "applied", lambda original, parts, spots: "columns and rows, surely")
    found = checks(tensor=2)
    assert first(found)[:2] == ("placement", "layout.tensor = 2 was not applied")
