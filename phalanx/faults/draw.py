"""Draws random faults from a seed, so that every process gets the same ones. Used for `--chaos "random …"` and for chaos campaigns."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from phalanx.faults.grammar import DEFAULT_KINDS, POINTS, RANDOM_KINDS, TARGETS, Fault, Kind, needs_nodes

_IN_STEP = tuple(point for point in POINTS if point not in ("save", "evaluate"))  # points that every step passes


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """The size of a run: where faults can happen."""

    steps: int
    ranks: int
    nodes: int
    victim: int = 0
    """The only node that node faults hit: with two nodes lost at once, no state might be left."""

    def kinds(self, requested: Sequence[str] = ()) -> tuple[str, ...]:
        """The requested kinds that are possible with this number of nodes."""
        return tuple(kind for kind in requested or DEFAULT_KINDS if self.nodes > 1 or not needs_nodes(kind))


def expand_random(faults: Iterable[Fault], *, steps: int, ranks: int, nodes: int) -> tuple[Fault, ...]:
    """Replace every `random` fault by drawn ones: each step has one with the given probability. The index of a fault in the result is its
    number, equal in every process."""
    expanded: list[Fault] = []
    for fault in faults:
        if fault.kind != "random":
            expanded.append(fault)
            continue
        dice = random.Random(fault.seed)
        extent = Extent(steps=steps, ranks=ranks, nodes=nodes, victim=dice.randrange(nodes))
        kinds = extent.kinds(fault.kinds)
        steps_hit = [step for step in range(1, steps + 1) if dice.random() < (fault.rate or 0.0)]
        expanded += [_draw(dice, dice.choice(kinds), step, extent) for step in steps_hit if kinds]
    return tuple(expanded)


def draw_faults(
    count: int, *, steps: int, ranks: int, nodes: int, seed: int = 0, kinds: Sequence[str] = ()
) -> tuple[Fault, ...]:
    """Draw exactly `count` faults, spread over the steps, at most one in a step, with equally many of each kind. `kinds`: as in `random`."""
    assert count <= steps - 1, "not more than one in a step, and none in the first"
    dice = random.Random(seed)
    extent = Extent(steps=steps, ranks=ranks, nodes=nodes, victim=dice.randrange(nodes))
    able = extent.kinds(kinds)
    drawn = [able[number % len(able)] for number in range(count)]
    dice.shuffle(drawn)
    _fill_disk_early(drawn)
    width = (steps - 1) / count  # from the second step on: before the first there is no state to recover
    places = [2 + int(number * width + dice.random() * (width - 1)) for number in range(count)]
    return tuple(_draw(dice, kind, step, extent) for kind, step in zip(drawn, places, strict=True))


def _fill_disk_early(kinds: list[str]) -> None:
    """Move disk faults to the first half: a disk that is full at the very end rightly ends the run."""
    late = [place for place in range(len(kinds) // 2, len(kinds)) if kinds[place] == "fill-disk"]
    early = [place for place in range(len(kinds) // 2) if kinds[place] != "fill-disk"]
    for last, first in zip(late, early, strict=False):
        kinds[last], kinds[first] = kinds[first], kinds[last]


def _draw(dice: random.Random, drawn: str, step: int, extent: Extent) -> Fault:
    """Draw one fault of this kind in this step. Durations are short, because random faults are frequent."""
    assert drawn in RANDOM_KINDS, drawn
    kind: Kind = drawn.removesuffix("-node")  # type: ignore[assignment]
    rank = dice.randrange(extent.ranks)
    if drawn in ("kill", "raise"):
        return Fault(kind=kind, rank=rank, step=step, point=dice.choice(_IN_STEP))
    if drawn == "hang":  # some end before they are noticed, some do not
        return Fault(kind=kind, rank=rank, step=step, point=dice.choice(_IN_STEP), seconds=dice.choice((1.0, 30.0)))
    if drawn == "slow":
        last = min(extent.steps, step + dice.randrange(3, 9))
        return Fault(kind=kind, rank=rank, step=step, to=last, factor=float(dice.choice((2, 3, 5))))
    if drawn == "corrupt":
        return Fault(kind=kind, rank=rank, step=step, what=dice.choice(TARGETS))
    if drawn == "nan":
        # Rank 0 exists on every layout, so the same step is skipped whatever else has happened.
        return Fault(kind=kind, rank=0, step=step)
    if drawn == "freeze":
        return Fault(kind=kind, rank=rank, step=step, seconds=dice.choice((1.0, 10.0)))
    if drawn == "fill-disk":
        return Fault(kind=kind, step=step, seconds=2.0)
    if drawn == "drop-link":
        first, second = sorted(dice.sample(range(extent.nodes), 2))
        return Fault(kind=kind, link=(first, second), step=step, seconds=dice.choice((0.5, 5.0)))
    return Fault(kind=kind, node=extent.victim, step=step, seconds=dice.choice((1.0, 5.0)))
