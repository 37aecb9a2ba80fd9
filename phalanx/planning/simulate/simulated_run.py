"""One simulated run, from failure to failure: what breaks when, what the live policy does about it, and where the time goes.
`planning/simulate/simulate_run` makes as many of these as it needs.

Between two events everything is closed form, so that months of a large cluster take milliseconds.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

from phalanx.planning.machines.cluster import Failures
from phalanx.planning.simulate.simulated_faults import Dice, Fault, detection, kind_of
from phalanx.planning.simulate.simulated_policy import Policy, Situations
from phalanx.planning.simulate.simulated_saves import Progress, Saves
from phalanx.recovery.state import Action, EndRun, NewGeneration, Wait
from phalanx.spec.layout import Layout

SPENT = ("computing", "slower", "lost", "detection", "restart", "saving", "waiting", "maintenance")
"""Where time goes: steps that count, as quick as wanted; what fewer nodes take longer; steps done again; noticing; starting again; stalls
of saves; waiting for a node or a person; planned pauses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """What one simulated run happens in."""

    situations: Situations
    nodes: int
    """All, spare ones too."""
    failures: Failures | None
    step: Callable[[Layout], float]
    """Seconds of a step."""
    saves: Saves
    restart: float
    """Seconds from a decision until steps are taken again."""
    repair: float
    """Mean seconds until a lost node is back."""
    relaunch: float
    """Seconds until somebody starts a run again that has given up."""
    horizon: float
    """Seconds that are simulated at most."""
    steps: int
    """Of the whole run."""
    maintenance: tuple[float, float] | None = None
    """Seconds between planned pauses, and seconds that one takes."""


@dataclass(frozen=True, slots=True)
class Span:
    """Some time in one state."""

    start: float
    stop: float
    state: str
    """One of SPENT."""
    devices: int
    """That work."""


@dataclass(frozen=True, slots=True)
class Mark:
    """A failure of a used device."""

    at: float
    component: str
    action: str
    """restart, spare, shrink, wait, end."""
    lost: float
    """Seconds of steps that are done again."""


@dataclass(slots=True)
class Trial:
    """What became of one."""

    seconds: float = 0.0
    steps: int = 0
    finished: bool = False
    spent: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SPENT, 0.0))
    components: Counter[str] = field(default_factory=Counter)
    actions: Counter[str] = field(default_factory=Counter)
    spans: list[Span] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)

    @property
    def goodput(self) -> float:
        return self.spent["computing"] / self.seconds if self.seconds else 1.0


def play(world: World, dice: Dice) -> Trial:
    """From the first step to the last, or to the horizon."""
    return _Run(world, dice).play()


