"""What the processes of a run share about planted faults: which have struck, and whether the disk plays full. Nothing here is used
by a run without `--chaos`. Ranks (`training/hooks/rank_faults`) and supervisors claim and strike; whoever writes files asks `DISK`."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from pathlib import Path

from phalanx.events.records import FaultInjected
from phalanx.faults.grammar import Fault


class FaultClaims:
    """Which faults have struck: a file each, so that one strikes once although its step is taken again by another process."""

    def __init__(self, run_dir: Path):
        self.run_dir = run_dir
        self.folder = run_dir / "control" / "chaos"

    def clear(self) -> None:
        """Before a launch: what it asks for is its own."""
        shutil.rmtree(self.folder, ignore_errors=True)
        _flag(self.run_dir).unlink(missing_ok=True)

    def claim(self, number: int) -> bool:
        """Whether it has not struck yet, and the caller may strike now: exactly one is ever told so."""
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            fd = os.open(self.folder / str(number), os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        os.write(fd, repr(time.time()).encode())
        os.close(fd)
        return True

    def times(self) -> dict[int, float]:
        """When each struck, in seconds since 1970. Also of those whose record is lost: a process that is killed while the disk is
        full takes along what it could not write."""
        found = {}
        for path in self.folder.glob("[0-9]*"):
            with contextlib.suppress(ValueError):  # killed between the two
                found[int(path.name)] = float(path.read_text())
        return found

    def __contains__(self, number: int) -> bool:
        return (self.folder / str(number)).exists()


class SimulatedDisk:
    """The disk under this run's files. Once it is told where to look it can play full: checkpoints and event records of this process
    then fail as on a full disk, while the real one has room for everybody else."""

    def __init__(self) -> None:
        self._flag: str | None = None

    def watch(self, run_dir: Path | None) -> None:
        """Every process of a run whose faults fill the disk says this once; None: never mind."""
        self._flag = None if run_dir is None else str(_flag(run_dir))

    def ask(self) -> None:
        """Before something is written. OSError while the disk plays full."""
        if self._flag is not None and _until(self._flag) > time.time():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


DISK = SimulatedDisk()
"""Of this process."""


def fill_disk(run_dir: Path, seconds: float) -> None:
    """The disk plays full from now on, for so long. It ends by itself, whoever lives then."""
    flag = _flag(run_dir)
    flag.parent.mkdir(parents=True, exist_ok=True)
    partial = flag.with_name(flag.name + ".partial")
    partial.write_text(repr(time.time() + seconds))
    partial.replace(flag)


def fault_record(fault: Fault, step: int) -> FaultInjected:
    """The record of a fault, written before it strikes; `step` is being taken, or was the last where it strikes between steps."""
    return FaultInjected(fault=str(fault), rank=fault.rank, node=fault.node, step=step)


def _flag(run_dir: Path) -> Path:
    return run_dir / "control" / "disk-full"


def _until(flag: str) -> float:
    """When there is room again, in seconds since 1970."""
    try:
        with open(flag) as file:
            return float(file.read() or 0.0)
    except FileNotFoundError:
        return 0.0
