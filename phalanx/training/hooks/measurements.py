"""Hooks that measure a rank's steps: the heartbeat of every step, and in a few early steps of a launch its messages and memory
(`StepAccounting`) and times (`StepTiming`), which `phalanx plan --compare` shows next to what the plan promised."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from phalanx import accelerator
from phalanx.events.heartbeat import Heartbeat, Phase
from phalanx.events.records import Event, Step, StepAccounted, StepSkipped, StepTimed
from phalanx.observe.comm_timer import COMM_TIMER, Clock, replaced, span
from phalanx.observe.counters import MemoryCounter, TrafficCounter, count_flops
from phalanx.parallel.sharded_model import ShardedModel
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run
from phalanx.training.build import TrainState
from phalanx.training.hooks import StepContext, StepHook
from phalanx.training.step_totals import Outcome

_ACCOUNTED = 2
"""The step of a launch that is accounted: in the first one, many things are done for the first and only time."""
_TIMED = (3, 4, 5)
"""Steps of a launch that are timed. They are several, so that a reader can drop one that something interrupted."""


class HeartbeatHook(StepHook):
    """Writes to the heartbeat page what this rank is doing, and how long the last step kept it busy."""

    def __init__(self, heartbeat: Heartbeat):
        self._heartbeat = heartbeat
        self._started = 0.0

    def on_phase(self, phase: Phase) -> None:
        self._heartbeat.enter(phase)

    def before_batch(self, step: int) -> None:
        self._started = time.perf_counter()
        COMM_TIMER.take()  # waits between steps do not count
        self._heartbeat.enter("data")

    def before_forward(self, context: StepContext) -> None:
        self._heartbeat.enter("computing")

    def on_update(self, step: int) -> None:
        self._heartbeat.enter("updating")

    def on_step_taken(self, step: int, outcome: Outcome) -> None:
        seconds = time.perf_counter() - self._started
        self._heartbeat.stepped(step, seconds, max(seconds - COMM_TIMER.take(), 0.0))

    def before_evaluate(self, step: int) -> None:
        self._heartbeat.enter("evaluating")


class _Measurement(StepHook):
    """Measures some of the first steps of a launch."""

    def __init__(self) -> None:
        self._steps = 0
        self._record: Event | None = None

    def before_batch(self, step: int) -> None:
        self._steps += 1

    def take_measurement(self) -> Event | None:
        record, self._record = self._record, None
        return record


class StepAccounting(_Measurement):
    """Counts bytes sent, memory and FLOPs of one step of a launch.

    Tracing every operation would break the graphs of compiled blocks: of a run with such blocks it reports memory alone, from the allocator of
    the device, and nothing on CPUs, which have none.
    """

    def __init__(self, run: Run, state: TrainState):
        super().__init__()
        self._state, self._compiles = state, bool(run.memory.compile)
        self._is_pending = not self._compiles or accelerator.of(state.sharded.mesh.device).asynchronous

    @contextmanager
    def around_compute(self, step: int) -> Iterator[None]:
        if not self._is_pending or self._steps != _ACCOUNTED:
            yield
            return
        self._is_pending = False  # a retry of the step is not counted
        model = self._state.sharded
        tensors = (state.tensor for state in self._state.tensors().values() if isinstance(state.tensor, Tensor))
        sent: dict[str, dict[str, int]] = {}
        flops: dict[str, int] = {}
        with ExitStack() as stack:
            live = stack.enter_context(MemoryCounter(tensors, model.mesh.device))
            if self._compiles:
                yield
            else:
                traffic = stack.enter_context(TrafficCounter())
                counter = stack.enter_context(count_flops(model.parts))
                yield
                sent, flops = traffic.sent, {"all": counter.flops, "repeated": counter.repeated}
        placement = self._state.placement()
        self._record = StepAccounted(
            step=step,
            rank=placement.rank,
            sent=sent,
            memory={
                "parameters": placement.parameters,
                "gradients": placement.gradients,
                "optimizer": placement.optimizer,
                "activations": live.peak,
            },
            flops=flops,
        )


class StepTiming(_Measurement):
    """Times a few steps by part: compute, waits by technique, optimizer, data loading.

    The program marks the parts of a step with `span`, and every wait between ranks with its technique; both do nothing without a
    clock. A profiler would see every kernel, but doubles the time of a small step and sees no waits on CPUs.
    """

    def __init__(self, run: Run, plan: Plan, model: ShardedModel):
        super().__init__()
        layout, self._model = plan.layout, model
        # Compiled blocks do not report what they wait for, so nothing is timed where ranks communicate inside of blocks.
        inside_blocks = layout.tensor * layout.context * layout.expert * layout.expert_tensor > 1
        self.enabled = not (run.memory.compile and inside_blocks)
        self._clock: Clock | None = None

    @contextmanager
    def around_step(self, step: int) -> Iterator[None]:
        if not self.enabled or self._steps + 1 not in _TIMED:  # the batch comes later
            yield
            return
        clock = Clock(self._model.mesh.device)
        with ExitStack() as stack:
            for owner, name in self._model.engine.waits():
                stack.enter_context(replaced(owner, name, _timed(getattr(owner, name))))
            stack.enter_context(replaced(COMM_TIMER, "clock", clock))
            stack.enter_context(clock)
            yield
        self._clock = clock

    def on_step_end(self, record: Step | StepSkipped) -> None:
        clock, self._clock = self._clock, None
        if clock is not None and isinstance(record, Step):
            self._record = StepTimed(step=record.step, rank=self._model.mesh.rank, seconds=clock.seconds, parts=clock.parts)


def _timed(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method in which FSDP2 waits for its messages, counted as data parallelism."""

    @wraps(method)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with span("data"):
            return method(*args, **kwargs)

    return timed
