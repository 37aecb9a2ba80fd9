"""The request to end training, from one rank to all. Signal handlers and the rank's control thread set it; the ranks agree on it in
every step and every evaluation."""

from __future__ import annotations

PAUSE, STOP = 1, 2
"""Requests, by priority: if ranks have different ones, all ranks follow the larger."""


class StopSignal:
    """What this rank was asked to do, and what all ranks have agreed on."""

    def __init__(self) -> None:
        self._reason: str | None = None
        self.paused = False
        """Training pauses without saving: other ranks will take the same step."""
        self.agreed = 0
        """0, PAUSE or STOP: known to all ranks."""

    def stop(self, reason: str) -> None:
        """Asks all ranks to save and stop. Safe to call from a signal handler."""
        self._reason = reason

    def pause(self) -> None:
        """Asks all ranks to stop without saving."""
        self.paused = True

    def requested(self) -> int:
        """What this rank was asked: 0, PAUSE or STOP."""
        return STOP if self._reason is not None else PAUSE if self.paused else 0

    @property
    def reason(self) -> str:
        """Why the run stops."""
        return self._reason or "asked to stop"

    def agree(self, request: int) -> None:
        """All ranks have learned that some rank has this request."""
        if request == STOP:
            self._reason = self._reason or "another rank was told to stop"
        self.paused, self.agreed = request == PAUSE, request
