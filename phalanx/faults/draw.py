"""Random faults: the same ones in every process, since they follow from a seed. `--chaos "random …"` and campaigns draw here."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.faults.grammar import POINTS, RANDOM_KINDS, TARGETS, Fault, Kind

DEFAULT_KINDS = ("kill", "hang", "slow", "corrupt", "nan", "raise", "fill-disk", "drop-link", "kill-node")
"""What is drawn from where nothing is said."""
_IN_STEP = tuple(point for point in POINTS if point not in ("save", "evaluate"))  # points that every step has


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """How large a run is: where faults can strike."""

    steps: int
    ranks: int
    nodes: int
    victim: int = 0
    """The node that faults of nodes strike: were another gone at the same time, nothing might be left to go on from."""

    def kinds(self, asked: Sequence[str] = ()) -> tuple[str, ...]:
        """Those of what was asked for that a run with so many nodes has room for."""
        return tuple(kind for kind in asked or DEFAULT_KINDS if self.nodes > 1 or not _of_nodes(kind))


def expand_random(faults: Iterable[Fault], *, steps: int, ranks: int, nodes: int) -> tuple[Fault, ...]:
    """The faults with every `random` drawn: each step has one with the probability that it says. The place of a fault in what is
    returned is its number, the same in every process."""
    found: list[Fault] = []
    for fault in faults:
        if fault.kind != "random":
            found.append(fault)
            continue
        dice = random.Random(fault.seed)
        extent = Extent(steps=steps, ranks=ranks, nodes=nodes, victim=dice.randrange(nodes))
        kinds = extent.kinds(fault.kinds)
        struck = [step for step in range(1, steps + 1) if dice.random() < (fault.rate or 0.0)]
        found += [_draw(dice, dice.choice(kinds), step, extent) for step in struck if kinds]
    return tuple(found)


def draw_faults(
    count: int, *, steps: int, ranks: int, nodes: int, seed: int = 0, kinds: Sequence[str] = ()
) -> tuple[Fault, ...]:
    """Exactly `count` faults spread over the steps, as many of each kind as of any other, give or take one; at most one in a step.
    For campaigns. `kinds` in the words of `random`."""
    assert count <= steps - 1, "not more than one in a step, and none in the first"
    dice = random.Random(seed)
    extent = Extent(steps=steps, ranks=ranks, nodes=nodes, victim=dice.randrange(nodes))
    able = extent.kinds(kinds)
    drawn = [able[number % len(able)] for number in range(count)]
    dice.shuffle(drawn)
    _disk_first(drawn)
    width = (steps - 1) / count  # from the second step on: in the first one nothing is known yet
    places = [2 + int(number * width + dice.random() * (width - 1)) for number in range(count)]
    return tuple(_draw(dice, kind, step, extent) for kind, step in zip(drawn, places, strict=True))


def _disk_first(kinds: list[str]) -> None:
    """A disk that is full at the very end ends a run, and rightly so: what fills it comes in the first half."""
    late = [place for place in range(len(kinds) // 2, len(kinds)) if kinds[place] == "fill-disk"]
    early = [place for place in range(len(kinds) // 2) if kinds[place] != "fill-disk"]
    for one, other in zip(late, early, strict=False):
        kinds[one], kinds[other] = kinds[other], kinds[one]


def _of_nodes(kind: str) -> bool:
    return kind == "drop-link" or kind.endswith("-node")


def _draw(dice: random.Random, drawn: str, step: int, extent: Extent) -> Fault:
    """One fault of this kind in this step. What lasts is short: random faults come often."""
    assert drawn in RANDOM_KINDS, drawn
    kind: Kind = drawn.removesuffix("-node")  # type: ignore[assignment]
    rank = dice.randrange(extent.ranks)
    if drawn == "kill":
        return Fault(kind=kind, rank=rank, step=step, point=dice.choice(_IN_STEP))
    if drawn == "hang":  # some end by themselves before anybody minds, some do not
        return Fault(kind=kind, rank=rank, step=step, point=dice.choice(_IN_STEP), seconds=dice.choice((1.0, 30.0)))
    if drawn == "slow":
        last = min(extent.steps, step + dice.randrange(3, 9))
        return Fault(kind=kind, rank=rank, step=step, to=last, factor=float(dice.choice((2, 3, 5))))
    if drawn == "corrupt":
        return Fault(kind=kind, rank=rank, step=step, what=dice.choice(TARGETS))
    if drawn == "nan":
        # Rank 0 is there however few are left, so the step is left out in this run and in one that only this fault disturbs.
        return Fault(kind=kind, rank=0, step=step)
    if drawn == "raise":
        return Fault(kind=kind, rank=rank, step=step, point=dice.choice(_IN_STEP))
    if drawn == "freeze":
        return Fault(kind=kind, rank=rank, step=step, seconds=dice.choice((1.0, 10.0)))
    if drawn == "fill-disk":
        return Fault(kind=kind, step=step, seconds=2.0)
    if drawn == "drop-link":
        one, other = sorted(dice.sample(range(extent.nodes), 2))
        return Fault(kind=kind, link=(one, other), step=step, seconds=dice.choice((0.5, 5.0)))
    return Fault(kind=kind, node=extent.victim, step=step, seconds=dice.choice((1.0, 5.0)))
