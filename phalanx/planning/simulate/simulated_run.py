"""Simulates one run from failure to failure: what fails when, what the live policy does about it, and how the time is spent. Between two events
everything is in closed form, so months of a large cluster take milliseconds."""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from math import inf
from random import Random
from typing import Literal

from phalanx.planning.machines.cluster import Failures
from phalanx.planning.simulate.simulated_policy import DecisionCache, Fault, SimulatedPolicy, detection_seconds, fault_kind
from phalanx.recovery.state import Action, EndRun, NewGeneration, Wait
from phalanx.spec.layout import Layout

StateSource = Literal["replicas", "memory", "disk", "none"]
"""Where a run finds its state after a failure: on ranks that hold the same, in replicas in host memory, on disk, or nowhere."""

_ROUNDING = 1e-6
"""Seconds of tolerance: rounding errors of months of simulated time must not hide that a step has ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveSchedule:
    """When a run saves and what that costs. Steps are numbered from 1; a save belongs to the step before it."""

    keep: StateSource
    memory_every: int | None
    """Steps between copies into host memory; None: no copies."""
    memory_stall: float
    """Seconds that training waits for one copy."""
    disk_every: int | None
    """Steps between checkpoints on disk; None: no checkpoints."""
    disk_stall: float
    """Seconds that training waits for one checkpoint."""
    disk_write: float = 0.0
    """Seconds after the stall until a checkpoint is complete; training continues meanwhile."""
    on_stop: bool = True
    """Whether a run that is asked to stop saves first."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive steps of equal length after the completed step `first`."""

    saves: SaveSchedule
    first: int
    step: float
    """Seconds of one step."""

    def seconds_until(self, step: int) -> float:
        """Seconds until `step` is done, counted from the run's first step, including the saves after each step."""
        saves, steps = self.saves, step - self.first
        seconds = steps * self.step
        if saves.memory_every is not None:
            seconds += (step // saves.memory_every - self.first // saves.memory_every) * saves.memory_stall
        if saves.disk_every is not None:
            seconds += (step // saves.disk_every - self.first // saves.disk_every) * saves.disk_stall
        return seconds

    def step_after(self, seconds: float) -> int:
        """The last step that is done, with its saves, after `seconds`."""
        steps = range(self.first + 1, self.first + int(seconds / self.step) + 2)
        return self.first + bisect_right(steps, seconds + _ROUNDING, key=self.seconds_until)

    def last_saved(self, every: int | None, write: float, step: int, seconds: float) -> int | None:
        """The newest saved step whose save is complete `seconds` after the start, when `step` is done; None: there is none after `first`."""
        if every is None:
            return None
        newest = step // every * every
        while newest > self.first and self.seconds_until(newest) + write > seconds + _ROUNDING:
            newest -= every
        return newest if newest > self.first else None


TIME_USES = ("computing", "slower", "lost", "detection", "restart", "saving", "waiting", "maintenance")
"""How time is spent: steps that count, at full speed; extra time on fewer nodes; steps that were lost; failure detection; restarts; stalls of
saves; waiting for a node or a person; planned maintenance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """The conditions of a simulated run."""

    cache: DecisionCache
    nodes: int
    """All nodes, including spares."""
    failures: Failures | None
    step: Callable[[Layout], float]
    """Returns the seconds of a step on a layout."""
    saves: SaveSchedule
    restart: float
    """Seconds from a decision to the next step."""
    repair: float
    """Mean seconds until a lost node returns."""
    relaunch: float
    """Seconds until a person restarts a run that has given up."""
    horizon: float
    """Longest simulated time, in seconds."""
    steps: int
    """Steps of the whole run."""
    maintenance: tuple[float, float] | None = None
    """Seconds between planned pauses, and seconds of one pause."""


@dataclass(frozen=True, slots=True)
class Span:
    """A period in one state."""

    start: float
    stop: float
    state: str
    """One of TIME_USES."""
    devices: int
    """Devices that compute."""


@dataclass(frozen=True, slots=True)
class FailureMark:
    """A failure of a device in use."""

    at: float
    component: str
    action: str
    """The decision: restart, spare, shrink, wait or end."""


@dataclass(slots=True)
class Trial:
    """The result of one simulated run."""

    seconds: float = 0.0
    steps: int = 0
    finished: bool = False
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_USES, 0.0))
    components: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)
    marks: list[FailureMark] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return self.spent["computing"] / self.seconds if self.seconds else 1.0


def run_trial(scenario: Scenario, seed: int, number: int = 0) -> Trial:
    """Simulates a run from its first step to its last, or to the horizon; `number`: of the trials with this seed."""
    return _TrialRunner(scenario, f"{seed}/{number}").run()


class _TrialRunner:
    def __init__(self, scenario: Scenario, seed: str):
        self.scenario = scenario
        # Failure times have a generator of their own: runs that differ in spares or saves then meet the same failures as far as possible.
        self.times, self.choices = Random(f"{seed}/when"), Random(f"{seed}/what")
        self.policy = SimulatedPolicy(scenario.cache, scenario.nodes)
        self.trial = Trial()
        self.now = 0.0
        self.step = 0
        """The last completed step that is not lost."""
        self.memory = self.disk = 0
        """Newest steps in host memory and on disk."""
        self.returns: list[float] = []
        """Times at which lost nodes return, as a heap."""
        self.hazard = self.times.expovariate(1.0)
        """Accumulated hazard until the next failure."""
        self.full_speed = scenario.step(scenario.cache.wanted)
        """Seconds of a step on the wanted layout."""
        rates = scenario.failures.rates if scenario.failures else ()
        self.rate = sum(rate for _, rate in rates) / 3600.0
        """Failures of one device per second."""
        self.names, self.weights = [name for name, _ in rates], list(accumulate(rate for _, rate in rates))
        self.pause = scenario.maintenance[0] if scenario.maintenance else inf
        """Time of the next planned pause."""
        self.lost_nodes: list[int] = []
        """Nodes lost since the last step: neighbors among them held each other's replicas."""
        self.next: Callable[[], None] = self._train
        """The next phase. It is stored, not called: in a cluster that fails faster than it restarts, calls would nest without end."""

    def run(self) -> Trial:
        while self.now < self.scenario.horizon and self.step < self.scenario.steps:
            phase, self.next = self.next, self._train
            phase()
        self.trial.seconds, self.trial.steps, self.trial.finished = self.now, self.step, self.step >= self.scenario.steps
        return self.trial

    # --- time ---

    def _until(self, end: float) -> Fault | float | None:
        """Advances time to the next failure, to the return of a node (a time), or to `end` (None)."""
        while True:
            rate = self.rate * self.policy.healthy * self.scenario.cache.slots
            fails = self.now + self.hazard / rate if rate > 0 else inf
            returns = self.returns[0] if self.returns else inf
            time = min(fails, returns, end)
            self.hazard -= rate * (time - self.now)
            self.now = max(self.now, time)
            if time == end:
                return None
            if time == returns:
                return heapq.heappop(self.returns)
            self.hazard = self.times.expovariate(1.0)
            fault = self._draw_fault()
            if fault is not None:
                return fault

    def _draw_fault(self) -> Fault | None:
        """Draws the component and the device that fail; None if the failure does not affect the run."""
        component = self.choices.choices(self.names, cum_weights=self.weights)[0]
        kind, device = fault_kind(component), self.choices.randrange(self.policy.healthy * self.scenario.cache.slots)
        missing = len(self.policy.missing) * self.scenario.cache.slots
        if self.policy.waiting and kind != "node":
            return None  # no rank runs that could fail
        if device >= self.policy.layout.ranks - missing:
            idle = self.policy.free > 0 and device >= self.policy.placed.used * self.scenario.cache.slots - missing
            if kind == "node" and idle:
                self.policy.free -= 1  # training does not notice
                self._repair()
            if idle or kind != "node":
                return None
            device = self.policy.layout.ranks - 1  # an idle slot of a node in use
        if missing:
            alive = [rank for rank, node in enumerate(self.policy.placed.assignment) if node not in self.policy.missing]
            device = alive[min(device, len(alive) - 1)]
        return Fault(component, kind, device)

    def _repair(self) -> None:
        wait, mean = self.scenario.cache.settings.node_return, self.scenario.repair
        if wait is None:
            wait = self.choices.expovariate(1.0 / mean) if mean > 0 else 0.0
        heapq.heappush(self.returns, self.now + wait)

    def _spend(self, use: str, start: float) -> None:
        """Books the time since `start` under one of TIME_USES."""
        if self.now > start:
            self.trial.spent[use] += self.now - start
            self._span(start, use)

    def _span(self, start: float, use: str) -> None:
        devices, spans = self.policy.layout.ranks if use in ("computing", "slower") else 0, self.trial.spans
        if spans and (spans[-1].stop, spans[-1].state, spans[-1].devices) == (start, use, devices):
            start = spans.pop().start
        spans.append(Span(start, self.now, use, devices))

    # --- steps ---

    def _train(self) -> None:
        """Takes steps until the next event."""
        layout, start = self.policy.layout, self.now
        seconds = self.scenario.step(layout)
        segment = Segment(self.scenario.saves, self.step, seconds)
        end = start + segment.seconds_until(self.scenario.steps)
        latest = min(end, self.scenario.horizon, max(self.pause, start))
        while isinstance(event := self._until(latest), float):
            if isinstance(self.policy.on_join(), NewGeneration):  # after the current step
                self._advance(segment, start, finish_step=True)
                self.next = partial(self._resume, "grow")
                return
        pauses = event is None and self.now >= self.pause
        self._advance(segment, start, finish_step=pauses)
        if event is not None:
            self.next = partial(self._recover, event)
        elif pauses:
            self._maintain()

    def _advance(self, segment: Segment, start: float, finish_step: bool = False) -> None:
        """Books the steps since `start`. The current step is completed first if `finish_step`, otherwise it is lost."""
        done = segment.step_after(self.now - start)
        if finish_step and segment.seconds_until(done) < self.now - start:
            done = min(done + 1, self.scenario.steps)
            self.now = start + segment.seconds_until(done)
        elapsed, saves = self.now - start, self.scenario.saves
        self.memory = segment.last_saved(saves.memory_every, 0.0, done, elapsed) or self.memory
        self.disk = segment.last_saved(saves.disk_every, saves.disk_write, done, elapsed) or self.disk
        steps, seconds, spent = done - self.step, segment.seconds_until(done), self.trial.spent
        spent["computing"] += steps * self.full_speed
        spent["slower"] += steps * (segment.step - self.full_speed)
        spent["saving"] += seconds - steps * segment.step
        spent["lost"] += elapsed - seconds
        self.step = done
        if elapsed > 0:
            self.lost_nodes = []
            slow = self.policy.layout.ranks < self.scenario.cache.wanted.ranks
            self._span(start, "slower" if slow else "computing")

    # --- failures ---

    def _recover(self, fault: Fault) -> None:
        """Detects a failure and decides about it."""
        action = self._decide(fault)
        detection = detection_seconds(fault.kind, self.scenario.cache.settings, self.full_speed)
        another = self._pass(detection, "detection")
        self.next = self._phase_of(action) if another is None else partial(self._recover, another)

    def _decide(self, fault: Fault) -> Action:
        """Asks the policy about a failure, and drops the steps that it costs."""
        gone = fault.kind == "node" and self._loses_replicas(self.policy.placed.assignment[fault.device])
        action = self.policy.on_fault(fault, self.step)
        if fault.kind == "node":
            self._repair()
        self._roll_back(self.disk if gone or isinstance(action, EndRun) else self._restorable_step())
        name = action.action if isinstance(action, NewGeneration) else "wait" if isinstance(action, Wait) else "end"
        self.trial.components[fault.component] += 1
        self.trial.actions[name] += 1
        self.trial.marks.append(FailureMark(self.now, fault.component, name))
        return action

    def _phase_of(self, action: Action | None) -> Callable[[], None]:
        relaunch = partial(self._stop, self.scenario.relaunch, "waiting")  # a person restarts a run that has given up
        return relaunch if isinstance(action, EndRun) else self._wait if isinstance(action, Wait) else self._resume

    def _loses_replicas(self, node: int) -> bool:
        """Whether a lost node held the last copy of some state: it was the only node, or its neighbor with the replica is lost too."""
        used, paired = self.policy.placed.used, self.scenario.saves.keep == "memory" or (self.policy.layout.data or 1) == 2
        neighbor_lost = paired and any((node - other) % used in (1, used - 1) for other in self.lost_nodes)
        self.lost_nodes.append(node)
        return neighbor_lost or used == 1

    def _restorable_step(self) -> int:
        """The step from which the run continues while its replicas survive."""
        if self.scenario.saves.keep == "disk":
            return self.disk
        return self.step if self.scenario.saves.keep == "replicas" else max(self.memory, self.disk)

    def _roll_back(self, step: int) -> None:
        steps = self.step - step
        self.trial.spent["computing"] -= steps * self.full_speed
        self.trial.spent["lost"] += steps * self.full_speed
        self.step, self.memory = step, min(self.memory, step)

    def _pass(self, seconds: float, use: str) -> Fault | None:
        """Lets `seconds` pass, or less if something fails meanwhile. Nodes that return stay free until the run trains again."""
        start, end = self.now, min(self.now + seconds, self.scenario.horizon)
        while isinstance(event := self._until(end), float):
            self.policy.free += 1
        self._spend(use, start)
        return event

    def _resume(self, grown: str | None = None) -> None:
        """Starts a new generation, until its first step."""
        if grown:
            self.trial.actions[grown] += 1
        fault = self._pass(self.scenario.restart, "restart")
        if fault is not None:
            self.next = partial(self._recover, fault)
        elif self.policy.free and self.policy.layout != self.scenario.cache.wanted:
            # Nodes returned during the restart: the live controller considers them now.
            self.policy.free -= 1
            if isinstance(self.policy.on_join(), NewGeneration):
                self.next = partial(self._resume, "grow")

    def _wait(self) -> None:
        """Waits until a node returns with which a layout fits."""
        start = self.now
        while (event := self._until(self.scenario.horizon)) is not None:
            action = self._decide(event) if isinstance(event, Fault) else self.policy.on_join()
            if isinstance(action, NewGeneration | EndRun):
                self.next = self._phase_of(action)
                break
        self._spend("waiting", start)

    def _maintain(self) -> None:
        """A planned pause: the state is saved and no step is lost, if the run saves."""
        assert self.scenario.maintenance is not None
        saves, (every, length) = self.scenario.saves, self.scenario.maintenance
        self.pause += every
        if saves.on_stop:
            self.memory = self.disk = self.step
        else:
            self._roll_back(0)
        self.trial.actions["maintenance"] += 1
        self._stop(saves.disk_stall + saves.disk_write + length, "maintenance")

    def _stop(self, seconds: float, use: str) -> None:
        """Lets time pass in which no rank runs and no failure counts, and starts the run again."""
        start, self.now = self.now, min(self.now + seconds, self.scenario.horizon)
        while self.returns and self.returns[0] <= self.now:
            heapq.heappop(self.returns)
            self.policy.free += 1
        self._spend(use, start)
        self.next = self._phase_of(self.policy.on_relaunch(self.step, self.policy.healthy))
