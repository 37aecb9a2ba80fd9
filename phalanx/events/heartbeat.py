"""The heartbeat of a rank: a page of shared memory that training writes and the node's agent reads, without messages."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

Phase = Literal[
    "starting",
    "building",
    "restoring",
    "data",
    "computing",
    "updating",
    "between",
    "evaluating",
    "saving",
    "ending",
    "compiling",
]
PHASES: tuple[str, ...] = get_args(Phase)

_PAGE = struct.Struct("=QqqdddqqQ")
"""A count of writes, the fields of a `Beat`, and the count again: a reader that sees two different counts has read a half-written page."""


class Beat(NamedTuple):
    """One reading of a heartbeat."""

    step: int = 0
    """Last complete step."""
    phase: str = "starting"
    since: float = 0.0
    """Start of the phase on the monotonic clock. In messages between nodes, which share no clock: its age in seconds."""
    step_seconds: float = 0.0
    """Duration of the last step."""
    busy_seconds: float = 0.0
    """The part of it that the rank computed rather than waited for others."""
    steps_taken: int = 0
    """Steps in this generation."""
    generation: int = -1


class Heartbeat:
    """Writes the heartbeat of this rank. Without a path nobody reads it, at the same cost."""

    def __init__(self, path: Path | None = None):
        if path is None:
            self._page: mmap.mmap | bytearray = bytearray(_PAGE.size)
        else:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(fd, mmap.PAGESIZE)
            self._page = mmap.mmap(fd, mmap.PAGESIZE)
            os.close(fd)
        self._writes, self._beat = 0, Beat()
        self._write()

    @property
    def phase(self) -> str:
        return self._beat.phase

    def enter(self, phase: Phase) -> None:
        """Start another phase now."""
        self._write(phase=phase)

    def start(self, generation: int) -> None:
        """Start a generation; the rank has no state yet."""
        self._write(generation=generation, steps_taken=0, phase="starting")

    def begin(self, step: int) -> None:
        """Start training after `step` complete steps."""
        self._write(step=step, steps_taken=0)

    def stepped(self, step: int, seconds: float, busy: float) -> None:
        """A step is complete."""
        taken = self._beat.steps_taken + 1
        self._write(step=step, phase="between", step_seconds=seconds, busy_seconds=busy, steps_taken=taken)

    def _write(self, **changes: Any) -> None:
        self._writes += 1
        self._beat = self._beat._replace(since=time.monotonic(), **changes)
        step, phase, *rest = self._beat
        _PAGE.pack_into(self._page, 0, self._writes, step, PHASES.index(phase), *rest, self._writes)


def read(path: Path) -> Beat | None:
    """Read the heartbeat of a rank; None if there is none yet, or it is being written."""
    try:
        page = path.read_bytes()[: _PAGE.size]
    except FileNotFoundError:
        return None
    if len(page) < _PAGE.size:
        return None
    before, step, phase, *rest, after = _PAGE.unpack(page)
    if before != after or not before or not 0 <= phase < len(PHASES):
        return None
    return Beat(step, PHASES[phase], *rest)
