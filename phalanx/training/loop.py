"""Steps, evaluations, copies and saves in their order, to the end of a run or until it is told to stop. The trainer's `train`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.events.records import Event, Finished, Stopped
from phalanx.spec.errors import RunFailed
from phalanx.training.hooks.replica_check import Corruption
from phalanx.training.rollback import rewind
from phalanx.training.saving import Saving
from phalanx.training.step_report import too_many_skipped
from phalanx.training.step_totals import PAUSE

if TYPE_CHECKING:
    from phalanx.training.trainer import Trainer


def loop(trainer: Trainer, saving: Saving) -> Iterator[Event]:
    """Until the run is finished, or all ranks have heard that one was told to end."""
    run = trainer.run
    saving.prepare(trainer.tensors())
    while not trainer.finished:
        try:
            taken = trainer.step()
        except Corruption as error:
            yield from error.events
            raise
        if taken is None:
            return
        yield taken
        yield from trainer.notes()
        yield from saving.ended()
        yield from _bad(trainer, saving)
        if trainer.progress.step < taken.step:
            continue  # it went back
        if _due(trainer, run.train.eval_every) or trainer.finished:
            if (evaluated := trainer.evaluate()) is not None:
                yield evaluated
            if trainer.heard:
                return
        if not trainer.finished:
            saving.copy(trainer.progress, trainer.tensors)
        if _due(trainer, run.checkpoint.every) and not trainer.finished:
            trainer.heartbeat.enter("saving")
            yield from trainer.save_behind()


def end(trainer: Trainer, saving: Saving) -> Iterator[Event]:
    """What there is, is saved; but not where other ranks are to go on."""
    if trainer.heard == PAUSE:
        return
    trainer.heartbeat.enter("saving")
    yield from saving.settle()
    if saving.step != trainer.progress.step:
        yield from trainer.save_now()
    trainer.heartbeat.enter("ending")
    yield from saving.finish()
    if trainer.finished:
        yield Finished(step=trainer.progress.step)
    else:
        yield Stopped(step=trainer.progress.step, reason=trainer.why)


def _bad(trainer: Trainer, saving: Saving) -> Iterator[Event]:
    """What follows from bad steps that follow each other."""
    bad, limits = trainer.progress.skipped_in_a_row, trainer.run.resilience
    if limits.rollback_after is not None and bad >= limits.rollback_after:
        yield from rewind(trainer, saving)
    if trainer.progress.skipped_in_a_row > limits.max_skipped:
        yield from trainer.save_now()
        raise RunFailed(too_many_skipped(trainer.progress, trainer.run))


def _due(trainer: Trainer, every: int | None) -> bool:
    return every is not None and trainer.progress.step % every == 0
