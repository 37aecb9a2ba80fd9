"""What a rank is doing, on a page of memory that its node's supervisor reads: no message is sent for it. Training writes, launch reads."""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

Phase = Literal[
    "starting", "building", "restoring", "data", "computing", "updating", "between", "evaluating", "saving", "ending"
]
PHASES: tuple[str, ...] = get_args(Phase)

# count before, generation, step, phase, since, step seconds, busy seconds, steps taken, memory, count after
_PAGE = struct.Struct("=QqqqdddqqQ")


@dataclass(frozen=True, slots=True)
class Beat:
    """One look."""

    step: int = 0
    """The last that is complete."""
    phase: str = "starting"
    since: float = 0.0
    """When the phase began; seconds of the machine's monotonic clock."""
    step_seconds: float = 0.0
    """Of the last step."""
    busy_seconds: float = 0.0
    """Of those, spent on this rank's own work rather than waiting for others."""
    taken: int = 0
    """Steps that this generation has taken."""
    memory: int = 0
    generation: int = -1
    """That the rank works in."""


class Heartbeat:
    """The writing end. Without a path it goes nowhere, at the same cost."""

    def __init__(self, path: Path | None = None):
        if path is None:
            self._page: mmap.mmap | bytearray = bytearray(_PAGE.size)
        else:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            os.ftruncate(fd, mmap.PAGESIZE)
            self._page = mmap.mmap(fd, mmap.PAGESIZE)
            os.close(fd)
        self._count = 0
        self.generation = -1
        self.step = 0
        self.taken = 0
        self.memory = 0
        self.phase: Phase = "starting"
        self._seconds = self._busy = 0.0
        self._write()

    def enter(self, phase: Phase) -> None:
        """This rank does something else from now on."""
        self.phase = phase
        self._write()

    def start(self, generation: int) -> None:
        """A generation of ranks begins; it has no state yet."""
        self.generation, self.taken = generation, 0
        self.enter("starting")

    def begin(self, step: int) -> None:
        """Training begins, `step` steps being complete."""
        self.step, self.taken = step, 0
        self._write()

    def stepped(self, step: int, seconds: float, busy: float, memory: int) -> None:
        """A step is complete."""
        self.step, self.taken, self.memory = step, self.taken + 1, memory
        self._seconds, self._busy = seconds, busy
        self.enter("between")

    def _write(self) -> None:
        self._count += 1
        since = time.monotonic()
        values = (
            self.generation,
            self.step,
            PHASES.index(self.phase),
            since,
            self._seconds,
            self._busy,
            self.taken,
            self.memory,
        )
        # The number behind differs from the one before while it is written: a reader looks again.
        _PAGE.pack_into(self._page, 0, self._count, *values, self._count)


def read(path: Path) -> Beat | None:
    """What a rank does now; None where it has said nothing yet."""
    try:
        page = path.read_bytes()[: _PAGE.size]
    except FileNotFoundError:
        return None
    if len(page) < _PAGE.size:
        return None
    before, generation, step, phase, since, seconds, busy, taken, memory, after = _PAGE.unpack(page)
    if before != after or not before or not 0 <= phase < len(PHASES):
        return None
    return Beat(step, PHASES[phase], since, seconds, busy, taken, memory, generation)
