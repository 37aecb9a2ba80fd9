"""One step, simulated: the schedule's actions take the plan's times, and messages that share a link at the same time divide it.
`planning/simulate/step_traffic` says what is sent; the CLI shows the result.

Where nothing shares a link it is what `schedules/timing.simulate` says of the same list.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from phalanx.planning.simulate.shared_links import Flow, Link, Links
from phalanx.schedules.actions import Action, Schedule
from phalanx.schedules.timing import Durations, Timed, Timeline, bubble, simulate

Tier = Literal["island", "network"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What is sent, in parts of the time that an action takes. Times of actions already hold what is `inside`."""

    inside: tuple[tuple[str, Tier, float], ...] = ()
    """(dimension, link, part): an action waits for it."""
    hop: Tier = "network"
    """What messages between stages travel on."""
    behind: tuple[Tier, float] | None = None
    """Sharded parameters and their gradients: beside every action; the next one waits for it."""
    last: tuple[Tier, float] | None = None
    """Gradients: beside a rank's last action; the optimizer waits for it."""


class Message(NamedTuple):
    """One that was sent, or a part of an action in which it waits for one."""

    rank: int
    """Pipeline rank whose link it is."""
    link: str
    """island, network out, network in."""
    dimension: str
    label: str
    start: float
    stop: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A simulated step."""

    schedule: Schedule
    timeline: Timeline
    messages: tuple[Message, ...]
    seconds: float
    """Of all of it."""
    split: dict[str, float]
    """Seconds: compute, each dimension's exposed messages, bubble, contention, tail, other; they sum up to it."""
    bubble: float
    """Part of the schedule's time in which ranks wait, contention considered."""


def simulate_step(schedule: Schedule, pieces: dict[str, float], traffic: Traffic, other: float = 0.0) -> Step:
    """`pieces` as in Option.pieces: of one micro-batch on a rank, all of its stages together. `other`: seconds that nothing here explains."""
    durations = durations_of(schedule, pieces)
    hop = pieces["hop"] if schedule.ranks > 1 else 0.0
    ideal = simulate(schedule, durations).stop
    undisturbed = simulate(schedule, durations, hop).stop
    engine = _Engine(schedule, durations, hop, traffic)
    stop = engine.run()
    busy = max(sum(durations.of(action) for action in row) for row in schedule.actions)
    exposed = {dimension: part * busy for dimension, _, part in traffic.inside}
    split = {"compute": busy - sum(exposed.values())} | exposed
    split |= {"bubble": ideal - busy, "pipeline": undisturbed - ideal, "contention": stop - undisturbed}
    split |= {"tail": pieces["tail"], "other": other}
    timeline = Timeline(tuple(tuple(row) for row in engine.rows))
    return Step(
        schedule=schedule,
        timeline=timeline,
        messages=tuple(engine.messages),
        seconds=stop + pieces["tail"] + other,
        split=split,
        bubble=bubble(timeline),
    )


def durations_of(schedule: Schedule, pieces: dict[str, float]) -> Durations:
    """A rank's stages share its time; the last stage of all has the head too."""
    per_rank = schedule.stages // schedule.ranks
    whole = (pieces["forward"] + pieces["input"] + pieces["weight"]) / per_rank
    stages = [1.0] * schedule.stages
    stages[-1] += pieces["head"] / whole if whole else 0.0
    return Durations(
        forward=pieces["forward"] / per_rank,
        input=pieces["input"] / per_rank,
        weight=pieces["weight"] / per_rank,
        stages=tuple(stages),
    )


def _links(tier: Tier, rank: int) -> tuple[Link, ...]:
    """Of one device: an island's link, or both directions of its NIC."""
    return (("island", rank),) if tier == "island" else (("network out", rank), ("network in", rank))


