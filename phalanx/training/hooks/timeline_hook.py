"""Records the timeline of a rank (`watch.timeline`): the phases of every step, the parts of its computation, and its collectives. Switches
`observe/timeline` on and hands each step to the writer of `events/timeline_files`."""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from phalanx.checkpointing.replicas.shm_slots import machine_id
from phalanx.events.heartbeat import Phase
from phalanx.events.records import Step, StepSkipped
from phalanx.events.timeline_files import Author, CallGroup, RankStep, TimelineWriter
from phalanx.observe.comm_timer import COMM_TIMER
from phalanx.observe.timeline import StepTimes, Timeline
from phalanx.parallel.mesh import Mesh
from phalanx.parallel.pipeline.executor import PipelineObserver, RankAction
from phalanx.training.hooks import StepContext, StepHook
from phalanx.training.step import StepObserver, StepPart, Stepper

T = TypeVar("T")

_ON_DEVICE = ("compute", "reduce", "optimizer")
"""Phases in which the device works; the others are timed on the host."""
_IN_COMPUTE = ("forward", "backward")


class TimelineHook(StepHook):
    """Stands before other hooks, so that what they do counts as the phase in which they do it."""

    def __init__(self, run_dir: Path, mesh: Mesh, keep: int):
        """`keep`: steps that remain in the files at least."""
        place = mesh.place
        launch = hashlib.blake2s(repr((place.token, place.store)).encode(), digest_size=6).hexdigest()
        author = Author(
            rank=mesh.rank,
            ranks=mesh.ranks,
            node=place.node,
            host=socket.gethostname(),
            boot=machine_id(),
            generation=place.generation,
            launch=launch,
            wall=time.time(),
            monotonic=time.perf_counter(),
        )
        self._writer = TimelineWriter(run_dir, author, keep)
        self.timeline = Timeline(mesh.device, lambda name, use, ranks: self._writer.add_group(name, CallGroup(use, ranks)))
        self._phase = "other"
        self._host, self._device = time.perf_counter(), self.timeline.stamp()
        """When the phase began."""
        self._began = time.perf_counter()
        self._steps: list[tuple[int, float, float]] = []
        """Number, beginning and end of steps whose times are not read yet."""
        COMM_TIMER.timeline = self.timeline

    def attach(self, stepper: Stepper) -> None:
        """Sees the parts of the steps of this stepper."""
        stepper.observer = _PartObserver(self)
        if stepper.pipeline is not None:
            stepper.pipeline.observer = _ActionObserver(self.timeline)

    @property
    def phase(self) -> str:
        return self._phase

    def enter(self, phase: str) -> None:
        """Ends the phase and begins another one."""
        host = time.perf_counter()
        device = self.timeline.stamp(host) if phase in _ON_DEVICE or self._phase in _ON_DEVICE else None
        if self._phase in _ON_DEVICE:
            self.timeline.add(self._device, device, "phase", self._phase)
        else:
            self.timeline.add(self._host, host, "phase", self._phase)
        self._phase, self._host, self._device = phase, host, device
        self.timeline.part_end = device

    def on_phase(self, phase: Phase) -> None:
        self.enter(phase)

    def before_batch(self, step: int) -> None:
        self.enter("loading")
        self._began = self._host

    def before_forward(self, context: StepContext) -> None:
        self.enter("compute")

    def before_evaluate(self, step: int) -> None:
        self.enter("evaluating")

    def before_save(self, step: int) -> None:
        self.enter("saving")

    def on_step_end(self, record: Step | StepSkipped) -> None:
        self.enter("other")
        self._steps.append((record.step, self._began, self._host))
        self._write(self.timeline.end_step())

    def close(self) -> None:
        """Writes what is left, and records no more."""
        if COMM_TIMER.timeline is self.timeline:
            COMM_TIMER.timeline = None
        if self._steps:
            self._write(self.timeline.drain())
        self._writer.close()

    def _write(self, times: StepTimes | None) -> None:
        if times is None:
            return
        number, begin, end = self._steps.pop(0)

        def step() -> RankStep:
            spans, calls = self.timeline.since(begin, times)
            return RankStep(step=number, begin=begin, seconds=end - begin, spans=spans, calls=calls)

        self._writer.add(step)


class _PartObserver(StepObserver):
    """Records the parts of a step: forward and backward of each micro-batch, the reduction of gradients, the optimizer."""

    def __init__(self, hook: TimelineHook):
        self._hook = hook

    def run(self, part: StepPart, function: Callable[..., T], *args: Any, micro_batch: int | None = None) -> T:
        before, phase = self._hook.phase, "compute" if part in _IN_COMPUTE else part
        if phase == before:
            timeline, name = self._hook.timeline, part if micro_batch is None else f"{part} {micro_batch}"
            return timeline.run(name, function, *args, after=timeline.part_end)
        if phase not in _ON_DEVICE:
            return function(*args)
        self._hook.enter(phase)
        try:
            if micro_batch is None:  # the phase is the part
                return function(*args)
            timeline = self._hook.timeline
            return timeline.run(f"{part} {micro_batch}", function, *args, after=timeline.part_end)
        finally:
            self._hook.enter("other")


class _ActionObserver(PipelineObserver):
    def __init__(self, timeline: Timeline):
        self._timeline = timeline

    def action(self, action: RankAction, run: Callable[[], Tensor | None]) -> Tensor | None:
        return self._timeline.run(f"{action.stage}{action.kind}{action.micro_batch}", run)
