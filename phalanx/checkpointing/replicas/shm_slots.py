"""What one node keeps in its host memory: files in /dev/shm, two for each rank, of which one is always whole. The holder process
owns the folder; the node's workers copy into it. Knows no tensors, and never loads torch.

    /dev/shm/phalanx-1000/RUN-node0/     one node of one run; `lock` is held as long as somebody has a use for it
        00000-00003-a.safetensors        generation 0, rank 3, slot a: the rank's file of a checkpoint
        00000-00003-a.json               says of which step, with its checksums: written last, removed first

A file without its .json holds nothing. The other slot is written to while this one is the newest, so that a process killed in the
middle of a copy leaves the older one.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from phalanx.checkpointing import format
from phalanx.checkpointing.location import Local

SLOTS = ("a", "b")
HANDOFF_SLOT = "h"
"""The slot of what a survivor hands over when a generation ends."""
LOCK = "lock"
ADDRESS = "holder.json"
_SEALED = ".json"
_USED = 0.9  # of the free memory may be taken: the rest of the machine lives on


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCopy:
    """One rank's part of the state of one step, in memory."""

    node: int
    """Where the rank is, or was."""
    generation: int
    rank: int
    ranks: int
    """Of that generation: so many copies of the step are the whole state."""
    slot: str
    step: int
    about: dict[str, Any]
    """What a checkpoint tells about the rank's file: bytes, checksums, names."""
    contents: dict[str, Any] | None = field(default=None)
    """The plain part of the state, with rank 0."""

    @property
    def size(self) -> int:
        return int(self.about["bytes"])

    @property
    def file(self) -> str:
        return format.file_name(self.rank, self.ranks)

    @property
    def text(self) -> bytes:
        """What stands beside the file in a checkpoint."""
        return json.dumps(self.about).encode() + b"\n"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(table: dict[str, Any]) -> RankCopy:
        return RankCopy(**table)


class SlotDir:
    """The folder of one node."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._known: dict[Path, tuple[tuple[int, int], int]] = {}

    def image(self, generation: int, rank: int, slot: str) -> Path:
        assert slot in (*SLOTS, HANDOFF_SLOT)
        return self.folder / f"{generation:05d}-{rank:05d}-{slot}{format.SUFFIX}"

    def reserve(self, generation: int, rank: int, size: int, slots: tuple[str, ...] = SLOTS) -> None:
        """Memory for a rank's slots, taken now: a worker that copies into a full file system would be killed.

        OSError with the numbers where there is too little.
        """
        paths = [self.image(generation, rank, slot) for slot in slots]
        missing = [path for path in paths if not (path.exists() and path.stat().st_size == size)]
        need, free = len(missing) * size, free_bytes(self.folder)
        if need > _USED * free:
            raise OSError(
                f"copies in memory of rank {rank} need {need / 2**20:,.0f} MiB ({len(missing)} times {size / 2**20:,.0f}), but {self.folder} has "
                f"{free / 2**20:,.0f} MiB free, of which {_USED:.0%} may be taken"
            )
        for path in missing:
            self._unseal(path)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(fd, size)
                if size:
                    os.posix_fallocate(fd, 0, size)
            except OSError as error:
                path.unlink()
                raise OSError(f"{size / 2**20:,.0f} MiB cannot be had in {self.folder} ({error.strerror})") from None
            finally:
                os.close(fd)

    def unseal(self, generation: int, rank: int, slot: str) -> None:
        """The slot will be written to: from here on it holds nothing."""
        self._unseal(self.image(generation, rank, slot))

    def _unseal(self, path: Path) -> None:
        path.with_suffix(_SEALED).unlink(missing_ok=True)

    def seal(self, copy: RankCopy) -> None:
        """The slot is whole: from here on it is a copy, in one instant."""
        path = self.image(copy.generation, copy.rank, copy.slot).with_suffix(_SEALED)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(copy.to_json()))
        os.replace(partial, path)

    def copies(self) -> list[RankCopy]:
        """All that is whole."""
        found = []
        for path in sorted(self.folder.glob(f"*-*-?{_SEALED}")):
            try:
                found.append(RankCopy.from_json(json.loads(path.read_text())))
            except FileNotFoundError:
                continue  # unsealed at this moment
        return found

    def read(self, path: Path, step: int, begin: int, length: int) -> bytes:
        """Bytes of an image."""
        self.see(path, step)
        return Local(path).read(begin, length)

    def see(self, path: Path, step: int) -> None:
        """That an image holds this step; FileNotFoundError where it does not, or not any more."""
        if self._step(path.with_suffix(_SEALED)) != step:
            raise FileNotFoundError(f"{path} does not hold step {step} any more")

    def _step(self, sealed: Path) -> int:
        found = sealed.stat()
        key = (found.st_ino, found.st_mtime_ns)
        known = self._known.get(sealed)  # read again and again while a large image is read in parts
        if known is None or known[0] != key:
            known = self._known[sealed] = (key, int(json.loads(sealed.read_text())["step"]))
        return known[1]

    def forget(self, before: int, but: int | None = None) -> None:
        """Give back the memory of generations before this one, except of copies of step `but`."""
        kept = {(copy.generation, copy.rank, copy.slot) for copy in self.copies() if copy.step == but}
        for path in self.folder.glob(f"*-*-?{format.SUFFIX}"):
            generation, rank, slot = path.stem.split("-")
            if int(generation) < before and (int(generation), int(rank), slot) not in kept:
                self._unseal(path)
                path.unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def free_bytes(folder: Path) -> int:
    """Bytes that can be had there: of the file system, which a container often keeps small, and of the machine."""
    found = os.statvfs(folder)
    return min(found.f_bavail * found.f_frsize, free_memory())


def default_root() -> Path:
    """A folder in memory that is this person's alone."""
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"phalanx-{os.getuid()}"


def claim(root: Path, name: str) -> tuple[Path, int]:
    """The folder of one node of one run, and a lock that holds it as long as any process has it open. OSError where another run
    has it. What dead runs left beside it is removed."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = root.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise OSError(f"{root} is not a folder of this user's alone: remove it")
    remove_stale(root, name)
    folder = root / name
    while True:
        folder.mkdir(mode=0o700, exist_ok=True)
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # taken for stale between two of these lines
        if not _locked(lock):
            os.close(lock)
            raise OSError(f"{folder} is in use by another process")
        if _is(lock, folder / LOCK):
            return folder, lock
        os.close(lock)


def remove_stale(root: Path, but: str | None = None) -> list[str]:
    """Remove what dead runs have left; returns the names."""
    removed = []
    for folder in _folders(root):
        if folder.name == but:
            continue
        try:
            lock = os.open(folder / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # being made, or being removed
        try:
            if _locked(lock):
                shutil.rmtree(folder, ignore_errors=True)
                removed.append(folder.name)
        finally:
            os.close(lock)
    return removed


def _folders(root: Path) -> Iterator[Path]:
    yield from (path for path in sorted(root.iterdir()) if path.is_dir() and not path.is_symlink())


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _is(fd: int, path: Path) -> bool:
    """Whether the open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that can be had without anything being put out for them."""
    with open("/proc/meminfo") as lines:
        found = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        return max(0, min(next(found, sys.maxsize), _allowed(_CGROUP)))


def _allowed(group: Path) -> int:
    """Bytes that this container may still take: files that are only cached would make room."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # "max", or no such limits here
        return sys.maxsize
    return limit - used + int(cached.get("inactive_file", 0)) + int(cached.get("active_file", 0))
