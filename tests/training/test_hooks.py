"""The hook protocol by itself: hooks are called in order and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from ranks import ALONE, copied, differing, tiny_run, tiny_trainer

from phalanx.events.records import Event, Step, StepSkipped, Warned
from phalanx.training.hooks import Hooks, StepContext, StepHook, StepRefused
from phalanx.training.step_totals import PAUSE, STOP, StopSignal


class Recorder(StepHook):
    """Records the calls of a step."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        self.calls.append(f"begin {step}")
        yield
        self.calls.append(f"end {step}")

    def before_batch(self, step: int) -> None:
        self.calls.append("before_batch")

    @contextmanager
    def around_compute(self, step: int) -> Iterator[None]:
        self.calls.append("begin compute")
        yield
        self.calls.append("end compute")

    def before_forward(self, context: StepContext) -> None:
        self.calls.append("before_forward")

    def before_reduce(self, step: int, busy_seconds: float) -> None:
        self.calls.append("before_reduce")

    def after_backward(self, context: StepContext) -> None:
        assert all(param.gradient is not None for param in context.model.owned)
        self.calls.append("after_backward")

    def before_update(self, context: StepContext) -> None:
        assert context.finite is not None and bool(context.finite)
        self.calls.append("before_update")

    def on_update(self, step: int) -> None:
        self.calls.append("on_update")

    def after_update(self, step: int) -> None:
        self.calls.append("after_update")

    def on_step_taken(self, step: int, outcome: Any) -> None:
        self.calls.append("on_step_taken")

    def on_step_end(self, record: Step | StepSkipped) -> None:
        self.calls.append("on_step_end")


ORDER = [
    "begin 1", "before_batch", "begin compute", "before_forward", "before_reduce", "after_backward", "before_update",
    "on_update", "after_update", "end compute", "on_step_taken", "end 1", "on_step_end",
]  # fmt: skip


def test_hooks_of_a_step_are_called_in_the_documented_order(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run(), tmp_path)
    recorder = Recorder()
    trainer.hooks.add(recorder)
    trainer.step()
    assert recorder.calls == ORDER
    trainer.close()


class Refuser(StepHook):
    def before_update(self, context: StepContext) -> None:
        raise Refused("refused")


class Refused(StepRefused):
    events = (Warned(message="why"),)


def test_a_refused_step_changes_nothing_and_reports_its_events(tmp_path: Path) -> None:
    trainer = tiny_trainer(ALONE, tiny_run(), tmp_path)
    trainer.step()
    before = copied(trainer.tensors())
    refuser = Refuser()
    reported: list[Event] = []
    with trainer.hooks.with_hook(refuser), pytest.raises(Refused, match="refused"):
        for event in trainer.train():
            reported.append(event)
    assert [event.message for event in reported if isinstance(event, Warned)] == ["why"] and len(reported) == 1
    assert differing(before, trainer.tensors()) == []
    assert trainer.stepper.pending is None and not trainer.stepper.update_incomplete
    assert trainer.progress.step == 1 and trainer.step() is not None, "and the step can be taken again"
    trainer.close()


def test_a_temporary_hook_is_removed_after_an_error() -> None:
    hooks, recorder = Hooks(), Recorder()
    with pytest.raises(ZeroDivisionError), hooks.with_hook(recorder):
        hooks.before_batch(1)
        raise ZeroDivisionError
    hooks.before_batch(2)
    assert recorder.calls == ["before_batch"]


def test_stop_signal_prefers_a_stop_to_a_pause_and_agrees_with_other_ranks() -> None:
    signal = StopSignal()
    assert signal.requested() == 0
    signal.pause()
    assert signal.requested() == PAUSE and signal.paused
    signal.stop("SIGTERM")
    assert signal.requested() == STOP and signal.reason == "SIGTERM"
    other = StopSignal()
    other.pause()
    other.agree(STOP)
    assert (other.agreed, other.paused, other.reason) == (STOP, False, "another rank was asked to stop")
    third = StopSignal()
    third.agree(PAUSE)
    assert (third.agreed, third.paused, third.reason) == (PAUSE, True, "asked to stop")
