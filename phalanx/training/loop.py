"""The training loop: steps, evaluations and saves in order, until the run is finished or a rank is asked to stop; and the rollback
after bad steps. `Trainer.train` calls it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from phalanx.checkpointing.directory import DamagedCheckpoint
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.state_tensor import StateTensor
from phalanx.events.records import CheckpointDamaged, Evaluated, Event, Finished, Rewound, Step, StepSkipped, Stopped, Warned
from phalanx.spec.errors import RunFailed
from phalanx.spec.run import Run
from phalanx.training.hooks import Hooks, StepRefused
from phalanx.training.run_progress import Progress, too_many_rollbacks, too_many_skipped
from phalanx.training.saving import Checkpointer
from phalanx.training.step_totals import PAUSE, StopSignal

_MAX_ROLLBACKS = 3
"""Times that a run goes back to the same step."""


class LoopedTrainer(Protocol):
    """The calls of `Trainer` that the loop makes."""

    run: Run
    progress: Progress
    stop_signal: StopSignal
    checkpointer: Checkpointer
    hooks: Hooks

    @property
    def finished(self) -> bool: ...
    def tensors(self) -> dict[str, StateTensor]: ...
    def restore(self, path: Path | Location | None = None) -> list[Event]: ...
    def step(self) -> Step | StepSkipped | None: ...
    def evaluate(self) -> Evaluated | None: ...
    def save_now(self) -> Iterator[Event]: ...
    def start_save(self) -> Iterator[Event]: ...


def train(trainer: LoopedTrainer) -> Iterator[Event]:
    """Trains until the run is finished or all ranks have agreed to stop."""
    run, checkpointer = trainer.run, trainer.checkpointer
    checkpointer.prepare(trainer.tensors())
    while not trainer.finished:
        try:
            record = trainer.step()
        except StepRefused as refused:
            yield from refused.events
            raise
        if record is None:
            return
        yield record
        yield from trainer.hooks.take_events()
        yield from checkpointer.ended()
        yield from _after_bad_steps(trainer)
        if trainer.progress.step < record.step:
            continue  # the run was rolled back
        if _is_due(trainer, run.train.eval_every) or trainer.finished:
            if (evaluated := trainer.evaluate()) is not None:
                yield evaluated
            if trainer.stop_signal.agreed:
                return
        if not trainer.finished:
            checkpointer.copy(trainer.progress, trainer.tensors)
        if _is_due(trainer, run.checkpoint.every) and not trainer.finished:
            trainer.hooks.on_phase("saving")
            yield from trainer.start_save()


def end(trainer: LoopedTrainer) -> Iterator[Event]:
    """Saves the final state, unless the run is only paused for a re-layout."""
    if trainer.stop_signal.agreed == PAUSE:
        return
    checkpointer = trainer.checkpointer
    trainer.hooks.on_phase("saving")
    yield from checkpointer.settle()
    if checkpointer.step != trainer.progress.step:
        yield from trainer.save_now()
    trainer.hooks.on_phase("ending")
    yield from checkpointer.finish()
    if trainer.finished:
        yield Finished(step=trainer.progress.step)
    else:
        yield Stopped(step=trainer.progress.step, reason=trainer.stop_signal.reason)


def _is_due(trainer: LoopedTrainer, every: int | None) -> bool:
    return every is not None and trainer.progress.step % every == 0


def _after_bad_steps(trainer: LoopedTrainer) -> Iterator[Event]:
    """After too many skipped steps in a row, rolls back or ends the run."""
    skipped, limits = trainer.progress.skipped_in_a_row, trainer.run.resilience
    if limits.rollback_after is not None and skipped >= limits.rollback_after:
        yield from roll_back(trainer)
    if trainer.progress.skipped_in_a_row > limits.max_skipped:
        yield from trainer.save_now()
        raise RunFailed(too_many_skipped(trainer.progress, trainer.run))


def roll_back(trainer: LoopedTrainer) -> Iterator[Event]:
    """Restores the last good checkpoint and skips the data read since; all ranks call it together. Without a checkpoint, does nothing.

    No resumption may find checkpoints of the steps that were undone. So the restored state is saved at once, with the new position in
    the data, and only when that save is complete are the later checkpoints removed.
    """
    checkpointer, before = trainer.checkpointer, trainer.progress
    yield from checkpointer.settle()
    path, events = _restore_until(trainer, before.last_good)
    yield from events
    if path is None:
        if before.skipped_in_a_row == trainer.run.resilience.rollback_after:
            yield Warned(
                message=f"There is no checkpoint of step {before.last_good} or before to go back to: bad steps are skipped."
            )
        return
    step = trainer.progress.step
    trainer.progress = after = before.back_to(trainer.progress)
    if sum(to == step for _, _, to in after.left_out) > _MAX_ROLLBACKS:
        raise RunFailed(too_many_rollbacks(before, step, trainer.run))
    yield from trainer.save_now()
    checkpointer.remove_after(step)
    first, beyond, _ = after.left_out[-1]
    yield Rewound(step=before.step, to_step=step, skipped_samples=[first, beyond], path=str(path))


def _restore_until(trainer: LoopedTrainer, step: int) -> tuple[Location | None, list[Event]]:
    """Restores the newest valid checkpoint of this step or an earlier one, and returns its location."""
    events: list[Event] = []
    damaged: set[str] = set()
    while (path := trainer.checkpointer.newest_until(step, damaged)) is not None:
        try:
            return path, [*events, *trainer.restore(path)]
        except DamagedCheckpoint as problem:  # on all ranks alike; tensors that were read already are read again
            damaged.add(problem.path)
            events.append(CheckpointDamaged(path=problem.path, reason=problem.reason))
    if damaged:
        raise RunFailed(
            f"No checkpoint of step {step} or before can be loaded, and parts of {', '.join(sorted(damaged))} have overwritten the state."
        )
    return None, events