class _Run:
    def __init__(self, world: World, dice: Dice):
        self.w, self.dice = world, dice
        self.policy = Policy(world.situations, world.nodes)
        self.trial = Trial()
        self.now = 0.0
        self.step = 0
        """Done, and not lost since."""
        self.memory = self.disk = 0
        """Newest steps that copies in memory, and checkpoints, are of."""
        self.back: list[float] = []
        """When lost nodes return."""
        self.patience = dice.patience()
        self.quick = world.step(world.situations.wanted)
        self.rate = world.failures.rate / 3600.0 if world.failures else 0.0
        """Failures of a device in a second."""
        self.names = [name for name, _ in world.failures.rates] if world.failures else []
        self.weights = list(accumulate(rate for _, rate in world.failures.rates)) if world.failures else []
        self.pause = world.maintenance[0] if world.maintenance else float("inf")
        self.struck: list[int] = []
        """Nodes lost since steps were last taken: neighbours among them had each other's copies."""
        self.todo: Callable[[], None] = self._work
        """What comes next. Kept here, not called: a cluster that fails faster than it starts would never return from the calls."""

    def play(self) -> Trial:
        while self.now < self.w.horizon and self.step < self.w.steps:
            todo, self.todo = self.todo, self._work
            todo()
        self.trial.seconds, self.trial.steps, self.trial.finished = self.now, self.step, self.step >= self.w.steps
        return self.trial

    # --- time ---

    def _until(self, end: float) -> Fault | float | None:
        """Lets time pass: to a failure, to a node's return (its moment), or to the end (None)."""
        while True:
            hazard = self.rate * self.policy.living * self.w.situations.slots
            fails = self.now + self.patience / hazard if hazard > 0 else float("inf")
            returns = self.back[0] if self.back else float("inf")
            to = min(fails, returns, end)
            self.patience -= hazard * (to - self.now)
            self.now = max(self.now, to)
            if to == end:
                return None
            if to == returns:
                return heapq.heappop(self.back)
            self.patience = self.dice.patience()
            fault = self._strike()
            if fault is not None:
                return fault

    def _strike(self) -> Fault | None:
        """Which device it is; None where nothing ran on it."""
        component = self.dice.component(self.names, self.weights)
        kind, device = kind_of(component), self.dice.device(self.policy.living * self.w.situations.slots)
        holes = len(self.policy.holes) * self.w.situations.slots
        if self.policy.waits and kind != "node":
            return None  # nothing works that could be disturbed
        if device >= self.policy.layout.ranks - holes:
            idle = self.policy.free > 0 and device >= self.policy.ground.used * self.w.situations.slots - holes
            if kind == "node" and idle:
                self.policy.lose_idle()
                self._repair()
            if idle or kind != "node":
                return None
            device = self.policy.layout.ranks - 1  # an idle place of a node that is used
        if holes:
            lives = [rank for rank, node in enumerate(self.policy.ground.assignment) if node not in self.policy.holes]
            device = lives[min(device, len(lives) - 1)]
        return Fault(component, kind, device)

    def _repair(self) -> None:
        settings = self.w.situations.settings
        wait = settings.node_return if settings.node_return is not None else self.dice.repair(self.w.repair)
        heapq.heappush(self.back, self.now + wait)

    def _spend(self, what: str, start: float) -> None:
        """All since then."""
        if self.now > start:
            self.trial.spent[what] += self.now - start
            self._span(start, what)

    def _span(self, start: float, what: str) -> None:
        devices = self.policy.layout.ranks if what in ("computing", "slower") else 0
        spans = self.trial.spans
        if spans and spans[-1].state == what and spans[-1].devices == devices and spans[-1].stop == start:
            spans[-1] = Span(spans[-1].start, self.now, what, devices)
        else:
            spans.append(Span(start, self.now, what, devices))

    # --- steps ---

    def _work(self) -> None:
        """Steps until something happens."""
        layout, start = self.policy.layout, self.now
        seconds = self.w.step(layout)
        progress = Progress(self.w.saves, self.step, seconds)
        end = start + progress.reached(self.w.steps)
        happened = self._until(min(end, self.w.horizon, max(self.pause, start)))
        while isinstance(happened, float):
            action = self.policy.joined()
            if isinstance(action, NewGeneration):  # at the end of the step that is under way
                self._advance(progress, start, whole=True)
                self.todo = partial(self._resume, "grow")
                return
            happened = self._until(min(end, self.w.horizon, max(self.pause, start)))
        if isinstance(happened, Fault):
            self._advance(progress, start)
            self.todo = partial(self._recover, happened)
        elif self.now >= self.pause:
            self._advance(progress, start, whole=True)
            self._maintain()
        else:
            self._advance(progress, start)

    def _advance(self, progress: Progress, start: float, whole: bool = False) -> None:
        """Credits what was done since. `whole`: the step under way is ended first; else it is lost."""
        done = progress.after(self.now - start)
        if whole and progress.reached(done) < self.now - start:
            done = min(done + 1, self.w.steps)
            self.now = start + progress.reached(done)
        elapsed, s = self.now - start, self.w.saves
        self.memory = progress.saved(s.memory_every, 0.0, done, elapsed) or self.memory
        self.disk = progress.saved(s.disk_every, s.disk_write, done, elapsed) or self.disk
        steps, spent = done - self.step, self.trial.spent
        spent["computing"] += steps * self.quick
        spent["slower"] += steps * (progress.step - self.quick)
        spent["saving"] += progress.stalled(done)
        spent["lost"] += elapsed - progress.reached(done)
        self.step = done
        if elapsed > 0:
            self.struck = []
            slow = self.policy.layout.ranks < self.w.situations.wanted.ranks
            self._span(start, "slower" if slow else "computing")

    # --- trouble ---

    def _recover(self, fault: Fault) -> None:
        """What is done about a failure, until steps are taken again."""
        action = self._struck_by(fault)
        noticed = self._pass(detection(fault.kind, self.w.situations.settings, self.quick), "detection")
        self.todo = self._obeys(action) if noticed is None else partial(self._recover, noticed)

    def _struck_by(self, fault: Fault) -> Action:
        """What the policy says to a failure, and what is lost by it."""
        was, node = self.step, self.policy.node_of(fault.device)
        gone = fault.kind == "node" and self._gone(node)
        action = self.policy.fault(fault, self.step)
        if fault.kind == "node":
            self._repair()
        self._rewind(self.disk if gone or isinstance(action, EndRun) else self._source())
        name = action.action if isinstance(action, NewGeneration) else type(action).__name__.lower()
        self.trial.components[fault.component] += 1
        self.trial.actions[name] += 1
        self.trial.marks.append(Mark(self.now, fault.component, name, (was - self.step) * self.quick))
        return action

    def _obeys(self, action: Action | None) -> Callable[[], None]:
        return self._relaunch if isinstance(action, EndRun) else self._wait if isinstance(action, Wait) else self._resume

    def _gone(self, node: int) -> bool:
        """Whether a lost node takes the last copy of something along: it was alone, or its neighbour, which had the other, is lost too."""
        used, pair = self.policy.ground.used, self.w.saves.keep == "memory" or (self.policy.layout.data or 1) == 2
        near = pair and any((node - other) % used in (1, used - 1) for other in self.struck)
        self.struck.append(node)
        return near or used == 1

    def _source(self) -> int:
        """The step that the run goes on from, where not all that was in memory is gone."""
        if self.w.saves.keep == "disk":
            return self.disk
        return self.step if self.w.saves.keep == "replicas" else max(self.memory, self.disk)

    def _rewind(self, to: int) -> None:
        steps = self.step - to
        self.trial.spent["computing"] -= steps * self.quick
        self.trial.spent["lost"] += steps * self.quick
        self.step, self.memory = to, min(self.memory, to)

    def _pass(self, seconds: float, what: str) -> Fault | None:
        """So much time, or less where something fails meanwhile. Nodes that return are free, and asked about when the run works."""
        start, end = self.now, min(self.now + seconds, self.w.horizon)
        happened = self._until(end)
        while isinstance(happened, float):
            self.policy.free += 1
            happened = self._until(end)
        self._spend(what, start)
        return happened

    def _resume(self, grown: str | None = None) -> None:
        """A new generation: until its first step."""
        if grown:
            self.trial.actions[grown] += 1
        fault = self._pass(self.w.restart, "restart")
        if fault is not None:
            self.todo = partial(self._recover, fault)
        elif self.policy.free and self.policy.layout != self.w.situations.wanted:
            # Nodes came while it began: the live controller comes back to them now.
            self.policy.free -= 1
            if isinstance(self.policy.joined(), NewGeneration):
                self.todo = partial(self._resume, "grow")

    def _wait(self) -> None:
        """Until a node comes with which something fits."""
        start = self.now
        while self.now < self.w.horizon:
            happened = self._until(self.w.horizon)
            if happened is None:
                break
            if isinstance(happened, Fault):
                if isinstance(self._struck_by(happened), EndRun):
                    self.todo = self._relaunch
                    break
            elif isinstance(self.policy.joined(), NewGeneration):
                self.todo = self._resume
                break
        self._spend("waiting", start)

    def _relaunch(self) -> None:
        """Given up: somebody starts it again."""
        start = self.now
        self._stand(self.w.relaunch)
        self._spend("waiting", start)
        self.todo = self._obeys(self.policy.relaunched(self.step, self.policy.living))

    def _maintain(self) -> None:
        """A planned pause: everything is saved, nothing is lost."""
        assert self.w.maintenance is not None
        start, (every, takes) = self.now, self.w.maintenance
        self._stand(self.w.saves.disk_stall + self.w.saves.disk_write + takes)
        self.memory, self.disk, self.pause = self.step, self.step, self.pause + every
        self._spend("maintenance", start)
        self.trial.actions["maintenance"] += 1
        self.todo = self._obeys(self.policy.relaunched(self.step, self.policy.living))

    def _stand(self, seconds: float) -> None:
        """Nothing runs, and nothing is taken to fail."""
        self.now = min(self.now + seconds, self.w.horizon)
        while self.back and self.back[0] <= self.now:
            heapq.heappop(self.back)
            self.policy.free += 1
