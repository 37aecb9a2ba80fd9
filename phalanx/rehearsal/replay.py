"""What a second step of the same program would take, from what the first was seen to: what the first has made for good is there from
the beginning, and what it left to be forgotten goes first. Also all of it through a GPU's allocator. Used by `rehearsal/rehearse`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from phalanx.rehearsal.allocator import Allocator, Block, NoRoom
from phalanx.rehearsal.ledger import Ledger, Piece


@dataclass(frozen=True, slots=True)
class Lasting:
    """What became of the pieces of a first step."""

    built: int
    """Events before it."""
    kept: frozenset[int]
    """Pieces that it made and that stay."""
    forgotten: frozenset[int]
    """Those that the next step begins with letting go: its gradients."""


def lasting(ledger: Ledger, built: int) -> Lasting:
    """`built`: events that came before the step."""
    alive: dict[int, None] = {}
    for event in ledger.events[built:]:
        if event > 0:
            alive[event] = None
        else:
            alive.pop(-event, None)
    forgotten = frozenset(number for number in alive if ledger.components.get(number) == "gradients")
    return Lasting(built, frozenset(alive) - forgotten, forgotten)


def again(ledger: Ledger, found: Lasting) -> Iterator[int]:
    """The events of the second step."""
    for number in found.forgotten:
        yield -number
    for event in ledger.events[found.built :]:
        if event not in found.kept:
            yield event


@dataclass(frozen=True, slots=True)
class Peak:
    """The most of the first two steps."""

    bytes: int
    at: int
    """Events of the first step, from the beginning of all, after which it is reached."""
    second: bool


def peak(ledger: Ledger, found: Lasting) -> Peak:
    now, most, at = 0, -1, 0
    for index, event in enumerate(ledger.events, start=1):
        now += ledger.taken(event) if event > 0 else -ledger.taken(-event)
        if index > found.built and now > most:
            most, at = now, index
    first = Peak(most, at, False)
    now -= sum(ledger.taken(number) for number in found.forgotten)
    most, at = -1, 0
    for index, event in enumerate(ledger.events[found.built :], start=found.built + 1):
        if event not in found.kept:
            now += ledger.taken(event) if event > 0 else -ledger.taken(-event)
        if now > most:
            most, at = now, index
    second = Peak(most, at, True)
    return second if second.bytes >= first.bytes else first


def living(ledger: Ledger, found: Lasting, top: Peak) -> list[Piece]:
    """All that lives at the peak."""
    alive = list(ledger.living(top.at))
    if top.second:
        known = {piece.number for piece in alive}
        alive += [piece for piece in ledger.living(len(ledger.events)) if piece.number in found.kept - known]
    return alive


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a GPU's allocator makes of it."""

    allocated: int
    reserved: int
    without: tuple[int, NoRoom] | None
    """The piece that there is no room for, and why; None: there is for all."""


def reserve(ledger: Ledger, found: Lasting, limit: int | None) -> Reserved:
    """Two steps through an allocator that may reserve so many bytes."""
    allocator = Allocator(limit)
    blocks: dict[int, Block] = {}
    sizes, streams = ledger.sizes, ledger.streams

    def through(events: Iterator[int]) -> None:
        for event in events:
            if event < 0:
                if (block := blocks.pop(-event, None)) is not None:
                    allocator.free(block)
            elif sizes[event]:
                try:
                    blocks[event] = allocator.allocate(sizes[event], streams[event])
                except NoRoom as error:
                    raise _Without(event, error) from None

    without = None
    try:
        through(iter(ledger.events))
        through(again(ledger, found))
    except _Without as stopped:
        without = stopped.piece, stopped.error
    return Reserved(allocator.most_allocated, allocator.most_reserved, without)


class _Without(Exception):
    def __init__(self, piece: int, error: NoRoom):
        super().__init__()
        self.piece, self.error = piece, error
