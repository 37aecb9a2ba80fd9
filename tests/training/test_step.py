from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from ranks import ALONE, run_ranks, tiny_run, tiny_trainer
from sharded import replicated
from torch import Tensor

from phalanx.data.dataset import open_dataset
from phalanx.data.pack import Batch
from phalanx.data.samples import Samples
from phalanx.models.init import build, materialize
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.spec.run import Run
from phalanx.training.micro_batch import MicroBatch, summed_loss
from phalanx.training.step_totals import StepTotals
from phalanx.training.trainer import Trainer


def samples(run: Run) -> Samples:
    return open_dataset(run.data, run.train.sequence_length, run.train.seed).train


def plain_gradients(run: Run, batch: Batch) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients by the book: the whole batch at once, the mean over all targets that are not masked."""
    model = materialize(build(run.model), run.train.seed, torch.device("cpu")).double()
    tokens, targets, positions, documents = map(
        torch.from_numpy, (batch.tokens, batch.targets, batch.positions, batch.documents)
    )
    logits = model(tokens, positions, documents)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def accumulated(run: Run, directory: Path) -> tuple[float, int, dict[str, Tensor]]:
    """Loss, targets and gradients of the first global batch, as the stepper makes them, taken to the mean."""
    trainer = tiny_trainer(ALONE, run, directory)
    batches = trainer.feed.next(0)
    trainer.close()
    totals = trainer.stepper.accumulate(batches, lambda: False)
    tokens = int(totals.tokens)
    scale = run.batch_tokens / tokens
    return (
        totals.loss.item() / tokens,
        tokens,
        {name: p.grad * scale for name, p in trainer.model.named_parameters() if p.grad is not None},
    )


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Largest relative difference of any parameter's gradient."""
    assert one.keys() == other.keys()
    return max(((one[name].double() - other[name].double()).norm() / other[name].double().norm()).item() for name in one)


@pytest.mark.parametrize("overrides", [(), ("model.positions=learned", "model.context=24", "model.tied=true")])
def test_micro_batches_of_any_size_add_up_to_the_mean_over_the_whole_batch(overrides: tuple[str, ...], tmp_path: Path) -> None:
    run = tiny_run(*overrides)
    batch = samples(run).batch(np.arange(8))
    masked = (batch.targets < 0).sum(axis=1)
    assert len(set(masked.tolist())) > 2  # a mean of the micro-batches' means would be another number
    loss, expected = plain_gradients(run, batch)
    whole = accumulated(replace(run, train=replace(run.train, micro_batch=8)), tmp_path)
    assert whole[1] == (batch.targets >= 0).sum()
    assert distance(whole[2], expected) < 1e-5  # fp32 against fp64
    for micro in (1, 2, 4):
        got = accumulated(replace(run, train=replace(run.train, micro_batch=micro)), tmp_path)
        assert got[0] == pytest.approx(whole[0], rel=1e-6)
        assert got[0] == pytest.approx(loss, rel=1e-6)
        assert got[1] == whole[1]
        assert distance(got[2], whole[2]) < 2e-6
        assert distance(got[2], expected) < 1e-5


