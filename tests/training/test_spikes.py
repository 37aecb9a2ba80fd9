from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer
from torch import Tensor

from phalanx.checkpointing import directory
from phalanx.events.records import Event, Restored, Rewound, Saved, Step, StepSkipped, Warned
from phalanx.parallel.mesh import Mesh
from phalanx.spec.errors import RunFailed
from phalanx.training.run_progress import NO_LIMITS, Progress, RunningStats
from phalanx.training.trainer import Trainer


def stats(values: list[tuple[float, float]]) -> RunningStats:
    found = RunningStats()
    for loss, norm in values:
        found.add(loss, norm)
    return found


def test_running_stats_are_mean_and_deviation_of_recent_steps() -> None:
    values = [(3.0 + math.sin(n), math.exp(math.cos(n))) for n in range(60)]
    found = stats(values)
    losses, logs = torch.tensor([v[0] for v in values]).double(), torch.tensor([v[1] for v in values]).double().log()
    assert found.loss == pytest.approx(losses.mean().item()) and found.norm == pytest.approx(logs.mean().item(), abs=1e-6)
    assert found.loss_variance == pytest.approx(losses.var(correction=0).item())
    limits = found.limits(4.0)
    assert limits.loss == pytest.approx((losses.mean() + 4 * losses.std(correction=0)).item())
    assert limits.norm == pytest.approx((logs.mean() + 4 * logs.std(correction=0)).exp().item(), rel=1e-6)
    far = stats([(5.0, 1.0)] * 500 + [(1.0, 1.0)] * 500)
    assert far.loss == pytest.approx(1.0, abs=0.05)  # what was long ago no longer counts


def test_spike_limits_need_enough_steps_and_a_minimum_deviation() -> None:
    assert stats([(2.0, 1.0)] * 19).limits(3.0) == NO_LIMITS
    limits = stats([(2.0, 1.0)] * 20).limits(3.0)
    assert limits.loss == pytest.approx(2.06) and limits.norm == pytest.approx(math.exp(0.15))
    one = torch.tensor(1.0)
    assert not limits.exceeded(one * 2.05, one) and limits.exceeded(one * 2.07, one) and limits.exceeded(one, one * 1.17)
    assert not limits.exceeded(one * math.nan, one * math.nan) and not limits.exceeded(one, None)


def spoil(trainer: Trainer, steps: set[int]) -> None:
    """Make the logits of some steps, known by their place in the data, loud: finite, and far too high a loss."""
    batch = trainer.run.batch

    def hook(module: object, given: object, logits: Tensor) -> Tensor | None:
        return logits * 50 if trainer.progress.samples // batch + 1 in steps else None

    trainer.model.register_forward_hook(hook)


def runs(mesh: Mesh, directory: Path, spoiled: set[int], *overrides: str) -> tuple[list[Event], dict[str, object]]:
    trainer = tiny_trainer(mesh, tiny_run("data.eval_fraction=0", *overrides), directory)
    spoil(trainer, spoiled)
    told = trainer.restore()
    before = copied(trainer.tensors())
    for event in trainer.events():
        told.append(event)
        if isinstance(event, StepSkipped):
            assert differing(before, trainer.tensors()) == []
        before = copied(trainer.tensors())
    return told, asdict(trainer.progress)


def test_spikes_are_skipped_on_all_ranks_and_in_a_resumed_run_alike(tmp_path: Path) -> None:
    settings = ("resilience.spike=8", "train.steps=26")
    told, progress = runs(ALONE, tmp_path / "whole", {23, 24, 26}, *settings)
    skipped = [(event.step, event.reason, event.in_a_row) for event in told if isinstance(event, StepSkipped)]
    assert skipped == [(23, "spike", 1), (24, "spike", 2), (26, "spike", 1)]
    assert progress["usual"]["steps"] == 23 and progress["skipped_in_a_row"] == progress["spikes_in_a_row"] == 1  # type: ignore[index]
    for of_rank, _ in run_ranks(runs, 2, tmp_path / "ranks", {23, 24, 26}, *settings):
        assert [(e.step, e.reason, e.in_a_row) for e in of_rank if isinstance(e, StepSkipped)] == skipped
    runs(ALONE, tmp_path / "parts", set(), "resilience.spike=8", "train.steps=22", "optimizer.schedule=constant")
    again, later = runs(ALONE, tmp_path / "parts", {23, 24, 26}, *settings, "optimizer.schedule=constant")
    assert [(e.step, e.reason, e.in_a_row) for e in again if isinstance(e, StepSkipped)] == skipped
    assert later["usual"]["steps"] == 23  # type: ignore[index]


def test_spikes_are_applied_without_the_setting(tmp_path: Path) -> None:
    told, progress = runs(ALONE, tmp_path, {23}, "train.steps=24")
    assert not [event for event in told if isinstance(event, StepSkipped)] and progress["usual"] == {}


