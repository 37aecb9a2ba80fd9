from __future__ import annotations

from pathlib import Path

import pytest
from ranks import ALONE, copied, differing, run_ranks, tiny_run, tiny_trainer

from phalanx.checkpointing import directory
from phalanx.events.records import Evaluated, Event, Finished, Saved, Step, Stopped
from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.training.step_totals import PAUSE

SETTINGS = ("train.steps=3", "train.eval_every=2", "train.eval_sequences=12", "train.micro_batch=1", "data.eval_fraction=0.4")


def told_meanwhile(mesh: Mesh, directory: Path, rank: int, pause: bool, *overrides: str) -> tuple[list[Event], int, int]:
    """One rank is told to end in the evaluation after step 2: what happens, how many forwards that evaluation made, what was heard."""
    trainer = tiny_trainer(mesh, tiny_run(*SETTINGS, *overrides), directory)
    forwards: list[int] = []
    measure = trainer.stepper.measure

    def counted(*args: object) -> object:
        forwards.append(trainer.progress.step)
        if mesh.rank == rank and len(forwards) == 2:
            trainer.pause() if pause else trainer.stop("SIGTERM")
        return measure(*args)  # type: ignore[arg-type]

    trainer.stepper.measure = counted  # type: ignore[method-assign, assignment]
    told = list(trainer.events())
    assert all(part.training for part in trainer.sharded.parts)
    return told, len(forwards), trainer.stop_signal.agreed


@pytest.mark.parametrize("layout", [Layout(data=2), Layout(data=1, pipeline=2)])
def test_ranks_leave_an_evaluation_together_when_one_is_told_to_stop(layout: Layout, tmp_path: Path) -> None:
    results = run_ranks(told_meanwhile, 2, tmp_path, 1, False, layout=layout)
    whole = 12 // layout.replicas
    for told, forwards, _ in results:
        assert [type(event) for event in told] == [Step, Step, Saved, Stopped]
        assert 2 <= forwards <= 4 < whole
    assert results[0][1] == results[1][1]
    trainer = tiny_trainer(ALONE, tiny_run(*SETTINGS), tmp_path)
    trainer.restore()
    after = [event for event in trainer.events() if not isinstance(event, Saved)]
    assert [(type(event), event.step) for event in after] == [(Step, 3), (Evaluated, 3), (Finished, 3)]  # type: ignore[attr-defined]


def test_a_pause_during_an_evaluation_does_not_save(tmp_path: Path) -> None:
    for told, _, heard in run_ranks(told_meanwhile, 2, tmp_path, 0, True):
        assert [type(event) for event in told] == [Step, Step] and heard == PAUSE
    assert not directory.list_checkpoints(tmp_path)


def test_a_stop_during_the_last_evaluation_finishes_the_run(tmp_path: Path) -> None:
    told, _, _ = told_meanwhile(ALONE, tmp_path, 0, False, "train.steps=2")
    assert [type(event) for event in told] == [Step, Step, Saved, Finished]


def test_an_evaluation_changes_no_state(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run(*SETTINGS), tmp_path)
    trainer.step()
    before = copied(trainer.tensors())
    assert trainer.evaluate() is not None and not trainer.stop_signal.agreed
    assert differing(before, trainer.tensors()) == []
    trainer.close()
