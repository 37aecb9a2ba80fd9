"""Simulates one step: the schedule's actions take the times of the plan, and messages that share a link divide its bandwidth. Without shared
links the result equals `schedules/timing.simulate`."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.search.candidate import Candidate
from phalanx.schedules.actions import Action, Schedule
from phalanx.schedules.makers import make, schedule_for
from phalanx.schedules.timing import Durations, Timed, Timeline, bubble, simulate
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run

Tier = Literal["island", "network"]
Link = tuple[str, int]
"""The kind of a link, and the rank that it belongs to."""

_GRADIENT_BYTES = 4
"""Bytes of a gradient value in a reduction over replicas."""
_ACTION_PARTS = ("compute", "launch", "tensor", "context", "expert")
"""Parts of a step that are inside the times of actions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """The messages of a step, as fractions of the time of an action."""

    inside: tuple[tuple[str, Tier, float], ...] = ()
    """(dimension, link, fraction): messages that an action waits for. The time of the action includes them."""
    hop: Tier = "network"
    """The link of messages between stages."""
    overlapped: tuple[Tier, float] = ("network", 0.0)
    """Sharded parameters and their gradients: sent during every action; the next action waits for them."""
    final: tuple[Tier, float] = ("network", 0.0)
    """Gradients: sent during a rank's last action; the optimizer waits for them."""


class Message(NamedTuple):
    """A message on one link."""

    rank: int
    """The pipeline rank that the link belongs to."""
    link: str
    """"island", "network out" or "network in"."""
    dimension: str
    label: str
    start: float
    stop: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """A simulated step."""

    schedule: Schedule
    timeline: Timeline
    messages: tuple[Message, ...]
    seconds: float
    """Seconds of the whole step."""
    split: dict[str, float]
    """Seconds of its parts: compute, exposed messages of each dimension, bubble, contention, tail, other."""
    bubble: float
    """Fraction of the schedule's time in which ranks wait, including contention."""


def simulate_candidate(run: Run, hardware: Hardware, candidate: Candidate) -> SimulatedStep:
    """Simulates one step of a plan's candidate."""
    actions = schedule_for(candidate.layout, candidate.accumulation) or make("1f1b", 1, candidate.accumulation)
    return simulate_step(actions, candidate.pieces, traffic(run, hardware, candidate), candidate.split.get("other", 0.0))


def tiers(layout: Layout, hardware: Hardware) -> dict[str, Tier]:
    """The link of each dimension's messages: groups of neighboring ranks use the island if they fit into it."""
    group_sizes = {
        "tensor": layout.tensor,
        "context": layout.tensor * layout.context,
        "expert": layout.expert * layout.expert_tensor,
        "data": layout.tensor * layout.context * layout.shard * (layout.data or 1),
        "shard": layout.tensor * layout.context * layout.shard,
        "pipeline": layout.ranks,
    }
    return {dimension: "island" if ranks <= hardware.island else "network" for dimension, ranks in group_sizes.items()}


def traffic(run: Run, hardware: Hardware, candidate: Candidate) -> Traffic:
    """Messages that actions wait for, from the split of the plan; and messages that overlap with actions, minus what the plan exposes of them."""
    layout, split, pieces = candidate.layout, candidate.split, candidate.pieces
    tier_of = tiers(layout, hardware)
    busy = sum(split.get(name, 0.0) for name in _ACTION_PARTS)
    inside = tuple(
        (name, tier_of[name], split.get(name, 0.0) / busy)
        for name in ("tensor", "context", "expert")
        if split.get(name, 0.0) > 0
    )
    values = _local_values(run, layout)
    whole = pieces["forward"] + pieces["input"] + pieces["weight"]
    speed = {"island": hardware.island_bandwidth, "network": hardware.network}
    size = 2 if candidate.compute != "fp32" else 4
    overlapped, final = (tier_of["shard"], 0.0), (tier_of["data"], 0.0)
    if layout.shard > 1 and layout.zero == 3:
        sent = (2 * size + _GRADIENT_BYTES) * values / speed[tier_of["shard"]]
        hidden = sent - split.get("data", 0.0) / candidate.accumulation
        overlapped = tier_of["shard"], _fraction(hidden, whole)
    elif layout.replicas * layout.context > 1:
        sent = (_GRADIENT_BYTES + size) * values / speed[tier_of["data"]]
        stages = layout.stages_per_rank if layout.pipeline > 1 else 1
        final = tier_of["data"], _fraction(sent - split.get("data", 0.0), (pieces["input"] + pieces["weight"]) / stages)
    return Traffic(inside=inside, hop=tier_of["pipeline"], overlapped=overlapped, final=final)


