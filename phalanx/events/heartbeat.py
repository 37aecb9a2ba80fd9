"""The heartbeat of a rank: a page of shared memory that training writes and the node's agent reads, without messages."""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import Literal, NamedTuple, get_args

Phase = Literal[
    "starting", "building", "restoring", "data", "computing", "updating", "between", "evaluating", "saving", "ending"
]
PHASES: tuple[str, ...] = get_args(Phase)

# write count, generation, step, phase, since, step seconds, busy seconds, steps taken, memory, write count again
_PAGE = struct.Struct("=QqqqdddqqQ")


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
    memory: int = 0
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
        self._writes = 0
        self.generation = -1
        self.step = 0
        self.steps_taken = 0
        self.memory = 0
        self.phase: Phase = "starting"
        self._step_seconds = self._busy_seconds = 0.0
        self._write()

    def enter(self, phase: Phase) -> None:
        """Start another phase now."""
        self.phase = phase
        self._write()

    def start(self, generation: int) -> None:
        """Start a generation; the rank has no state yet."""
        self.generation, self.steps_taken = generation, 0
        self.enter("starting")

    def begin(self, step: int) -> None:
        """Start training after `step` complete steps."""
        self.step, self.steps_taken = step, 0
        self._write()

    def stepped(self, step: int, seconds: float, busy: float, memory: int) -> None:
        """A step is complete."""
        self.step, self.steps_taken, self.memory = step, self.steps_taken + 1, memory
        self._step_seconds, self._busy_seconds = seconds, busy
        self.enter("between")

    def _write(self) -> None:
        self._writes += 1
        values = (
            self.generation,
            self.step,
            PHASES.index(self.phase),
            time.monotonic(),
            self._step_seconds,
            self._busy_seconds,
            self.steps_taken,
            self.memory,
        )
        # The count comes first and last: a reader that sees two different counts has read a page while it was written.
        _PAGE.pack_into(self._page, 0, self._writes, *values, self._writes)


def read(path: Path) -> Beat | None:
    """Read the heartbeat of a rank; None if there is none yet, or it is being written."""
    try:
        page = path.read_bytes()[: _PAGE.size]
    except FileNotFoundError:
        return None
    if len(page) < _PAGE.size:
        return None
    before, generation, step, phase, since, seconds, busy, steps_taken, memory, after = _PAGE.unpack(page)
    if before != after or not before or not 0 <= phase < len(PHASES):
        return None
    return Beat(step, PHASES[phase], since, seconds, busy, steps_taken, memory, generation)
