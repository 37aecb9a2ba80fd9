"""Thousands of random failures and returns through the policy, with a small model of the world that knows which processes live."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from happenings import corrupt, disconnected, node_lost, worker_died

from phalanx.recovery.policy import decide, updated_history
from phalanx.recovery.relayout import Legal, initial_assignment
from phalanx.recovery.state import Action, EndRun, Event, Failure, NewGeneration, NodeJoined, Situation, Wait
from phalanx.spec.layout import Layout
from phalanx.spec.run import Resilience

LegalFor = Callable[..., Legal]


@dataclass
class World:
    """Nodes that come and go, and the processes of a run on them."""

    wanted: Layout
    slots: dict[int, int]
    legal: Legal
    dice: random.Random
    shrink: bool = True
    continue_degraded: bool = False
    alive: set[int] = field(default_factory=set)
    layout: Layout = field(default_factory=Layout)
    assignment: tuple[int, ...] = ()
    running: set[int] = field(default_factory=set)
    """Ranks of the generation that have a process."""
    history: tuple[Failure, ...] = ()
    waits: bool = False
    step: int = 0
    seen: Counter[str] = field(default_factory=Counter)

    def begin(self) -> None:
        self.alive = set(self.slots)
        self.layout, self.assignment = self.wanted, initial_assignment(self.wanted, self.nodes)
        self.running, self.history, self.waits = set(range(self.wanted.ranks)), (), False

    @property
    def nodes(self) -> dict[int, int]:
        return {number: self.slots[number] for number in sorted(self.alive)}

    def strike(self) -> list[Event]:
        """Something happens; the world is changed by it at once."""
        events = [self._one() for _ in range(self.dice.choice((1, 1, 1, 2, 3)))]
        self.step += self.dice.choice((0, 1, 1, 2))
        return events

    def _one(self) -> Event:
        gone = sorted(set(self.slots) - self.alive)
        kind = self.dice.choice(("worker", "worker", "lost", "joined", "joined", "corrupt", "broken"))
        if kind == "lost" and self.alive:
            return self.lose(self.dice.choice(sorted(self.alive)))
        if kind == "joined" and gone:
            return self.join(self.dice.choice(gone))
        if kind in ("worker", "corrupt") and self.running:
            rank = self.dice.choice(sorted(self.running))
            self.running.discard(rank)
            return (
                corrupt(rank, self.step)
                if kind == "corrupt"
                else worker_died(rank, self.step, "died", f"rank {rank} was killed")
            )
        return disconnected(self.step, f"at {self.dice.random()}")

    def lose(self, node: int) -> Event:
        self.alive.discard(node)
        self.running -= {rank for rank, on in enumerate(self.assignment) if on == node}
        return node_lost(node, self.step)

    def join(self, node: int) -> Event:
        self.alive.add(node)
        return NodeJoined(node)

    def answer(self, events: list[Event], dead: tuple[int, ...]) -> Action:
        before = Situation(
            wanted=self.wanted, layout=self.layout, assignment=self.assignment, nodes=self.nodes, history=self.history,
            dead=dead, settings=Resilience(restarts=10**9, shrink=self.shrink, continue_degraded=self.continue_degraded),
        )  # fmt: skip
        action = decide(before, events, self.legal)
        assert action == decide(before, events, self.legal)
        self.history = updated_history(before, events, action)[-6:]
        self.seen[action.action if isinstance(action, NewGeneration) else type(action).__name__] += 1
        if isinstance(action, NewGeneration):
            self._check(action)
            self.layout, self.assignment = action.layout, action.assignment
            self.running = set(range(self.layout.ranks))
        self.waits = isinstance(action, Wait)
        return action

    def _check(self, go: NewGeneration) -> None:
        used = Counter(go.assignment)
        assert go.layout.ranks == len(go.assignment) == len(go.old) <= self.wanted.ranks
        assert all(node in self.alive and count <= self.slots[node] for node, count in used.items())
        assert self.legal(go.layout)
        kept = [(new, old) for new, old in enumerate(go.old) if old is not None]
        assert len({old for _, old in kept}) == len(kept)
        assert all(old in self.running and self.assignment[old] == go.assignment[new] for new, old in kept)
        if go.layout == self.layout and go.action != "grow":
            # The same layout again: whoever lives stays what it is.
            assert kept == [(rank, rank) for rank in sorted(self.running)]
        else:
            # No process is started on a node that has an idle one.
            for node in used:
                lives = sum(self.assignment[old] == node for old in self.running)
                assert sum(go.assignment[new] == node for new, _ in kept) == min(lives, used[node])


def shapes() -> list[tuple[Layout, dict[int, int], int]]:
    return [
        (Layout(pipeline=2, data=2, tensor=2), {0: 2, 1: 2, 2: 2, 3: 2}, 12),
        (Layout(pipeline=2, data=2, tensor=2), {0: 4, 1: 4, 2: 4}, 8),
        (Layout(data=2, shard=4, zero=2), {0: 3, 1: 3, 2: 2}, 24),
        (
            Layout(pipeline=2, data=1, shard=2, tensor=2, sequence=True, schedule="interleaved-1f1b"),
            {0: 2, 1: 2, 2: 2, 3: 2, 4: 1},
            12,
        ),
        (Layout(data=6, context=2), {0: 4, 1: 4, 2: 4, 5: 2}, 12),
    ]


@pytest.mark.parametrize(("shrink", "go_on"), [(True, False), (True, True), (False, False), (False, True)])
@pytest.mark.parametrize(("wanted", "slots", "batch"), shapes())
def test_policy_invariants_over_random_histories(
    legal_for: LegalFor, wanted: Layout, slots: dict[int, int], batch: int, shrink: bool, go_on: bool
) -> None:
    world = World(wanted, slots, legal_for(batch), random.Random(f"{wanted}{shrink}{go_on}"), shrink, go_on)
    world.begin()
    dead: tuple[int, ...] = ()
    for _ in range(250):
        action = world.answer(world.strike(), dead)
        if isinstance(action, EndRun):
            assert "3 times after step" in action.story
            world.begin()
        if isinstance(action, Wait):
            assert not (shrink and world.alive)  # one rank can always train
            assert set(action.dead) == set(range(world.layout.ranks)) - world.running
        else:
            assert len(world.running) == world.layout.ranks  # nothing goes on with a hole in it
        dead = action.dead if isinstance(action, Wait) else ()
    # All come back, one by one: the run is what was wanted again, and then stays so.
    for node in sorted(slots):
        action = world.answer([world.join(node)], dead)
        dead = action.dead if isinstance(action, Wait) else ()
    assert not world.waits and world.layout == wanted
    assert world.answer([NodeJoined(0)], ()) is None
    shrinks = shrink or (go_on and (wanted.data or 1) > 1)
    assert {"restart", "NoneType", *(("shrink", "grow") if shrinks else ("Wait",))} <= set(world.seen), world.seen
