"""Memory replicas of one node: files in /dev/shm, two or three slots for each rank, of which one is always complete. The replica server
owns the folder; the node's workers copy into it. Does not import torch.

    /dev/shm/phalanx-1000/RUN-node0/     one node of one run; `lock` is held as long as a process uses it
        00000-00003-a.safetensors        generation 0, rank 3, slot a: the rank's file of a checkpoint
        00000-00003-a.json               its seal: which step it is, with checksums; written last, removed first

A file without a seal contains nothing. While one slot is the newest, the other is written, so that a process that is killed during a copy
leaves the older one.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
import socket
import stat
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from phalanx.checkpointing.format import SUFFIX, RunMetadata, Sidecar
from phalanx.events.rundir import replace_file
from phalanx.spec.layout import Layout
from phalanx.spec.run import Run

SLOTS = ("a", "b", "c")
HANDOFF_SLOT = "h"
"""The slot that a survivor writes its state into when a generation ends."""
LOCK = "lock"
ADDRESS = "server.json"
"""Address and token of the node's replica server, for its workers."""
_SEAL = ".json"
_USABLE = 0.9  # of the free memory; the rest is for the other processes of the machine
_DEFAULT_SHARE = 0.4  # of the free memory, for replicas that nobody asked for
_CGROUP = Path("/sys/fs/cgroup")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def slots_for(run: Run, layout: Layout) -> tuple[str, ...]:
    """The slots of each rank: one is the newest, one is written. Where replicas are compared, one more keeps the newest state that was found
    equal: after a corruption, later ones are wrong."""
    compares = run.resilience.check_every and run.engine.name == "torch"
    return SLOTS if compares and (layout.data or 1) * layout.context > 1 else SLOTS[:2]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCopy:
    """One rank's part of the state of one step, in memory."""

    node: int
    """Where the rank runs, or ran."""
    generation: int
    rank: int
    ranks: int
    """Number of ranks of the generation: this many copies of a step are the complete state."""
    slot: str
    step: int
    sidecar: Sidecar
    metadata: RunMetadata | None = None
    """Of the run; with rank 0's copy."""
    time: float | None = None
    """Seconds since 1970 of the copy; with rank 0's."""

    @property
    def size(self) -> int:
        return self.sidecar.size

    def to_json(self) -> dict[str, Any]:
        table = {key: getattr(self, key) for key in ("node", "generation", "rank", "ranks", "slot", "step", "time")}
        metadata = None if self.metadata is None else self.metadata.to_json()
        return table | {"sidecar": self.sidecar.to_json().decode(), "metadata": metadata}

    @staticmethod
    def from_json(table: dict[str, Any]) -> RankCopy:
        metadata = None if table["metadata"] is None else RunMetadata.from_json(table["metadata"])
        return RankCopy(**table | {"sidecar": Sidecar.from_json(table["sidecar"]), "metadata": metadata})


