"""Messages that wait for a server. Few are kept; when it does not answer, the next attempt waits longer, and the oldest messages are dropped."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

_Message = TypeVar("_Message")
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0
"""Seconds until the next attempt after a failed one: twice as long each time."""


class Outbox(Generic[_Message]):
    """Sends messages in their order, some at a time."""

    def __init__(
        self,
        send: Callable[[list[_Message]], None],
        *,
        limit: int,
        batch: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`send` raises OSError if the server did not take the messages."""
        self._send, self._batch, self._clock = send, batch, clock
        self._waiting: deque[_Message] = deque()
        self._limit = limit
        self._wait, self._due = _FIRST_WAIT, -float("inf")
        self.dropped = 0
        """Messages that were given up since the last success."""

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, messages: Iterable[_Message]) -> None:
        for message in messages:
            if len(self._waiting) == self._limit:
                self._waiting.popleft()
                self.dropped += 1
            self._waiting.append(message)

    def deliver(self, *, at_once: bool = False) -> OSError | None:
        """Send what waits, if it is time for an attempt; returns why that failed."""
        while self._waiting and (at_once or self._clock() >= self._due):
            batch = [self._waiting[index] for index in range(min(self._batch, len(self._waiting)))]
            try:
                self._send(batch)
            except OSError as error:
                self._due = self._clock() + self._wait
                self._wait = min(2 * self._wait, _LONGEST_WAIT)
                return error
            for _ in batch:
                self._waiting.popleft()
            self._wait, self._due, self.dropped = _FIRST_WAIT, -float("inf"), 0
        return None
