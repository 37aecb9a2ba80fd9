"""Carries out requests to the running job on one rank, such as `phalanx profile`. Used by `worker/rank`: the control thread hands a request over, the
main thread takes it up between two steps, and a thread of its own writes the files."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import torch

from phalanx.control.run_requests import MEMORY, PROFILE, Observe, Observed
from phalanx.events.records import Event, Profiled
from phalanx.events.rundir import RunDir
from phalanx.observe.step_recorders import Recorder, TraceRecorder, memory_recorder
from phalanx.training.hooks.step_profile import StepProfile
from phalanx.training.run_loop import RunLoop

_WRITE_SECONDS = 120.0  # for files that are not complete when the run ends


class RankRequests:
    """The requests to one rank; one at a time."""

    def __init__(self, rundir: RunDir, emit: Callable[[Event], None], report: Callable[[Observed], None]):
        self._rundir, self._emit, self._report = rundir, emit, report
        self._asked: Observe | None = None
        """Set by the control thread; the main thread takes it."""
        self._order: Observe | None = None
        self._hook: StepProfile | None = None
        self._writer: threading.Thread | None = None

    def ask(self, order: Observe) -> None:
        """Called by the control thread."""
        self._asked = order

    def between_steps(self, trainer: RunLoop) -> None:
        """Take up a request, and end one whose steps are taken. While nobody asks, this does nothing."""
        if self._asked is not None:
            order, self._asked = self._asked, None
            self._begin(order, trainer)
        if self._hook is not None and self._hook.done:
            self._end(trainer)

    def _begin(self, order: Observe, trainer: RunLoop) -> None:
        if self._hook is not None:
            self._answer(order, "another request is under way on this rank")
            return
        try:
            hook = StepProfile(_recorder(order.request.kind, trainer.mesh.device), order.first, order.request.steps)
        except Exception as error:
            self._answer(order, f"{type(error).__name__}: {error}")
            return
        trainer.hooks.add(hook)
        self._order, self._hook = order, hook

    def _end(self, trainer: RunLoop) -> None:
        assert self._hook is not None and self._order is not None
        hook, order = self._hook, self._order
        self._hook = self._order = None
        trainer.hooks.remove(hook)
        if hook.problem:
            self._answer(order, hook.problem)
            return
        self._join()
        self._writer = threading.Thread(target=self._write, args=(order, hook, trainer.mesh.rank), name="profile", daemon=True)
        self._writer.start()

    def _write(self, order: Observe, hook: StepProfile, rank: int) -> None:
        problem = ""
        try:
            folder = self._rundir.profiles / f"step-{order.first:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{rank}{hook.recorder.suffix}"
            top = hook.recorder.write(path, hook.taken)
            self._emit(
                Profiled(
                    request=order.request.id,
                    what=order.request.kind,
                    step=hook.first,
                    steps=hook.taken,
                    rank=rank,
                    host=socket.gethostname(),
                    path=str(path.relative_to(self._rundir.path)),
                    bytes=path.stat().st_size,
                    seconds=hook.seconds / hook.taken,
                    top=top,
                )
            )
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        self._answer(order, problem)

    def _answer(self, order: Observe, problem: str = "") -> None:
        self._report(Observed(generation=order.generation, request=order.request.id, problem=problem))

    def finish(self, trainer: RunLoop) -> None:
        """The training of this rank has ended."""
        self.between_steps(trainer)
        if self._hook is not None and self._order is not None:
            taken, steps = self._hook.taken, self._order.request.steps
            self._hook.abandon()
            self._answer(self._order, f"the ranks have stopped after {taken} of the {steps} steps")
        self._hook = self._order = None
        self._join()

    def abandon(self) -> None:
        """The generation is over."""
        if self._hook is not None:
            self._hook.abandon()
        self._asked = self._order = self._hook = None

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join(_WRITE_SECONDS)
            self._writer = None


def _recorder(kind: str, device: torch.device) -> Recorder:
    """What carries out a request of this kind."""
    if kind == PROFILE:
        return TraceRecorder(device)
    if kind == MEMORY:
        return memory_recorder(device)
    raise ValueError(f'this version does not know the request "{kind}"')
