"""Compares a node's clock with the controller's, over the control plane, so that `phalanx trace` can lay the timelines of several hosts side by
side. As in NTP: the controller's answer is taken to have been written in the middle of the round trip, and the shortest of several counts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from phalanx.control import protocol
from phalanx.events.records import ClockAligned

_ASKED = 8
"""Round trips of a comparison: in one of them, probably nobody was kept waiting."""
_PAUSE = 0.05  # seconds between two of them
_EVERY = 30.0  # seconds between two comparisons: clocks drift by some microseconds a second


class RoundTrip(NamedTuple):
    """A question to the controller, in seconds of both monotonic clocks."""

    asked: float
    controller: float
    answered: float

    @property
    def error(self) -> float:
        """The offset cannot be wrong by more."""
        return (self.answered - self.asked) / 2

    @property
    def offset(self) -> float:
        """To add to this node's clock to get the controller's."""
        return self.controller - (self.asked + self.answered) / 2


class ClockSync:
    """The comparisons of one node."""

    def __init__(self, node: int, ask: Callable[[protocol.ClockAsked], None], emit: Callable[[ClockAligned], None]):
        self._node, self._ask, self._emit = node, ask, emit
        self._trips: list[RoundTrip] = []
        self._reference = node

    def on_answer(self, answer: protocol.ClockAnswered) -> None:
        if answer.node != self._reference:  # another controller
            self._trips, self._reference = [], answer.node
        self._trips.append(RoundTrip(answer.asked, answer.now, time.monotonic()))

    async def run(self) -> None:
        """Compares clocks until it is cancelled."""
        while True:
            self._trips = []
            for _ in range(_ASKED):
                self._ask(protocol.ClockAsked(at=time.monotonic()))
                await asyncio.sleep(_PAUSE)
            if self._trips and self._reference != self._node:
                best = min(self._trips, key=lambda trip: trip.error)
                self._emit(ClockAligned(node=self._node, reference=self._reference, offset=best.offset, error=best.error))
            await asyncio.sleep(_EVERY if self._trips else _ASKED * _PAUSE)