class _Engine:
    """Ranks follow their lists; timers and messages are events."""

    def __init__(self, schedule: Schedule, durations: Durations, hop: float, traffic: Traffic):
        self.schedule, self.durations, self.hop, self.traffic = schedule, durations, hop, traffic
        self.rows: list[list[Timed]] = [[] for _ in schedule.actions]
        self.messages: list[Message] = []
        self._links, self._now = Links(), 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._here: set[tuple[int, Action]] = set()
        """Results that have come to a rank."""
        self._sent: dict[Flow, tuple[tuple[str, str], Callable[[], None]]] = {}
        """Messages under way: their dimension and name, and what their arrival does."""
        self._waiting = [0] * schedule.ranks
        """Background messages that a rank's next action, or its end, waits for."""
        self._idle = [True] * schedule.ranks
        self._ends = [0.0] * schedule.ranks
        """When a rank's last background message arrived. Not the clock's last: it also stops for arrivals that were foretold too late."""
        beside = {tier for one in (traffic.behind, traffic.last) if one is not None and one[1] > 0 for tier in one[:1]}
        self._shared = beside | ({traffic.hop} if hop > 0 else set())
        """Links that an action may find taken; what travels on others is a matter of time alone."""

    def run(self) -> float:
        for rank in range(self.schedule.ranks):
            self._try(rank)
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        assert all(len(row) == len(want) for row, want in zip(self.rows, self.schedule.actions, strict=True)), "see problems"
        return max([row[-1].stop for row in self.rows] + self._ends)

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._count += 1  # of two at the same time the first comes first
        heapq.heappush(self._events, (when, self._count, happen))

    # --- actions ---

    def _try(self, rank: int) -> None:
        row, actions = self.rows[rank], self.schedule.actions[rank]
        if not self._idle[rank] or self._waiting[rank] or len(row) == len(actions):
            return
        action = actions[len(row)]
        if all((rank, need) in self._here for need in self.schedule.needs(action)):
            self._idle[rank] = False
            self._begin(rank, action)

    def _begin(self, rank: int, action: Action) -> None:
        seconds, t = self.durations.of(action), self.traffic
        final = len(self.rows[rank]) + 1 == len(self.schedule.actions[rank])
        for one in (t.behind, t.last if final else None):
            if one is not None and one[1] > 0:
                self._waiting[rank] += 1
                self._send(_links(one[0], rank), one[1] * seconds, ("data", str(action)), partial(self._cleared, rank))
        sent = [(dimension, tier, part * seconds) for dimension, tier, part in t.inside if part > 0]
        slow = [one for one in sent if one[1] in self._shared]
        rest = seconds - sum(one[2] for one in slow)
        end = partial(self._end, rank, action, self._now)
        if not slow:
            self._at(self._now + seconds, end)
            return
        # What is sent lies in the middle of an action: blocks before it, blocks after it.
        after: Callable[[], None] = lambda: self._at(self._now + rest / 2, end)  # noqa: E731
        for dimension, tier, length in reversed(slow):
            after = partial(self._send, _links(tier, rank), length, (dimension, str(action)), after)
        self._at(self._now + rest / 2, after)

    def _cleared(self, rank: int) -> None:
        self._waiting[rank] -= 1
        self._ends[rank] = self._now
        self._try(rank)

    def _end(self, rank: int, action: Action, begun: float) -> None:
        self.rows[rank].append(Timed(*action, begun, self._now))
        self._here.add((rank, action))
        self._idle[rank] = True
        to = action.stage + 1 if action.kind == "F" else action.stage - 1
        if action.kind != "W" and 0 <= to < self.schedule.stages and (other := self.schedule.rank_of(to)) != rank:
            arrive = partial(self._arrive, other, action)
            tier = self.traffic.hop
            links = (
                (("island", rank), ("island", other)) if tier == "island" else (("network out", rank), ("network in", other))
            )
            if self.hop > 0:
                self._send(links, self.hop, ("pipeline", f"{action} to rank {other}"), arrive)
            else:
                arrive()
        self._try(rank)

    def _arrive(self, rank: int, action: Action) -> None:
        self._here.add((rank, action))
        self._try(rank)

    # --- messages ---

    def _send(self, links: tuple[Link, ...], seconds: float, what: tuple[str, str], then: Callable[[], None]) -> None:
        flow, changed = self._links.start(links, seconds, self._now)
        self._sent[flow] = what, then
        self._foretell(changed)

    def _foretell(self, changed: list[Flow]) -> None:
        for flow in changed:
            self._at(flow.arrives, partial(self._arrived, flow, flow.version))

    def _arrived(self, flow: Flow, version: int) -> None:
        if version != flow.version:
            return
        (dimension, label), then = self._sent.pop(flow)
        for name, rank in flow.links:
            self.messages.append(Message(rank, name, dimension, label, flow.begun, self._now))
        self._foretell(self._links.stop(flow, self._now))
        then()