def test_too_many_spikes_end_the_run_with_a_message(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        runs(ALONE, tmp_path, set(range(22, 99)), "resilience.spike=8", "resilience.max_skipped=2", "train.steps=30")
    assert str(caught.value).startswith(
        "3 steps in a row had a loss or gradient norm more than resilience.spike = 8 standard deviations above the mean, more than "
        "resilience.max_skipped = 2; nothing was applied since step 21."
    )


REWIND = ("resilience.rollback_after=2", "checkpoint.every=4", "checkpoint.keep_last=9", "checkpoint.async_save=false")


def nans(trainer: Trainer, batches: set[int]) -> None:
    batch = trainer.run.batch
    trainer.model.register_forward_hook(
        lambda module, given, logits: logits * math.nan if trainer.progress.samples // batch + 1 in batches else None
    )


def rewinding(mesh: Mesh, directory: Path, bad: set[int], *overrides: str) -> tuple[list[Event], Trainer | None]:
    trainer = tiny_trainer(mesh, tiny_run("data.eval_fraction=0", *REWIND, *overrides), directory)
    nans(trainer, bad)
    told = trainer.restore()
    told += trainer.events()
    return told, trainer if mesh.ranks == 1 else None


def test_rollback_restores_a_good_step_and_skips_the_data_since(tmp_path: Path) -> None:
    """Batches 6 and 7 are bad: from step 7 the run goes back to step 4, and sees batch 8 as its fifth."""
    told, trainer = rewinding(ALONE, tmp_path / "run", {6, 7}, "train.steps=9")
    assert trainer is not None
    steps = [event for event in told if isinstance(event, Step)]
    assert [(event.step, event.samples // 8) for event in steps] == [
        *((n, n) for n in range(1, 6)),
        *((n, n + 3) for n in range(5, 10)),
    ]
    (rewound,) = [event for event in told if isinstance(event, Rewound)]
    assert (rewound.step, rewound.to_step, rewound.skipped_samples) == (7, 4, [32, 56])
    assert rewound.path == str(directory.step_dir(tmp_path / "run", 4))
    assert trainer.progress.left_out == [[32, 56, 4]]
    # As a run that had never seen those batches.
    other = tiny_trainer(ALONE, tiny_run("data.eval_fraction=0", "train.steps=9"), tmp_path / "other")
    for _ in range(4):
        other.step()
    other.progress.samples = 56
    other.feed.close()
    for event in steps[5:]:
        same = other.step()
        assert isinstance(same, Step)
        assert (same.loss, same.batch_digest, same.learning_rate) == (event.loss, event.batch_digest, event.learning_rate)
    assert differing(other.tensors(), trainer.tensors()) == []
    other.close()


def stopped(mesh: Mesh, directory: Path) -> list[Event]:
    trainer = tiny_trainer(mesh, tiny_run("data.eval_fraction=0", *REWIND, "checkpoint.every=2", "train.steps=9"), directory)
    nans(trainer, {6, 7})
    told = []
    for event in trainer.events():
        told.append(event)
        if isinstance(event, Rewound):
            trainer.stop("enough")
    return told


def test_a_resumed_run_does_not_find_checkpoints_that_were_rolled_back(tmp_path: Path) -> None:
    """With saves every 2 steps there are some of 4 and, during the bad ones, of 6: none of that is newest after step 4 was saved anew."""
    told = run_ranks(stopped, 2, tmp_path)[0]
    assert [event.step for event in told if isinstance(event, Saved)] == [2, 4, 6, 4]
    assert [path.name for path in directory.list_checkpoints(tmp_path)] == ["step-00000004", "step-00000002"]
    told, trainer = rewinding(ALONE, tmp_path, {6, 7}, "train.steps=9")
    assert trainer is not None
    assert [event.step for event in told if isinstance(event, Restored)] == [4]
    assert [event.samples // 8 for event in told if isinstance(event, Step)] == [8, 9, 10, 11, 12]
    assert trainer.progress.left_out == [[32, 56, 4]]


def test_rollback_without_a_checkpoint_warns_and_skips(tmp_path: Path) -> None:
    told, _ = rewinding(ALONE, tmp_path, {2, 3, 4}, "train.steps=6")
    assert [event.step for event in told if isinstance(event, StepSkipped)] == [2, 3, 4]
    (warned,) = [event for event in told if isinstance(event, Warned)]
    assert warned.message == "There is no checkpoint of step 1 or before to go back to: bad steps are skipped."


@pytest.mark.slow
def test_too_many_rollbacks_to_one_step_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(RunFailed) as caught:
        rewinding(ALONE, tmp_path, set(range(6, 99)), "train.steps=9")
    assert (
        "the run rolled back to step 4 3 times (resilience.rollback_after = 2) and skipped samples 32 to 55, 56 to 71, 72 to 87"
        in str(caught.value)
    )


def test_progress_saved_without_spike_statistics_is_restored() -> None:
    old = {"step": 3, "samples": 24, "skipped_in_a_row": 1, "loss_scale": {}}
    assert Progress(**old).usual == {} and Progress(**old).last_good == 2  # type: ignore[arg-type]
