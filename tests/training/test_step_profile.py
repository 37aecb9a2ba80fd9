"""The hook that records steps of a running job: exactly those, and never at the expense of the training."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import ALONE, copied, differing, tiny_run, tiny_trainer

from phalanx.training.hooks.step_profile import StepProfile
from phalanx.training.trainer import Trainer


class Notes:
    """A recorder that notes what it is told, and fails where it shall."""

    suffix = ".txt"

    def __init__(self, fails: str = ""):
        self.calls: list[str] = []
        self._fails = fails

    def _note(self, call: str) -> None:
        self.calls.append(call)
        if call == self._fails:
            raise OSError(f"{call} failed")

    def prepare(self) -> None:
        self._note("prepare")

    def start(self) -> None:
        self._note("start")

    def stop(self) -> None:
        self._note("stop")

    def write(self, path: Path, steps: int) -> dict[str, float]:
        raise NotImplementedError


def take(trainer: Trainer, notes: Notes, steps: int) -> None:
    for _ in range(steps):
        record = trainer.step()
        assert record is not None
        notes.calls.append(str(record.step))


def test_the_named_steps_are_recorded_after_one_to_warm_up(tmp_path: Path) -> None:
    trainer, notes = tiny_trainer(ALONE, tiny_run(), tmp_path), Notes()
    hook = StepProfile(notes, first=3, steps=2)
    trainer.hooks.add(hook)
    assert not trainer.hooks.all_allow_ahead
    take(trainer, notes, 5)
    assert notes.calls == ["1", "prepare", "2", "start", "3", "stop", "4", "5"]
    assert hook.done and not hook.problem and (hook.first, hook.taken) == (3, 2) and hook.seconds > 0
    trainer.hooks.remove(hook)
    assert trainer.hooks.all_allow_ahead
    trainer.close()


def test_a_late_order_begins_with_the_next_step(tmp_path: Path) -> None:
    trainer, notes = tiny_trainer(ALONE, tiny_run(), tmp_path), Notes()
    take(trainer, notes, 2)
    hook = StepProfile(notes, first=2, steps=1)
    trainer.hooks.add(hook)
    take(trainer, notes, 1)
    assert notes.calls == ["1", "2", "prepare", "start", "stop", "3"] and hook.first == 3 and hook.done
    trainer.close()


@pytest.mark.parametrize("fails", ["prepare", "start", "stop"])
def test_an_error_is_kept_and_training_goes_on(fails: str, tmp_path: Path) -> None:
    plain = tiny_trainer(ALONE, tiny_run(), tmp_path / "plain")
    trainer, notes = tiny_trainer(ALONE, tiny_run(), tmp_path / "observed"), Notes(fails)
    hook = StepProfile(notes, first=2, steps=1)
    trainer.hooks.add(hook)
    take(trainer, notes, 4)
    take(plain, Notes(), 4)
    assert hook.done and hook.problem == f"OSError: {fails} failed"
    assert notes.calls.count("start") <= 1 and notes.calls[-2:] == ["3", "4"]
    assert differing(copied(plain.tensors()), trainer.tensors()) == []
    plain.close()
    trainer.close()


def test_an_abandoned_recording_is_stopped_once(tmp_path: Path) -> None:
    trainer, notes = tiny_trainer(ALONE, tiny_run(), tmp_path), Notes()
    hook = StepProfile(notes, first=1, steps=5)
    trainer.hooks.add(hook)
    take(trainer, notes, 2)
    hook.abandon()
    hook.abandon()
    take(trainer, notes, 1)
    assert notes.calls == ["prepare", "start", "1", "2", "stop", "3"]
    trainer.close()
