"""Where checkpoints lie: a folder of a file system, or a prefix of an object store. One small set of operations for both.

`at` makes one from what a person writes. Everything else in this package works on these, and never asks which kind it has.
Knows no tensors.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np

from phalanx.events.fault_log import DISK
from phalanx.spec.errors import RunError, RunFailed

_PAGE = 4096


class Sink(Protocol):
    """A file that is being written from its beginning to its end."""

    def write(self, data: memoryview | bytes, /) -> None:
        """All of it."""

    def close(self) -> None:
        """When this returns, the contents survive a crash of the machine."""

    def abandon(self) -> None:
        """Let go of it; what was written may be gone or remain."""


class Location(Protocol):
    """A file or folder, there or not."""

    @property
    def name(self) -> str: ...
    @property
    def parent(self) -> Location: ...
    @property
    def renames(self) -> bool:
        """Whether a folder can change its name in one instant. Where it cannot, only what is written last tells that all is there."""

    def __truediv__(self, name: str, /) -> Location: ...
    def __str__(self) -> str: ...
    def is_folder(self) -> bool: ...
    def entries(self) -> list[str]:
        """Names of what is directly inside; none where there is no such folder."""

    def sizes(self) -> dict[str, int]:
        """Bytes of the files directly inside, by name."""

    def size(self) -> int | None:
        """Bytes of a file; None where there is no such file."""

    def read(self, begin: int = 0, length: int | None = None) -> bytes:
        """Bytes of a file, all of it or as many as there are from `begin` on. FileNotFoundError, or OSError."""

    def unfinished(self) -> list[str]:
        """Names of what is directly inside and takes up room without being seen, as its writing was never finished."""

    def make(self) -> None:
        """This folder, and those around it."""

    def sink(self) -> Sink: ...
    def sync(self) -> None:
        """Names inside this folder survive a crash of the machine."""

    def rename(self, to: Location, /) -> None: ...
    def remove(self) -> None:
        """The file, or the folder with everything inside; without a word where there is none."""


class Local:
    """In a file system, of this machine or shared by all."""

    renames = True

    def __init__(self, path: Path):
        self.path = path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def parent(self) -> Local:
        return Local(self.path.parent)

    def __truediv__(self, name: str) -> Local:
        return Local(self.path / name)

    def __str__(self) -> str:
        return str(self.path)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Local) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def is_folder(self) -> bool:
        return self.path.is_dir()

    def entries(self) -> list[str]:
        try:
            return sorted(os.listdir(self.path))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self) -> dict[str, int]:
        try:
            with os.scandir(self.path) as inside:
                return {entry.name: entry.stat().st_size for entry in inside if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def size(self) -> int | None:
        try:
            return self.path.stat().st_size if self.path.is_file() else None
        except OSError:
            return None

    def read(self, begin: int = 0, length: int | None = None) -> bytes:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            wanted = os.fstat(fd).st_size - begin if length is None else length
            parts = []
            while wanted > 0 and (part := os.pread(fd, wanted, begin)):  # one call may give less than it was asked for
                parts.append(part)
                begin, wanted = begin + len(part), wanted - len(part)
            return b"".join(parts)
        finally:
            os.close(fd)

    def unfinished(self) -> list[str]:
        return []  # all can be seen

    def block(self, begin: int, length: int) -> memoryview:
        """The same for many bytes, in memory that goes back to the system with the last who holds it: the allocator would keep it."""
        area = memoryview(mmap.mmap(-1, max(length, 1)))[:length]
        filled = 0
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            while filled < length and (got := os.preadv(fd, [area[filled:]], begin + filled)):
                filled += got
        finally:
            os.close(fd)
        return area[:filled]

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def sink(self) -> Sink:
        return _LocalSink(self.path)

    def sync(self) -> None:
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, to: Location) -> None:
        assert isinstance(to, Local)
        self.path.rename(to.path)

    def remove(self) -> None:
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)


class _LocalSink:
    """Whole pages of memory go to the disk directly, where the file system knows how: that costs no copy, and displaces nothing that
    the system keeps in memory for others."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        self._direct = False
        self._able = self._switch(True)

    def _switch(self, direct: bool) -> bool:
        if direct != self._direct:
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags | (os.O_DIRECT if direct else 0))
            except OSError:  # such as a file system in memory
                return False
            self._direct = direct
        return True

    def write(self, data: memoryview | bytes) -> None:
        DISK.check()
        left = memoryview(data)
        while left:
            pages = len(left) // _PAGE * _PAGE
            if self._able and pages and _address(left) % _PAGE == 0 and os.lseek(self._fd, 0, os.SEEK_CUR) % _PAGE == 0:
                self._switch(True)
                try:
                    left = left[os.write(self._fd, left[:pages]) :]
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._able = False  # it took the wish for it, but cannot
            else:
                self._switch(False)
                left = left[os.write(self._fd, left) :]
                # The disk begins with it now, instead of when all is there; and what it has written makes room for others.
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        try:
            os.fsync(self._fd)
        finally:
            self.abandon()

    def abandon(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)


def refuse_existing(out: Path) -> None:
    """RunError where a name is taken by something other than an empty directory."""
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise RunError([f"{out} is already there: name a new directory, or an empty one."])


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """A directory to write into that takes the name `out` when all went well, and else leaves nothing."""
    refuse_existing(out)
    unfinished = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(unfinished, ignore_errors=True)  # from an attempt that was killed
        unfinished.mkdir(parents=True)
        yield unfinished
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except OSError as error:
        raise RunFailed(f"{out} could not be written: {_reason(error)}.") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _reason(error: OSError) -> str:
    if not error.strerror:
        return str(error)
    return f"{error.strerror} ({error.filename})" if error.filename else error.strerror
