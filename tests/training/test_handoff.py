"""What survivors have when a generation ends in the middle of a step, and what they leave to the next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer
from replica_nodes import TOKEN, newest_state, nodes
from torch import Tensor

from phalanx.checkpointing.replicas import replica_index
from phalanx.optim.optimizer import Optimizer
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run
from phalanx.training.step import Pending
from phalanx.training.trainer import Trainer
from phalanx.worker.rank import hand_off, roll_forward, survivor_state


class Lost(BaseException):
    """As when the generation is over."""


def lost(pending: Pending, optimizer: Optimizer) -> None:
    raise Lost


def after(mesh: Mesh, run: Run, folder: Path, steps: int) -> Trainer:
    trainer = tiny_trainer(mesh, run, folder)
    trainer.restore()
    for _ in range(steps):
        trainer.step()
    return trainer


def interrupt_before_update(trainer: Trainer) -> None:
    trainer.stepper._apply = lost  # type: ignore[method-assign]
    with pytest.raises(Lost):
        trainer.step()
    del trainer.stepper._apply


def interrupt_in_norm(trainer: Trainer) -> None:
    """This rank's part of it has gone out; the result never comes back."""
    kept = ShardedModel.norm

    def norm(placed: ShardedModel) -> Tensor:
        kept(placed)
        raise Lost

    ShardedModel.norm = norm  # type: ignore[method-assign]
    with pytest.raises(Lost):
        trainer.step()
    ShardedModel.norm = kept  # type: ignore[method-assign]


def interrupt_after_update(trainer: Trainer) -> None:
    """Those that share weights would give each other the new ones now."""

    def settle() -> None:
        raise Lost

    trainer._share_update = settle  # type: ignore[method-assign]
    with pytest.raises(Lost):
        trainer.step()
    del trainer._share_update


def rolled(mesh: Mesh, folder: Path) -> tuple[list[str], float, float]:
    """Of the third step: rank 1 is prepared, and in the norm where ranks sum it; rank 2 comes up to the update; the others apply it."""
    run = tiny_run("train.clip=0.05")  # so that the norm counts
    undisturbed = after(mesh, run, folder / "undisturbed", 3)
    trainer = after(mesh, run, folder / "disturbed", 2)
    if mesh.rank == 1 and not trainer.stepper._norm_is_local:
        interrupt_in_norm(trainer)
    elif mesh.rank in (1, 2):
        interrupt_before_update(trainer)
    else:
        interrupt_after_update(trainer)
    said = survivor_state(trainer)
    assert (said.step, said.prepared) == ((2, True) if mesh.rank in (1, 2) else (3, False))
    ahead = mesh.gather_objects((said.divisor, said.bad))[0]
    if mesh.rank in (1, 2):
        roll_forward(trainer, *ahead)
    said = survivor_state(trainer)
    assert (said.step, said.prepared, trainer.progress.samples) == (3, False, 3 * run.batch)
    differ = differing(undisturbed.tensors(), trainer.tensors())
    trainer.sharded.engine.updated()
    losses = [one.step() for one in (undisturbed, trainer)]
    undisturbed.close()
    trainer.close()
    return differ, *(one.loss for one in losses if one is not None)


@pytest.mark.parametrize("layout", [Layout(data=4), Layout(shard=4, zero=2), Layout(pipeline=2, tensor=2)])
def test_a_rank_with_a_pending_step_rolls_forward_to_the_ranks_that_applied_it(tmp_path: Path, layout: Layout) -> None:
    for differ, undisturbed, disturbed in run_ranks(rolled, 4, tmp_path, layout=layout):
        assert differ == []
        assert disturbed == undisturbed, "the step after it"


def test_roll_forward_skips_a_step_that_others_skipped(tmp_path: Path) -> None:
    trainer = after(ALONE, tiny_run(), tmp_path, 2)
    before = copied(trainer.tensors())
    interrupt_before_update(trainer)
    roll_forward(trainer, 1.0, 1.0)
    assert differing(before, trainer.tensors()) == []
    assert (trainer.progress.step, trainer.progress.skipped_in_a_row) == (3, 1)
    trainer.close()


def test_an_interrupted_update_leaves_a_state_of_no_step(tmp_path: Path) -> None:
    assert survivor_state(None).step is None
    trainer = tiny_trainer(ALONE, tiny_run(), tmp_path)
    assert survivor_state(trainer).step is None, "it has drawn nothing and restored nothing"
    trainer.restore()
    assert survivor_state(trainer).step == 0
    trainer.step()
    kept = trainer.optimizer.step

    def halfway(*given: Any) -> None:
        kept(*given)
        raise Lost

    trainer.optimizer.step = halfway  # type: ignore[method-assign]
    with pytest.raises(Lost):
        trainer.step()
    assert survivor_state(trainer).step is None
    trainer.close()


def hand(mesh: Mesh, folder: Path, folders: Sequence[Path], dead: Sequence[int]) -> bool | None:
    """Three steps, saved on disk; then these ranks are gone."""
    mesh = replace(mesh, place=replace(mesh.place, replica_folder=str(folders[mesh.rank % len(folders)]), generation=5))
    trainer = after(mesh, tiny_run(), folder, 3)
    trainer.save()
    found = None if mesh.rank in dead else hand_off(trainer, [rank for rank in range(mesh.ranks) if rank not in dead])
    trainer.close()
    return found


def restored(folder: Path, source: replica_index.MemoryLocation | None = None) -> dict[str, Tensor]:
    """By one rank, which has all of it."""
    trainer = tiny_trainer(ALONE, tiny_run(), folder)
    trainer.restore(source)
    assert trainer.progress.step == 3
    found = copied(trainer.tensors())
    trainer.close()
    return found


@pytest.mark.parametrize(
    ("layout", "dead"),
    [
        (Layout(data=4), (0, 1, 3)),
        (Layout(data=2, shard=2, zero=1), (1, 2)),
        (Layout(pipeline=2, data=2), (0, 3)),
    ],
)
def test_surviving_ranks_hand_off_the_whole_state(tmp_path: Path, layout: Layout, dead: tuple[int, ...]) -> None:
    with nodes(tmp_path, 2) as found:
        handed = run_ranks(hand, 4, tmp_path / "saved", [node.folder for node in found], dead, layout=layout)
        assert handed == [None if rank in dead else True for rank in range(4)]
        state = newest_state([node.address for node in found], TOKEN)
        assert state is not None
        assert (state.generation, state.step, state.ranks) == (5, 3, 4 - len(dead))
        handed_over = restored(tmp_path / "nothing", replica_index.MemoryLocation(state, TOKEN))
    assert differing(restored(tmp_path / "saved"), handed_over) == []


@pytest.mark.parametrize(("layout", "dead"), [(Layout(shard=2, zero=1), (1,)), (Layout(tensor=2), (0,))])
def test_survivors_without_the_whole_state_hand_off_nothing(tmp_path: Path, layout: Layout, dead: tuple[int]) -> None:
    nobody = [tmp_path / "no server is asked"]
    assert sorted(map(str, run_ranks(hand, 2, tmp_path / "saved", nobody, dead, layout=layout))) == ["False", "None"]
