"""Where checkpoints are stored, as one small set of operations: `Location`. Its implementations are `Local` here, `Remote` in
`storage` (object stores) and `MemoryLocation` in `replicas/replica_index`. The rest of this room never asks which one it has.

Also `atomic_directory`, for programs that write a directory of a person's choice. Does not import torch.
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
    """A file that is written from its first byte to its last."""

    def write(self, data: memoryview | bytes, /) -> None:
        """Write all of `data`."""

    def close(self) -> None:
        """Finish the file. When this returns, the contents survive a crash of the machine."""

    def abort(self) -> None:
        """Give the file up. What was written may be gone or remain."""


class Location(Protocol):
    """A file or folder, which may or may not exist."""

    @property
    def name(self) -> str: ...
    @property
    def parent(self) -> Location: ...
    @property
    def can_rename(self) -> bool:
        """Whether a folder can be renamed atomically. Where it cannot, only the file that is written last shows that all are there."""

    def __truediv__(self, name: str, /) -> Location: ...
    def __str__(self) -> str: ...
    def is_folder(self) -> bool: ...
    def entries(self) -> list[str]:
        """Sorted names of what is directly inside; empty if the folder does not exist."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each file directly inside, by name."""

    def size(self) -> int | None:
        """Bytes of the file; None if it does not exist."""

    def read(self, begin: int = 0, length: int | None = None) -> bytes:
        """Bytes of the file: all of it, or at most `length` from `begin` on. Raises FileNotFoundError or OSError."""

    def read_block(self, begin: int, length: int) -> bytes | memoryview:
        """Like `read`, for many bytes."""

    def unfinished(self) -> list[str]:
        """Names of entries that take up space but are not listed, because their upload was never completed."""

    def make(self) -> None:
        """Create this folder and its parents."""

    def sink(self) -> Sink:
        """Open the file for writing."""

    def sync(self) -> None:
        """Make the names inside this folder survive a crash of the machine."""

    def rename(self, to: Location, /) -> None: ...
    def remove(self) -> None:
        """Remove the file, or the folder with everything inside. Does nothing if it does not exist."""


class Local:
    """A path of a file system, of this machine or shared by all."""

    can_rename = True

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
            with os.scandir(self.path) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def size(self) -> int | None:
        try:
            return self.path.stat().st_size if self.path.is_file() else None
        except OSError:
            return None

    def read(self, begin: int = 0, length: int | None = None) -> bytes:
        with _opened(self.path) as fd:
            remaining = os.fstat(fd).st_size - begin if length is None else length
            parts = []
            while remaining > 0 and (part := os.pread(fd, remaining, begin)):  # a call may return fewer bytes than requested
                parts.append(part)
                begin, remaining = begin + len(part), remaining - len(part)
            return b"".join(parts)

    def read_block(self, begin: int, length: int) -> memoryview:
        # In mapped memory, which goes back to the system as soon as nobody uses it. The allocator would keep it.
        block = memoryview(mmap.mmap(-1, max(length, 1)))[:length]
        filled = 0
        with _opened(self.path) as fd:
            while filled < length and (count := os.preadv(fd, [block[filled:]], begin + filled)):
                filled += count
        return block[:filled]

    def unfinished(self) -> list[str]:
        return []  # a file system lists everything

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def sink(self) -> Sink:
        return _LocalSink(self.path)

    def sync(self) -> None:
        with _opened(self.path) as fd:
            os.fsync(fd)

    def rename(self, to: Location) -> None:
        assert isinstance(to, Local)
        self.path.rename(to.path)

    def remove(self) -> None:
        if self.path.is_dir():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


class _LocalSink:
    """Writes whole pages with direct I/O where the file system supports it: that saves a copy and leaves the page cache to others."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        self._direct = False
        self._supports_direct = self._set_direct(True)

    def _set_direct(self, direct: bool) -> bool:
        if direct != self._direct:
            try:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, self._flags | (os.O_DIRECT if direct else 0))
            except OSError:  # a file system in memory, for example
                return False
            self._direct = direct
        return True

    def write(self, data: memoryview | bytes) -> None:
        DISK.check()
        rest = memoryview(data)
        while rest:
            pages = len(rest) // _PAGE * _PAGE
            if (
                self._supports_direct
                and pages
                and _address(rest) % _PAGE == 0
                and os.lseek(self._fd, 0, os.SEEK_CUR) % _PAGE == 0
            ):
                self._set_direct(True)
                try:
                    rest = rest[os.write(self._fd, rest[:pages]) :]
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
                    self._supports_direct = False  # it accepted the flag, but not the write
            else:
                self._set_direct(False)
                rest = rest[os.write(self._fd, rest) :]
                # Start writing to disk now instead of at the end, and free cached pages that are written.
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        try:
            os.fsync(self._fd)
        finally:
            self.abort()

    def abort(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, dtype=np.uint8).ctypes.data)


def refuse_existing(out: Path) -> None:
    """RunError if `out` exists and is not an empty directory."""
    if os.path.lexists(out) and (not out.is_dir() or any(out.iterdir())):
        raise RunError([f"{out} already exists: name a new directory, or an empty one."])


@contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Yields a directory to write into. It is renamed to `out` on success and removed on failure."""
    refuse_existing(out)
    partial = out.with_name(f"{out.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an earlier attempt that was killed
        partial.mkdir(parents=True)
        yield partial
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except OSError as error:
        where = f" ({error.filename})" if error.strerror and error.filename else ""
        raise RunFailed(f"{out} could not be written: {error.strerror or error}{where}.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
