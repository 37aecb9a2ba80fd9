"""The whole trainer on several ranks: the number of ranks must not show in what is learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor

from phalanx.parallel.mesh import Mesh

Result = tuple[list[Any], dict[str, Tensor]]


def told(events: list[Any]) -> list[tuple[Any, ...]]:
    """Of each event what must be the same however many ranks there are."""
    fields = ("kind", "step", "loss", "tokens", "samples", "batch_digest", "learning_rate", "grad_norm", "in_a_row")
    return [tuple(getattr(event, field, None) for field in fields) for event in events]


def train(mesh: Mesh, directory: Path, *overrides: str) -> Result:
    trainer = tiny_trainer(mesh, tiny_run(*overrides), directory / str(mesh.ranks))
    events = list(trainer.events())
    return told(events), copied(trainer.tensors())


@pytest.mark.parametrize(
    "overrides", [(), ("optimizer.name=muon", "model.tied=true"), ("precision.compute=bf16",)], ids=["adamw", "muon", "bf16"]
)
def test_one_two_and_four_ranks_train_the_same_model_bit_for_bit(overrides: tuple[str, ...], tmp_path: Path) -> None:
    run = ("train.steps=6", "train.eval_every=3", "train.clip=0.5", *overrides)
    events, final = train(ALONE, tmp_path, *run)
    assert [kind for kind, *_ in events] == ["step"] * 3 + ["evaluated"] + ["step"] * 3 + ["evaluated", "saved", "finished"]
    for ranks in (2, 4):
        for other_events, other_final in run_ranks(train, ranks, tmp_path, *run):
            assert other_events == events
            assert differing(other_final, final) == []


def test_three_ranks_train_almost_the_same_model(tmp_path: Path) -> None:
    run = ("train.batch=6", "train.micro_batch=1")
    events, _ = train(ALONE, tmp_path, *run)
    results = run_ranks(train, 3, tmp_path, *run)
    assert all(differing(results[0][1], other) == [] for _, other in results)
    for alone, other in zip(events, results[0][0], strict=True):
        assert other[2] == (None if alone[2] is None else pytest.approx(alone[2], rel=1e-4))


def test_bf16_gradients_on_the_wire_train_too_and_ranks_stay_equal(tmp_path: Path) -> None:
    run = ("precision.reduce=bf16", "train.steps=12")
    (events, one), (_, two) = run_ranks(train, 2, tmp_path, *run)
    assert differing(one, two) == []
    losses = [event[2] for event in events if event[0] == "step"]
    assert losses[-1] < 0.9 * losses[0]
    exact = [event[2] for event in train(ALONE, tmp_path, "train.steps=12")[0] if event[0] == "step"]
    assert losses == pytest.approx(exact, rel=0.02)
    assert losses != exact


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_stop_on_one_rank_stops_all_at_the_same_step_with_nothing_changed(ranks: int, tmp_path: Path) -> None:
    batch = 9 if ranks == 3 else 8
    run = tiny_run(f"train.batch={batch}", "train.micro_batch=1", "train.steps=50")

    def stop_one(mesh: Mesh) -> tuple[list[tuple[Any, ...]], list[str], str, tuple[int, int]]:
        trainer = tiny_trainer(mesh, run, tmp_path)
        for _ in range(2):
            trainer.step()
        before = copied(trainer.tensors())
        if mesh.rank == mesh.ranks - 1:
            forwards = 0

            def stop(*_: object) -> None:
                nonlocal forwards
                forwards += 1
                if forwards == 1:  # the first of its two to four micro-batches; the others do all of theirs
                    trainer.stop("SIGTERM")

            trainer.model.register_forward_hook(stop)
        events = list(trainer.events())
        assert (trainer.progress.step, trainer.progress.samples) == (2, 2 * batch)
        return told(events), differing(before, trainer.tensors()), events[-1].reason, (events[-1].step, events[-2].step)

    results = run_ranks(stop_one, ranks)
    for events, changed, reason, steps in results:
        assert [kind for kind, *_ in events] == ["saved", "stopped"]
        assert changed == []
        assert steps == (2, 2)
        assert reason == ("SIGTERM" if events is results[-1][0] else "another rank was asked to stop")
    # What was interrupted goes on as if nothing had been, on another number of ranks.
    whole = tiny_trainer(ALONE, run, tmp_path / "whole")
    steps_of_whole = [whole.step() for _ in range(3)]
    resumed = tiny_trainer(ALONE, run, tmp_path)
    resumed.restore()
    again = resumed.step()
    whole.close()
    resumed.close()
    if ranks == 3:  # whose sums have an order of their own
        assert again.loss == pytest.approx(steps_of_whole[2].loss, rel=1e-4)  # type: ignore[union-attr]
        assert again.batch_digest == steps_of_whole[2].batch_digest  # type: ignore[union-attr]
    else:
        assert told([again]) == told(steps_of_whole[2:])


def test_a_poisoned_batch_on_one_rank_is_skipped_by_all(tmp_path: Path) -> None:
    def poison(mesh: Mesh) -> tuple[list[tuple[Any, ...]], list[str]]:
        trainer = tiny_trainer(mesh, tiny_run(), tmp_path)
        taken = [trainer.step()]
        before = copied(trainer.tensors())
        hook = None
        if mesh.rank == 1:
            hook = trainer.model.register_forward_hook(lambda module, inputs, logits: logits * torch.nan)
        taken.append(trainer.step())
        changed = differing(before, trainer.tensors())
        if hook is not None:
            hook.remove()
        taken.append(trainer.step())
        trainer.close()
        return [event[:2] for event in told(taken)], changed

    assert run_ranks(poison, 2) == [([("step", 1), ("step_skipped", 2), ("step", 3)], [])] * 2