def _fraction(hidden: float, computing: float) -> float:
    """Hidden communication as a fraction of the computation that hides it, at most 1: the plan's split has what exceeds it."""
    return min(1.0, max(0.0, hidden / computing)) if computing > 0 else 0.0


def _local_values(run: Run, layout: Layout) -> float:
    """Parameters that a rank computes with, before sharding."""
    model = run.model
    experts = 0
    if model.moe is not None:
        experts = (model.layers - model.moe.dense_layers) * model.moe.experts * 3 * model.dim * model.moe.ffn
    dense = model.parameters() - experts
    return (dense / layout.tensor + experts / (layout.expert * layout.expert_tensor)) / layout.pipeline


def simulate_step(schedule: Schedule, pieces: dict[str, float], traffic: Traffic, other: float = 0.0) -> SimulatedStep:
    """Simulates one step.

    `pieces`, as in Candidate.pieces: seconds of one micro-batch on a rank, over all of its stages. `other`: seconds of the step that the
    schedule does not explain.
    """
    durations = durations_of(schedule, pieces)
    hop = pieces["hop"] if schedule.ranks > 1 else 0.0
    ideal = simulate(schedule, durations).stop
    undisturbed = simulate(schedule, durations, hop).stop
    engine = _Engine(schedule, durations, hop, traffic)
    stop = engine.run()
    busy = max(sum(durations.of(action) for action in row) for row in schedule.actions)
    exposed = {dimension: fraction * busy for dimension, _, fraction in traffic.inside}
    split = {"compute": busy - sum(exposed.values())} | exposed
    split |= {"bubble": ideal - busy, "pipeline": undisturbed - ideal, "contention": stop - undisturbed}
    split |= {"tail": pieces["tail"], "other": other}
    timeline = Timeline(tuple(tuple(row) for row in engine.rows))
    return SimulatedStep(
        schedule=schedule,
        timeline=timeline,
        messages=tuple(engine.messages),
        seconds=stop + pieces["tail"] + other,
        split=split,
        bubble=bubble(timeline),
    )


def durations_of(schedule: Schedule, pieces: dict[str, float]) -> Durations:
    """Divides the time of a rank among its stages; the last stage of the pipeline also has the output head."""
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


def _links(tier: Tier, sender: int, receiver: int) -> tuple[Link, ...]:
    """Links of a message: both island links, or one direction of each NIC. A rank's collective uses its own links alone."""
    if tier == "island":
        return tuple(dict.fromkeys((("island", sender), ("island", receiver))))
    return ("network out", sender), ("network in", receiver)


@dataclass(slots=True, eq=False)
class Flow:
    """A message in flight."""

    links: tuple[Link, ...]
    left: float
    """Remaining seconds, if no other message shares its links."""
    start: float
    since: float
    """Time for which `left` is valid."""
    label: tuple[str, str] = ("", "")
    """The dimension, and what is sent."""
    then: Callable[[], None] = lambda: None
    """What to do on arrival."""
    rate: float = 1.0
    version: int = 0
    """Counts changes of the rate: an arrival scheduled for an older version is ignored."""

    @property
    def arrives(self) -> float:
        return self.since + self.left / self.rate


class SharedLinks:
    """Each link divides its bandwidth equally among its messages; a message moves at the rate of its slowest link."""

    def __init__(self) -> None:
        self._flows: dict[Link, list[Flow]] = {}

    def start(self, flow: Flow) -> list[Flow]:
        """Adds a message. Returns all messages whose arrival has changed, including itself."""
        for link in flow.links:
            self._flows.setdefault(link, []).append(flow)
        return self._update(flow.links, flow.start)

    def stop(self, flow: Flow, now: float) -> list[Flow]:
        """Removes a message that has arrived. Returns all messages whose arrival has changed."""
        for link in flow.links:
            self._flows[link].remove(flow)
        return self._update(flow.links, now)

    def _update(self, links: tuple[Link, ...], now: float) -> list[Flow]:
        changed = []
        for flow in {id(flow): flow for link in links for flow in self._flows[link]}.values():
            rate = min(1.0 / len(self._flows[link]) for link in flow.links)
            if rate != flow.rate or flow.version == 0:
                flow.left -= (now - flow.since) * flow.rate
                flow.since, flow.rate, flow.version = now, rate, flow.version + 1
                changed.append(flow)
        return changed


