"""What the processes of a run share about injected faults: which have happened, and whether the disk is simulated as full. Used by ranks
(`training/hooks/rank_faults`), agents (`control/node_faults`) and code that writes files. A run without `--chaos` pays nothing."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from pathlib import Path

from phalanx.events.records import FaultInjected
from phalanx.events.rundir import replace_file
from phalanx.faults.grammar import Fault


class FaultClaims:
    """Which faults have happened: one file each, so that a fault happens once although another process may repeat its step. A new launch
    removes the folder."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.folder = run_dir / "control" / "chaos"

    def claim(self, number: int) -> bool:
        """Whether the caller may inject this fault now: true for exactly one caller ever."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            with (self.folder / str(number)).open("x") as file:
                file.write(repr(time.time()))
        except FileExistsError:
            return False
        return True

    def times(self) -> dict[int, float]:
        """When each fault happened, in seconds since 1970. Complete even if a record was lost with a process that could not write it."""
        times = {}
        for path in self.folder.glob("[0-9]*"):
            with contextlib.suppress(ValueError):  # killed between creating and writing it
                times[int(path.name)] = float(path.read_text())
        return times


class SimulatedDisk:
    """Simulates a full disk for this process: while a flag file says so, checkpoints and event records fail with ENOSPC."""

    def __init__(self) -> None:
        self._flag: str | None = None

    def watch(self, run_dir: Path | None) -> None:
        """Enable the simulation for a run directory; None disables it."""
        self._flag = None if run_dir is None else str(_flag(run_dir))

    def check(self) -> None:
        """Raise OSError while the disk is simulated as full. Called before each write."""
        if self._flag is not None and _until(self._flag) > time.time():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


DISK = SimulatedDisk()
"""The disk of this process."""


def fill_disk(run_dir: Path, seconds: float) -> None:
    """Simulate a full disk for `seconds` from now. It ends by itself, even if all processes die."""
    flag = _flag(run_dir)
    flag.parent.mkdir(parents=True, exist_ok=True)
    replace_file(flag, repr(time.time() + seconds))


def fault_record(fault: Fault, step: int | None) -> FaultInjected:
    """The record of a fault, written before it happens in `step`; None: before the first step."""
    return FaultInjected(fault=str(fault), rank=fault.rank, node=fault.node, step=step)


def _flag(run_dir: Path) -> Path:
    return run_dir / "control" / "disk-full"


def _until(flag: str) -> float:
    try:
        with open(flag) as file:
            return float(file.read() or 0.0)
    except FileNotFoundError:
        return 0.0
