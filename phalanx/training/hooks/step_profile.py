"""The hook that records some steps of a rank while the job runs (`phalanx profile`). `worker/rank_requests` adds it for these steps alone.

Training never fails because of it: what goes wrong is kept as `problem`, and the hook is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress

from torch.profiler import record_function

from phalanx.events.records import Step, StepSkipped
from phalanx.observe.step_recorders import STEP_MARK, Recorder
from phalanx.training.hooks import StepHook


class StepProfile(StepHook):
    """Records steps from `first` on; from the next one on, if that has begun already."""

    allows_ahead = False  # else part of a step is computed before it begins, and part of the next one at its end

    def __init__(self, recorder: Recorder, first: int, steps: int):
        self.recorder, self.steps = recorder, steps
        self.first = first
        """The first recorded step, once there is one."""
        self.taken, self.seconds = 0, 0.0
        """Recorded steps, and their duration."""
        self.problem = ""
        self.done = False
        self._prepared = self._recording = False
        self._last = 0.0

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        self._attempt(lambda: self._begin(step))
        began = time.perf_counter()
        with record_function(f"{STEP_MARK}{step}") if self._recording else nullcontext():
            yield
        self._last = time.perf_counter() - began

    def on_step_end(self, record: Step | StepSkipped) -> None:
        if self._recording:
            self.taken, self.seconds = self.taken + 1, self.seconds + self._last
            if self.taken == self.steps:
                self._attempt(self._end)

    def _begin(self, step: int) -> None:
        if self.done or self._recording:
            return
        if step >= self.first - 1 and not self._prepared:
            self.recorder.prepare()  # which takes long the first time: not in a step that is recorded
            self._prepared = True
        if step >= self.first:
            self.recorder.start()
            self._recording, self.first = True, step

    def _end(self) -> None:
        self._recording = self._prepared = False
        self.recorder.stop()
        self.done = True

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            self.problem, self.done = f"{type(error).__name__}: {error}", True
            self.abandon()

    def abandon(self) -> None:
        """End without a result."""
        if self._prepared or self._recording:
            self._prepared = self._recording = False
            with suppress(Exception):
                self.recorder.stop()
        self.done = True
