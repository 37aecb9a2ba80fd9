"""Back to a good state after bad steps, and on without the data since. Called by the trainer, on all ranks together.

Checkpoints of the steps that were taken and are now no more must not be found by a resumption: the state gone back to is saved at
once, with the new position in the data, and only when that is complete are the later ones removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from phalanx.checkpointing.directory import DamagedCheckpoint
from phalanx.checkpointing.location import Location
from phalanx.events.records import CheckpointDamaged, Event, Rewound, Warned
from phalanx.spec.errors import RunFailed
from phalanx.training.saving import Saving
from phalanx.training.step_report import too_often_back

if TYPE_CHECKING:
    from phalanx.training.trainer import Trainer

_MOST = 3
"""Times that a run goes back to one step."""


def rewind(trainer: Trainer, saving: Saving) -> Iterator[Event]:
    """Afterwards no bad steps are counted; but where there is nothing to go back to, all is as it was."""
    before = trainer.progress
    yield from saving.settle()
    chosen, events = _restored(trainer, saving, before.last_good)
    yield from events
    if chosen is None:
        if before.skipped_in_a_row == trainer.run.resilience.rollback_after:
            yield Warned(
                message=f"There is no checkpoint of step {before.last_good} or before to go back to: bad steps are skipped."
            )
        return
    to = trainer.progress.step
    trainer.progress = after = before.back_to(trainer.progress)
    if sum(step == to for _, _, step in after.left_out) > _MOST:
        raise RunFailed(too_often_back(before, to, trainer.run))
    yield from trainer.save_now()
    saving.forget_after(to)
    first, beyond, _ = after.left_out[-1]
    yield Rewound(step=before.step, to_step=to, skipped_samples=[first, beyond], path=str(chosen))


def _restored(trainer: Trainer, saving: Saving, step: int) -> tuple[Location | None, list[Event]]:
    """The newest good state of this step or before, and where it was."""
    events: list[Event] = []
    damaged: set[str] = set()
    while (chosen := saving.newest_until(step, damaged)) is not None:
        try:
            return chosen, [*events, *trainer.restore(chosen)]
        except DamagedCheckpoint as problem:  # on all ranks alike; some tensors may have been read, and are read again
            damaged.add(problem.path)
            events.append(CheckpointDamaged(path=problem.path, reason=problem.reason))
    if damaged:
        raise RunFailed(
            f"No checkpoint of step {step} or before can be loaded, and the state has been overwritten by parts of {', '.join(sorted(damaged))}."
        )
    return None, events
