"""Times the parts of a step on one rank: computing, waiting for others by cause, updating. `training/hooks/measurements` runs it in a few
steps of a launch; `observe/comm_timer` reports every wait to it.

A step is cut wherever one activity changes to another, so the parts add up to the whole. A cut reads the host's clock, or on a GPU
records an event in the compute stream. Work of other streams shows only where the compute stream waits for it: that is exposed
communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from phalanx import accelerator

PARTS = ("compute", "tensor", "context", "expert", "data", "bubble", "optimizer", "loading", "other")
"""Parts of a step, named as in the plan. Here "compute" includes kernel launches, "bubble" the messages between stages, "optimizer" the
transfers of offloaded state: a rank cannot separate them. "loading" is waiting for the next batch."""

_PARTS_OF_USES = {
    "tensor": "tensor",
    "context": "context",
    "expert": "expert",
    "expert tensor": "expert",
    "data": "data",
    "shard": "data",
    "experts' data": "data",
    "experts' shard": "data",
    "tied": "data",
    "local steps": "data",
    "pipeline": "bubble",
    "muon": "optimizer",
}


def part_of(use: str) -> str:
    """The part that a wait in a group of this use belongs to; "other" for what all ranks agree on in a step."""
    return _PARTS_OF_USES.get(use.removesuffix(" (whole)"), "other")


class Clock:
    """Times one rank while it is entered. Used by one thread at a time, like `comm_timer.CommTimer`."""

    def __init__(self, device: torch.device):
        self._accelerator = accelerator.of(device)
        self._activities = ["other"]
        self._marks: list[tuple[str, Any]] = []
        self._started = 0.0
        self.seconds = 0.0
        """Of the whole step."""
        self.parts: dict[str, float] = {}
        """Seconds of each part that occurred; they add up to `seconds`."""

    def __enter__(self) -> Clock:
        self._accelerator.synchronize()  # earlier work is not part of this step
        self._started = perf_counter()
        self._mark()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            return  # do not wait for a device that has failed
        self._mark()
        self._accelerator.synchronize()
        self.seconds = perf_counter() - self._started
        self._add_up()

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Meanwhile time counts as this part, afterwards as the one before."""
        self._activities.append(part)
        self._mark()
        try:
            yield
        finally:
            self._activities.pop()
            self._mark()

    def _mark(self) -> None:
        """Record when the current activity begins."""
        stamp: Any = perf_counter()
        if self._accelerator.asynchronous:
            stamp = self._accelerator.event(timing=True)
            stamp.record()
        self._marks.append((self._activities[-1], stamp))

    def _add_up(self) -> None:
        totals = dict.fromkeys(PARTS, 0.0)
        for (activity, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            totals[activity] += begin.elapsed_time(end) / 1000 if self._accelerator.asynchronous else end - begin
        # The device begins a little after the host and ends before it. On a host nothing lies between the marks.
        totals["other"] += max(0.0, self.seconds - sum(totals.values()))
        self.parts = {part: seconds for part, seconds in totals.items() if seconds > 0}
        self.seconds = sum(self.parts.values())
