"""The state that a rank still holds when its generation is over, and its hand-off to the next generation. Called by `worker/rank` after
training was interrupted; nothing here waits for another rank."""

from __future__ import annotations

from pathlib import Path

from phalanx.checkpointing.replicas.memory_checkpoint import HandoffShare, write_handoff
from phalanx.control.protocol import SurvivorReport
from phalanx.training.step_totals import SPIKE
from phalanx.training.trainer import Trainer


def survivor_state(trainer: Trainer | None, generation: int = -1) -> SurvivorReport:
    """Which state the trainer holds, wherever it was interrupted: none while it is built or in the middle of an update."""
    if trainer is None or not trainer.ready or trainer.stepper.update_incomplete:
        return SurvivorReport(generation=generation, step=None)
    applied, divisor, bad = trainer.stepper.applied, None, None
    if applied is not None and applied.divisor is not None and applied.verdict is not None:
        divisor, bad = float(applied.divisor), float(applied.verdict)
    return SurvivorReport(
        generation=generation,
        step=trainer.progress.step,
        prepared=trainer.stepper.pending is not None,
        divisor=divisor,
        bad=bad,
        rewinds=len(trainer.progress.left_out),
    )


def roll_forward(trainer: Trainer, divisor: float, bad: float) -> None:
    """Apply the step that other ranks have applied and this rank had prepared."""
    trainer.stepper.roll_forward(trainer.optimizer, divisor, bad)
    trainer.progress.advance(trainer.run.batch, not bad, trainer.stepper.scale, bad == SPIKE)


def hand_off(trainer: Trainer, contributors: list[int]) -> bool:
    """Write this rank's share of the state into host memory. `contributors` are the ranks that hold the state.

    Returns False, and writes nothing, if the contributors lack tensors of this rank's pipeline rank.
    """
    mesh = trainer.mesh
    mesh.mark_lost(rank for rank in range(mesh.ranks) if rank not in contributors)
    tensors = trainer.tensors()
    if not all(
        mesh.covers(*tensor.replicas.key) for tensor in {tensor.replicas: tensor for tensor in tensors.values()}.values()
    ):
        return False
    assert mesh.place.replica_folder is not None
    share = HandoffShare(
        mesh.place.generation, contributors.index(mesh.rank), len(contributors), mesh.stage, mesh.is_stage_leader
    )
    write_handoff(
        Path(mesh.place.replica_folder), share, trainer.progress.step, tensors, trainer.checkpointer.metadata(trainer.progress)
    )
    return True
