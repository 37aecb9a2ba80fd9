"""Carries out requests to the running job (`control/run_requests`) for the controller: decides in which steps the ranks are observed, and publishes
their heartbeats while somebody watches them."""

from __future__ import annotations

import json
import math
import time
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from phalanx.control.controller_state import Control, Generation
from phalanx.control.run_requests import BEATS, MAX_STEPS, MEMORY, PROFILE, Observe, Observed, RunRequest
from phalanx.events.records import RequestFailed, RequestStarted

_LOOK = 0.25  # seconds between two looks for requests
_LEAD = 1.0  # seconds in which an order reaches all ranks; heartbeats, from which their step is known, are older by as much
_PATIENCE = 300.0  # seconds for writing files, and in addition
_STEP_PATIENCE = 20.0  # times the usual duration of the steps, after which a rank does not answer any more
_NAMED = 5  # ranks of a message
_WATCHED = 10.0  # seconds for which heartbeats are published after somebody has asked for them
_PUBLISH = 1.0  # seconds between two publications


@dataclass(slots=True)
class _Active:
    request: RunRequest
    generation: int
    waiting: set[int]
    """Ranks that have not answered."""
    steps: str
    deadline: float
    seconds: float
    """From the request to the deadline."""


class Observations:
    """The requests of one controller. One at a time is carried out."""

    def __init__(self, control: Control):
        self._control = control
        self._active: _Active | None = None
        self._looked = self._watched = self._published = -math.inf

    def check(self) -> None:
        """Look for requests and for what has become of the last one."""
        now, registry = time.monotonic(), self._control.agent.registry
        if now < self._looked + _LOOK:
            return
        self._looked = now
        for request in registry.take_requests():
            self.ask(request)
        self._check_active(now)
        if now < self._watched and now >= self._published + _PUBLISH and (generation := self._control.state.generation):
            self._published = now
            registry.publish_beats(json.dumps(published(generation)))

    def ask(self, request: RunRequest) -> None:
        """Order the ranks to carry out a request, or say why not. Nothing in a request ends the controller, and the run with it."""
        try:
            self._ask(request)
        except Exception as error:
            self._end()
            self._fail(request, None, f"{type(error).__name__}: {error}")

    def _ask(self, request: RunRequest) -> None:
        if request.kind == BEATS:
            self._watched = time.monotonic() + _WATCHED
            return
        if self._active is not None and self._active.request.id == request.id:
            return  # two nodes have read the same file
        generation = self._control.state.generation
        if (reason := self._refusal(request, generation)) is not None:
            self._fail(request, None, reason)
            return
        assert generation is not None
        first, seconds = self._plan_steps(request, generation)
        last, total = first + request.steps - 1, self._control.agent.run.steps
        if last > total:
            newest = generation.step or 0
            self._fail(request, None, f"the run ends with step {total}, and step {newest} is complete: ask for fewer steps")
            return
        ranks = sorted(set(range(generation.ranks) if request.ranks is None else request.ranks))
        steps = f"steps {first} to {last}" if last > first else f"step {first}"
        deadline = time.monotonic() + seconds
        self._active = _Active(request, generation.number, set(ranks), steps, deadline, seconds)
        # While a rank starts or stops to record, or writes files, the others wait for it: that is no hang.
        self._control.state.observing = True
        self._control.agent.emit(
            RequestStarted(request=request.id, what=request.kind, step=first, steps=request.steps, ranks=ranks)
        )
        self._control.order(Observe(generation=generation.number, request=request, ranks=ranks, first=first))

    def on_observed(self, report: Observed) -> None:
        """A rank has answered."""
        active = self._active
        if active is None or report.request != active.request.id:
            return
        active.waiting.discard(report.rank)
        if report.problem:
            self._fail(active.request, report.rank, report.problem)
        if not active.waiting:
            self._end()

    def _check_active(self, now: float) -> None:
        active, generation = self._active, self._control.state.generation
        if active is None:
            return
        if generation is None or generation.number != active.generation:
            self._fail(active.request, None, f"a failure came between: the ranks recover from it, without {active.steps}")
        elif now > active.deadline:
            silent = ", ".join(map(str, sorted(active.waiting)[:_NAMED]))
            self._fail(active.request, None, f"there is no answer within {active.seconds:.0f} s from rank {silent}")
        else:
            return
        self._end()

    def _end(self) -> None:
        self._active, self._control.state.observing = None, False

    def _fail(self, request: RunRequest, rank: int | None, reason: str) -> None:
        self._control.agent.emit(RequestFailed(request=request.id, what=request.kind[:40], rank=rank, reason=reason))

    def _refusal(self, request: RunRequest, generation: Generation | None) -> str | None:
        """Why a request is not carried out; None: it is."""
        state = self._control.state
        if self._control.agent.run.command.program is not None:
            return "the run is a program of its own, started by `phalanx launch`: its steps are not known"
        if request.kind not in (PROFILE, MEMORY):
            return "this version of the run does not know such a request"
        if not 1 <= request.steps <= MAX_STEPS:
            return f"{request.steps} steps are asked for: ask for 1 to {MAX_STEPS}"
        if self._active is not None:
            return f"another request is under way, in {self._active.steps}: ask again when it is done"
        if generation is None or state.events or state.recovery is not None:
            return "the ranks are starting, or recover from a failure: ask again when they take steps"
        if state.stop_requested is not None or generation.ended:
            return "the run is ending"
        missing = [rank for rank in request.ranks or () if not 0 <= rank < generation.ranks]
        if missing or request.ranks == []:
            return f"there is no rank {', '.join(map(str, missing[:_NAMED]))}: the run has ranks 0 to {generation.ranks - 1}"
        beats = generation.beats
        if any(rank not in beats or not beats[rank].steps_taken for rank in generation.living):
            return "the ranks have not taken a step yet: ask again when they have"
        return None

    def _plan_steps(self, request: RunRequest, generation: Generation) -> tuple[int, float]:
        """The first step to observe, which no rank has begun when the order arrives, and seconds in which all ranks have answered.

        Ranks are in the same step, or in neighboring ones: each step ends with a sum over all of them. So a step that is a little ahead of the newest
        heartbeat is ahead of all. One step more is left to warm up the profiler. A rank that the order reaches too late begins with its next step.
        """
        newest = max(beat.step for beat in generation.beats.values())
        each = max(median(beat.step_seconds for beat in generation.beats.values()), 1e-4)
        first = newest + 2 + math.ceil(_LEAD / each)
        if first + request.steps - 1 > (total := self._control.agent.run.steps):
            first = max(newest + 2, total - request.steps + 1)  # near the end of the run, less ahead
        return first, _PATIENCE + _STEP_PATIENCE * (first - newest + request.steps) * each


def published(generation: Generation) -> dict[str, object]:
    """The contents of control/beats.json."""
    now = time.monotonic()
    return {
        "time": time.time(),
        "generation": generation.number,
        "ranks": generation.ranks,
        "nodes": [[node, len(list(ranks))] for node, ranks in groupby(generation.assignment)],
        "dead": sorted(generation.dead),
        "beats": {
            str(rank): [beat.step, beat.phase, now - beat.since, beat.step_seconds, beat.busy_seconds]
            for rank, beat in sorted(generation.beats.items())
        },
    }