def test_steps_equal_a_plain_loop_with_torchs_own_parts(tmp_path: Path) -> None:
    run = tiny_run("train.clip=0.5")
    trainer = tiny_trainer(ALONE, run, tmp_path)
    taken = [trainer.step() for _ in range(6)]
    trainer.close()
    model = materialize(build(run.model), run.train.seed, torch.device("cpu"))
    matrices, vectors = [p for p in model.parameters() if p.ndim == 2], [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for number, step in enumerate(taken):
        batch = samples(run).batch(np.arange(8 * number, 8 * number + 8))
        tokens, targets, positions, documents = map(
            torch.from_numpy, (batch.tokens, batch.targets, batch.positions, batch.documents)
        )
        logits = model(tokens, positions, documents)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = step.learning_rate  # type: ignore[union-attr]
        optimizer.step()
        assert step is not None
        assert step.loss == pytest.approx(loss.item(), rel=2e-5)
        assert step.grad_norm == pytest.approx(norm.item(), rel=1e-4)
    assert max(step.grad_norm for step in taken if step is not None) > 0.5  # some were clipped
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(p, dict(model.named_parameters())[name], atol=1e-4, rtol=1e-3)


def test_the_loss_skips_masked_targets_and_is_summed_in_fp32() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([[1, -100, 3], [-100, 6, 0]])
    logs = logits.double().log_softmax(-1)
    expected = -(logs[0, 0, 1] + logs[0, 2, 3] + logs[1, 1, 6] + logs[1, 2, 0]).item()
    assert summed_loss(logits, targets).item() == pytest.approx(expected, rel=1e-6)
    low = summed_loss(logits.bfloat16(), targets)
    assert low.dtype == torch.float32
    assert low.item() == pytest.approx(expected, rel=1e-2)
    assert summed_loss(logits, torch.full((2, 3), -100)).item() == 0.0


def one_batch(tokens: list[list[int]], first: int = 0) -> Batch:
    array = np.array(tokens, dtype=np.int64)
    zeros = np.zeros(array.shape, dtype=np.int32)
    return Batch(array, array.copy(), array.copy(), zeros, np.arange(first, first + len(array)))


def digest(tokens: list[list[int]], first: int = 0) -> int:
    return MicroBatch.prepare(one_batch(tokens, first), torch.device("cpu"), True).digest


def test_a_batch_digest_depends_on_tokens_and_indices_and_adds_up() -> None:
    rows = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    assert digest(rows) == digest(rows[:1]) + digest(rows[1:], first=1)
    assert digest(rows) != digest([rows[1], rows[0], rows[2]])
    assert digest(rows) != digest(rows, first=3)
    assert digest(rows) != digest([[1, 2, 3], [4, 5, 6], [7, 8, 10]])


def test_a_micro_batch_counts_targets_and_carries_documents_only_if_asked() -> None:
    batch = one_batch([[1, 2, 3], [4, 5, 6]])
    batch.targets[0, 1] = -100
    micro = MicroBatch.prepare(batch, torch.device("cpu"), True)
    assert micro.counted == 5
    assert micro.documents is not None
    assert MicroBatch.prepare(batch, torch.device("cpu"), False).documents is None
    assert micro.to(torch.device("cpu")) is micro


def test_step_totals_are_sums_over_ranks_and_one_stop_request_stops_all() -> None:
    def total(mesh: Mesh, who_stops: int | None) -> tuple[float, int, int, bool, bool]:
        totals = StepTotals(ShardedModel([torch.nn.Identity()], mesh, replicated([], mesh), summed_loss))
        for number in range(2):
            tokens = [[mesh.rank, number]]
            batch = MicroBatch.prepare(one_batch(tokens, first=2 * mesh.rank + number), mesh.device, True)
            totals.add(torch.tensor(1.5 * (mesh.rank + 1)), batch)
        if mesh.rank == who_stops:
            totals.stop()
        totals.start()
        totals.start()  # once is enough
        totals.wait()
        return totals.loss.item(), int(totals.tokens), int(totals.digest), bool(totals.stopped), totals.memory > 10 << 20

    expected = sum(digest([[rank, number]], first=2 * rank + number) for rank in range(3) for number in range(2))
    assert run_ranks(total, 3, None) == [(18.0, 12, expected, False, True)] * 3
    assert run_ranks(total, 3, 2) == [(18.0, 12, expected, True, True)] * 3


def digests(mesh: Mesh, directory: Path) -> list[str]:
    trainer: Trainer = tiny_trainer(mesh, tiny_run(), directory)
    taken = [trainer.step() for _ in range(4)]
    trainer.close()
    return [step.batch_digest for step in taken if step is not None]  # type: ignore[union-attr]


def test_the_batch_digest_is_the_same_on_any_number_of_ranks_and_new_each_step(tmp_path: Path) -> None:
    alone = digests(ALONE, tmp_path)
    assert len(set(alone)) == 4
    assert run_ranks(digests, 2, tmp_path) == [alone, alone]