class SlotDir:
    """The folder of one node."""

    def __init__(self, folder: Path):
        self.folder = folder

    def slot(self, generation: int, rank: int, slot: str) -> Path:
        """The file of a slot."""
        assert slot in (*SLOTS, HANDOFF_SLOT)
        return self.folder / f"{generation:05d}-{rank:05d}-{slot}{SUFFIX}"

    def reserve(self, generation: int, rank: int, size: int, slots: tuple[str, ...], later: tuple[str, ...] = ()) -> None:
        """Allocate a rank's slots now: a worker that copies into a full file system would be killed. OSError, with the numbers, if there
        is too little memory for them and for those that are allocated later."""

        def missing(slots: tuple[str, ...]) -> list[Path]:
            paths = (self.slot(generation, rank, slot) for slot in slots)
            return [path for path in paths if not (path.exists() and path.stat().st_size == size)]

        count, free = len(missing((*slots, *later))), free_bytes(self.folder)
        if (need := count * size) > _USABLE * free:
            raise OSError(
                f"memory replicas of rank {rank} need {need / 2**20:,.0f} MiB ({count} times {size / 2**20:,.0f}), but "
                f"{self.folder} has {free / 2**20:,.0f} MiB free, of which {_USABLE:.0%} may be used"
            )
        for path in missing(slots):
            path.with_suffix(_SEAL).unlink(missing_ok=True)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, size)
                if size:
                    os.posix_fallocate(fd, 0, size)
            except OSError as error:
                path.unlink()
                raise OSError(f"{size / 2**20:,.0f} MiB cannot be allocated in {self.folder} ({error.strerror})") from None
            finally:
                os.close(fd)

    def unseal(self, generation: int, rank: int, slot: str) -> None:
        """The slot is about to be written: from now on it contains nothing."""
        self.slot(generation, rank, slot).with_suffix(_SEAL).unlink(missing_ok=True)

    def seal(self, copy: RankCopy) -> None:
        """The slot is complete: from now on it is a copy, atomically."""
        path = self.slot(copy.generation, copy.rank, copy.slot)
        replace_file(path.with_suffix(_SEAL), json.dumps(copy.to_json()))

    def copies(self) -> list[RankCopy]:
        """All complete copies."""
        copies = []
        for path in sorted(self.folder.glob(f"*-*-?{_SEAL}")):
            try:
                copies.append(RankCopy.from_json(json.loads(path.read_text())))
            except FileNotFoundError:
                continue  # unsealed at this moment
        return copies

    def sealed_slot(self, generation: int, rank: int, slot: str, step: int) -> Path:
        """The file of a slot that contains this step; else FileNotFoundError."""
        path = self.slot(generation, rank, slot)
        status = path.with_suffix(_SEAL).stat()
        if _sealed_step(path.with_suffix(_SEAL), status.st_ino, status.st_mtime_ns) != step:
            raise FileNotFoundError(f"{path} no longer contains step {step}")
        return path

    def discard(self, before: int, after: int | None = None) -> None:
        """Free the memory of generations before this one, and forget copies of later steps than `after`."""
        for copy in self.copies():
            if after is not None and copy.step > after:
                self.unseal(copy.generation, copy.rank, copy.slot)
        for path in self.folder.glob(f"*-*-?{SUFFIX}"):
            if int(path.name.split("-")[0]) < before:
                path.with_suffix(_SEAL).unlink(missing_ok=True)
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@functools.lru_cache(maxsize=1024)  # a large slot is read in many parts
def _sealed_step(seal: Path, inode: int, changed: int) -> int:
    """The step in a seal. A new seal has another inode or time."""
    return int(json.loads(seal.read_text())["step"])


def free_bytes(folder: Path) -> int:
    """Bytes that can be allocated in a folder in memory: limited by its file system, often small in a container, and by the machine."""
    status = os.statvfs(folder)
    return min(status.f_bavail * status.f_frsize, free_memory())


def default_room() -> float:
    """Bytes that replicas may take on this machine if the run file does not ask for them. The file system has few other users; the memory
    behind it has many."""
    root = default_root()
    status = os.statvfs(root if root.is_dir() else root.parent)
    return min(_USABLE * status.f_bavail * status.f_frsize, _DEFAULT_SHARE * free_memory())


def free_memory() -> int:
    """Bytes that this machine, or the container around this process, has available."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    available = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    return max(0, min(next(available, sys.maxsize), _cgroup_available(_CGROUP)))


def _cgroup_available(group: Path) -> int:
    """Bytes that this container may still allocate. Cached files would make room."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        usage = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max", or no such limits
        return sys.maxsize
    return limit - used + int(usage.get("inactive_file", 0)) + int(usage.get("active_file", 0))


def machine_id() -> str:
    """Identifies this machine until it reboots."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def default_root() -> Path:
    """A folder in memory that only this user can access."""
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"phalanx-{os.getuid()}"


def claim(root: Path, name: str) -> tuple[Path, int]:
    """Create and lock the folder of one node of one run; removes folders of dead runs next to it. Returns the folder and the lock, which
    is held as long as any process has it open. OSError if another run holds it."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise OSError(f"{root} is not a folder that only this user can access: remove it")
    remove_stale(root, name)
    folder = root / name
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # another process removed the folder as stale just now
        if not _lock(lock):
            os.close(lock)
            raise OSError(f"{folder} is in use by another process")
        if _is_same_file(lock, folder / LOCK):
            return folder, lock
        os.close(lock)


def remove_stale(root: Path, keep: str | None = None) -> list[str]:
    """Remove the folders of dead runs; returns their names."""
    removed = []
    for folder in (path for path in sorted(root.iterdir()) if path.is_dir() and not path.is_symlink()):
        if folder.name == keep:
            continue
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # being created, or being removed
        try:
            if _lock(lock):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder.name)
        finally:
            os.close(lock)
    return removed


def _lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is_same_file(fd: int, path: Path) -> bool:
    """Whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
