"""What a rank has when its generation is over, and how it leaves that to the next. Called by the rank's program, after whatever
interrupted training; nothing here waits for another rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpointing.replicas.memory_checkpoint import HandoffShare, write_handoff
from phalanx.training.step_totals import SPIKE
from phalanx.training.trainer import Trainer


@dataclass(frozen=True, slots=True)
class SurvivorState:
    """Of one survivor, as it tells the supervisor."""

    step: int | None
    """Its state is that after this step; None: it has none, as it was being built or was interrupted in the middle of an update."""
    prepared: bool = False
    """It could apply the next step too, if others have."""
    divisor: float | None = None
    bad: float | None = None
    """What the last step was applied with, for those that could not."""
    rewinds: int = 0
    """How often the run has gone back: of two states, the one of the later course counts."""


def survivor_state(trainer: Trainer | None) -> SurvivorState:
    """Whatever state the trainer is in."""
    if trainer is None or not trainer.ready or trainer.stepper.update_incomplete:
        return SurvivorState(None)
    applied, rewinds = trainer.stepper.applied, len(trainer.progress.left_out)
    prepared = trainer.stepper.pending is not None
    if applied is None or applied.divisor is None or applied.verdict is None:
        return SurvivorState(trainer.progress.step, prepared, rewinds=rewinds)
    return SurvivorState(trainer.progress.step, prepared, float(applied.divisor), float(applied.verdict), rewinds)


def roll_forward(trainer: Trainer, divisor: float, bad: float) -> None:
    """Others have applied the step that this rank was about to."""
    trainer.stepper.roll_forward(trainer.optimizer, divisor, bad)
    trainer.progress.advance(trainer.run.batch, not bad, trainer.stepper.scale, bad == SPIKE)


def hand_off(trainer: Trainer, contributors: list[int]) -> bool:
    """Hand over this rank's share of the state, `contributors` being the ranks that have it; returns whether they have all of the
    tensors of this rank's pipeline rank."""
    mesh = trainer.mesh
    mesh.mark_lost(rank for rank in range(mesh.ranks) if rank not in contributors)
    tensors = trainer.tensors()
    if not all(mesh.covers(*piece.replicas.key) for piece in {piece.replicas: piece for piece in tensors.values()}.values()):
        return False
    assert mesh.place.holder is not None
    share = HandoffShare(
        mesh.place.generation, contributors.index(mesh.rank), len(contributors), mesh.stage, mesh.is_stage_leader
    )
    write_handoff(
        Path(mesh.place.holder), share, trainer.progress.step, tensors, trainer.checkpointer.contents(trainer.progress)
    )
    return True
