"""Asks a running job for something and follows the answer in its records. Used by `phalanx profile`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from phalanx.control.run_requests import MAX_STEPS, RunRequest, ask
from phalanx.events.log import EventReader, launch_events
from phalanx.events.records import (
    Event,
    Finished,
    Profiled,
    Recovered,
    RequestFailed,
    RequestStarted,
    RunStarted,
    Step,
    Stopped,
    WorkerFailed,
)
from phalanx.events.rundir import RunDir
from phalanx.spec.errors import RunError, RunFailed

_POLL = 0.1  # seconds between two looks at the records
_TAKEN = 20.0  # seconds in which a running job takes a request
_PATIENCE = 600.0  # seconds for an answer, and in addition
_STEP_PATIENCE = 40.0  # times the duration of the steps
_LAST_RECORDS = 1.0  # seconds in which the last records of a run that has ended arrive


def check_request(rundir: RunDir, request: RunRequest) -> None:
    """Raise RunError if the job cannot carry out a request, as far as its files tell."""
    where = rundir.path
    if not rundir.events_file.is_file():
        raise RunError(f"{where} holds no run: name a run directory, such as runs/NAME.")
    if not 1 <= request.steps <= MAX_STEPS:
        raise RunError(f"--steps {request.steps}: ask for 1 to {MAX_STEPS} steps.")
    if rundir.job_file.is_file():
        raise RunError(
            f"{where} is the record of a Kubernetes job, which takes no requests from this machine: run the same command in its first pod "
            "(`kubectl exec`), with the run directory on the shared volume."
        )
    if not rundir.is_running:
        raise RunError(f"{where} is not running: only a running job can be asked.")
    if rundir.launch_id is None:
        raise RunError(
            f"{where} is in use by a process that takes no requests: one that torchrun has started, that still prepares the run, or that works "
            "on its checkpoints."
        )
    events = launch_events(rundir.events_file)
    ranks = next((event.ranks for event in reversed(events) if isinstance(event, Recovered | RunStarted)), 0)
    if any(isinstance(event, RunStarted) and event.program for event in events):
        raise RunError(f"{where} runs a program of its own (`phalanx launch`): Phalanx does not know its steps.")
    missing = [rank for rank in request.ranks or () if rank not in range(ranks)]
    if missing:
        raise RunError(f"--ranks: there is no rank {missing[0]}: the run has ranks 0 to {ranks - 1}.")


def ask_run(rundir: RunDir, request: RunRequest) -> Iterator[Event]:
    """Ask, and yield the records that answer, and every step, until all ranks have answered.

    Raises RunError if nothing is done about the request, and RunFailed if a rank could not carry it out.
    """
    reader = EventReader(rundir.events_file, offset=rundir.events_file.stat().st_size)
    if not ask(rundir, request):
        raise RunError(f"{rundir.path}: another request waits for this run already: ask again in a moment.")
    answer = _Answer(rundir, request)
    try:
        while not answer.complete:
            over = not rundir.is_running
            if over:
                time.sleep(_LAST_RECORDS)
            for event in reader.new():
                answer.add(event)
                if isinstance(event, Step) or getattr(event, "request", None) == request.id:
                    yield event
            answer.check(over=over)
            time.sleep(_POLL)
    finally:
        with contextlib.suppress(OSError):
            if answer.started is None and f'"{request.id}"' in rundir.ask_file.read_text():
                rundir.ask_file.unlink()  # nobody has taken it
    answer.conclude()


class _Answer:
    """What is known about a request."""

    def __init__(self, rundir: RunDir, request: RunRequest):
        self._where, self._id = rundir.path, request.id
        self.started: RequestStarted | None = None
        self._left: set[int] = set()
        self._problems: list[RequestFailed] = []
        self._ended: Event | None = None
        self._step_seconds = 0.0
        self._since = time.monotonic()

    @property
    def complete(self) -> bool:
        return any(problem.rank is None for problem in self._problems) or (self.started is not None and not self._left)

    def add(self, event: Event) -> None:
        match event:
            case Step():
                self._step_seconds = max(self._step_seconds, event.seconds)
            case RequestStarted() if event.request == self._id:
                self.started, self._left, self._since = event, set(event.ranks), time.monotonic()
            case Profiled() if event.request == self._id:
                self._left.discard(event.rank)
            case RequestFailed() if event.request == self._id:
                self._problems.append(event)
                if event.rank is not None:
                    self._left.discard(event.rank)
            case Finished() | Stopped() | WorkerFailed():
                self._ended = event

    def check(self, *, over: bool) -> None:
        """Raise an error if there will be no answer."""
        if self.complete:
            return
        waited = time.monotonic() - self._since
        if self._ended is not None or over:
            how = "has failed" if isinstance(self._ended, WorkerFailed) else "has ended"
            raise RunFailed(f"{self._where} {how} before the steps that were asked for.")
        if self.started is None and waited > _TAKEN:
            raise RunError(
                f"{self._where} has not taken the request within {_TAKEN:.0f} s: its ranks are still starting, or recover from a failure. Look at "
                f"`phalanx status {self._where}`, and ask again."
            )
        if self.started is not None:
            patience = _PATIENCE + _STEP_PATIENCE * (self.started.steps + 3) * self._step_seconds
            if waited > patience:
                ranks = ", ".join(map(str, sorted(self._left)))
                raise RunFailed(f"{self._where}: there is no answer of rank {ranks} within {patience:.0f} s.")

    def conclude(self) -> None:
        """Raise an error if a rank could not carry out the request."""
        if not self._problems:
            return
        reasons = [f"{'' if each.rank is None else f'rank {each.rank}: '}{each.reason}" for each in self._problems]
        text = f"{self._where}: {'; '.join(reasons)}."
        raise RunError(text) if self.started is None else RunFailed(text)