class _Engine:
    """Discrete-event simulation: every rank follows its list of actions; timers and messages are events."""

    def __init__(self, schedule: Schedule, durations: Durations, hop: float, traffic: Traffic):
        self.schedule, self.durations, self.hop, self.traffic = schedule, durations, hop, traffic
        self.rows: list[list[Timed]] = [[] for _ in schedule.actions]
        self.messages: list[Message] = []
        self._links, self._now = SharedLinks(), 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._available: set[tuple[int, Action]] = set()
        """Results of actions that have arrived at a rank."""
        self._waiting = [0] * schedule.ranks
        """Number of overlapped messages that a rank's next action, or its end, waits for."""
        self._idle = [True] * schedule.ranks
        self._ends = [0.0] * schedule.ranks
        """When a rank's last overlapped message arrived. The clock may be later, because of outdated arrival events."""
        overlapped = {tier for tier, fraction in (traffic.overlapped, traffic.final) if fraction > 0}
        self._shared = overlapped | ({traffic.hop} if hop > 0 else set())
        """Links on which messages of an action may meet others. On all other links, time alone matters."""

    def run(self) -> float:
        for rank in range(self.schedule.ranks):
            self._start_next(rank)
        while self._events:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        assert all(len(row) == len(want) for row, want in zip(self.rows, self.schedule.actions, strict=True)), (
            "a valid schedule has no deadlock"
        )
        return max([row[-1].stop for row in self.rows] + self._ends)

    def _at(self, when: float, happen: Callable[[], None]) -> None:
        self._count += 1  # events at the same time happen in the order in which they were added
        heapq.heappush(self._events, (when, self._count, happen))

    # --- actions ---

    def _start_next(self, rank: int) -> None:
        row, actions = self.rows[rank], self.schedule.actions[rank]
        if not self._idle[rank] or self._waiting[rank] or len(row) == len(actions):
            return
        action = actions[len(row)]
        if all((rank, need) in self._available for need in self.schedule.needs(action)):
            self._idle[rank] = False
            self._begin(rank, action)

    def _begin(self, rank: int, action: Action) -> None:
        seconds, traffic = self.durations.of(action), self.traffic
        final = len(self.rows[rank]) + 1 == len(self.schedule.actions[rank])
        for tier, fraction in (traffic.overlapped, *([traffic.final] if final else [])):
            if fraction > 0:
                self._waiting[rank] += 1
                links, done = _links(tier, rank, rank), partial(self._overlap_done, rank)
                self._send(links, fraction * seconds, ("data", str(action)), done)
        sent = [(dimension, tier, fraction * seconds) for dimension, tier, fraction in traffic.inside if fraction > 0]
        contended = [message for message in sent if message[1] in self._shared]
        rest = seconds - sum(message[2] for message in contended)
        end = partial(self._end, rank, action, self._now)
        if not contended:
            self._at(self._now + seconds, end)
            return
        # The messages are in the middle of the action, with computation before and after.
        after: Callable[[], None] = lambda: self._at(self._now + rest / 2, end)  # noqa: E731
        for dimension, tier, length in reversed(contended):
            after = partial(self._send, _links(tier, rank, rank), length, (dimension, str(action)), after)
        self._at(self._now + rest / 2, after)

    def _overlap_done(self, rank: int) -> None:
        self._waiting[rank] -= 1
        self._ends[rank] = self._now
        self._start_next(rank)

    def _end(self, rank: int, action: Action, start: float) -> None:
        self.rows[rank].append(Timed(*action, start, self._now))
        self._available.add((rank, action))
        self._idle[rank] = True
        target = action.stage + 1 if action.kind == "F" else action.stage - 1
        if action.kind != "W" and 0 <= target < self.schedule.stages and (other := self.schedule.rank_of(target)) != rank:
            arrive, links = partial(self._arrive, other, action), _links(self.traffic.hop, rank, other)
            if self.hop > 0:
                self._send(links, self.hop, ("pipeline", f"{action} to rank {other}"), arrive)
            else:
                arrive()
        self._start_next(rank)

    def _arrive(self, rank: int, action: Action) -> None:
        self._available.add((rank, action))
        self._start_next(rank)

    # --- messages ---

    def _send(self, links: tuple[Link, ...], seconds: float, label: tuple[str, str], then: Callable[[], None]) -> None:
        self._schedule_arrivals(self._links.start(Flow(links, seconds, self._now, self._now, label, then)))

    def _schedule_arrivals(self, changed: list[Flow]) -> None:
        for flow in changed:
            self._at(flow.arrives, partial(self._arrived, flow, flow.version))

    def _arrived(self, flow: Flow, version: int) -> None:
        if version != flow.version:
            return
        self.messages += [Message(rank, name, *flow.label, flow.start, self._now) for name, rank in flow.links]
        self._schedule_arrivals(self._links.stop(flow, self._now))
        flow.then()
