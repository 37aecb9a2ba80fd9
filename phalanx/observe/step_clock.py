"""What a rank does at every moment of a step: computing, waiting for others and for what, updating. `training/hooks/measurements` runs one for a
few steps of a launch, `observe/comm_timer` tells it of every wait between ranks.

A step is cut at every change from one thing to another, so that its parts add up to it, and nothing is looked at in between: a cut is a
look at the host's clock, or on a GPU an event in the stream that computes. What another stream does is seen only where that one waits
for it, and that is what exposed communication is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

PARTS = ("compute", "tensor", "context", "expert", "data", "bubble", "optimizer", "loading", "other")
"""What a step is cut into: the plan's names. Here "compute" is launching too, "bubble" the messages between stages, "optimizer" what is
offloaded: from within a rank they cannot be told apart. "loading" is waiting for the next batch."""

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
    """Which part it is to wait in a group that serves this technique. What all ranks agree on in a step is none of the named."""
    return _PARTS_OF_USES.get(use.removesuffix(" (whole)"), "other")


class Clock:
    """Of one rank, while it is entered. Of one thread at a time, like `busy.Waiting`."""

    def __init__(self, device: torch.device):
        self._on_gpu = device.type == "cuda"
        self._doing = ["other"]
        self._marks: list[tuple[str, Any]] = []
        self._started = 0.0
        self.seconds = 0.0
        """From beginning to end."""
        self.parts: dict[str, float] = {}
        """Seconds of each part that there was; their sum."""

    def __enter__(self) -> Clock:
        if self._on_gpu:
            torch.cuda.synchronize()  # what was begun before is not of this step
        self._started = perf_counter()
        self._mark()
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            return  # a device that has failed must not be waited for
        self._mark()
        if self._on_gpu:
            torch.cuda.synchronize()
        self.seconds = perf_counter() - self._started
        self._add_up()

    @contextmanager
    def inside(self, part: str) -> Iterator[None]:
        """Meanwhile the rank does this, then again what it did before."""
        self._doing.append(part)
        self._mark()
        try:
            yield
        finally:
            self._doing.pop()
            self._mark()

    def _mark(self) -> None:
        """From now on, what is being done."""
        if self._on_gpu:
            stamp: Any = torch.cuda.Event(enable_timing=True)
            stamp.record()
        else:
            stamp = perf_counter()
        self._marks.append((self._doing[-1], stamp))

    def _add_up(self) -> None:
        found = dict.fromkeys(PARTS, 0.0)
        for (doing, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            found[doing] += begin.elapsed_time(end) / 1000 if self._on_gpu else end - begin
        # The device begins a little after the host, and ends before it. On a host there is nothing between its own marks.
        found["other"] += max(0.0, self.seconds - sum(found.values()))
        self.parts = {part: seconds for part, seconds in found.items() if seconds > 0}
        self.seconds = sum(self.parts.values())
