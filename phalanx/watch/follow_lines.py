"""Follows a file of lines that another process appends to. A page of a run reads its events with it, and never a byte twice."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

MAX_LINE = 1 << 20
"""Bytes of the longest line that is read; a longer one is skipped."""
BLOCK = 2 << 20
"""Bytes that are read at once."""
_PROBE = 64


@dataclass(frozen=True, slots=True)
class Block:
    """Lines that were complete when the file was read."""

    lines: list[bytes]
    begin: int
    """Offset of the first line, and of the byte after the last one."""
    end: int
    replaced: bool = False
    """The file is another one than before, or was cut: what was read of it no longer counts."""


def open_regular(path: Path) -> int | None:
    """A descriptor to read a regular file; None if there is none. A link is not followed, and a pipe is not waited for."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def read_small(path: Path, limit: int, *, end: bool = False) -> bytes:
    """The first bytes of a regular file, or the last; empty if there is no such file."""
    fd = open_regular(path)
    if fd is None:
        return b""
    try:
        return os.pread(fd, limit, max(0, os.fstat(fd).st_size - limit) if end else 0)
    except OSError:
        return b""
    finally:
        os.close(fd)


class LineFollower:
    """Reads the lines of a file as they are completed."""

    def __init__(self, path: Path):
        self.path = path
        self.offset = 0
        """Bytes that were read."""
        self.size = 0
        """Bytes of the file at the last look."""
        self.too_long = 0
        """Lines that were skipped because of their length."""
        self._identity: tuple[int, int] | None = None
        self._probe = b""
        """The last bytes that were read, to recognize a file that was written anew in place."""
        self._skipping = False

    @property
    def behind(self) -> int:
        """Bytes that the file had and that were not read."""
        return max(0, self.size - self.offset)

    def read(self) -> Block | None:
        """The next lines, at most `BLOCK` bytes; None if there is nothing new."""
        fd = open_regular(self.path)
        if fd is None:
            return self._forget() if self.offset else None
        try:
            status = os.fstat(fd)
            self.size = status.st_size
            known = self._identity is None or self._identity == (status.st_dev, status.st_ino)
            probe = os.pread(fd, len(self._probe), self.offset - len(self._probe)) if self._probe else b""
            if not known or self.size < self.offset or probe != self._probe:
                return self._forget()
            self._identity = (status.st_dev, status.st_ino)
            return self._next(os.pread(fd, BLOCK, self.offset)) if self.size > self.offset else None
        except OSError:
            return None
        finally:
            os.close(fd)

    def reread(self, begin: int, end: int) -> list[bytes]:
        """Lines that were read before."""
        fd = open_regular(self.path)
        if fd is None:
            return []
        try:
            return os.pread(fd, end - begin, begin).split(b"\n")
        except OSError:
            return []
        finally:
            os.close(fd)

    def _forget(self) -> Block:
        self.offset = self.too_long = 0
        self._identity, self._probe, self._skipping = None, b"", False
        return Block([], 0, 0, replaced=True)

    def _next(self, block: bytes) -> Block | None:
        begin, stop = self.offset, block.rfind(b"\n") + 1
        if not stop:
            if len(block) <= MAX_LINE:
                return None  # a line that is being written
            self._skipping = True  # its beginning is dropped now, its end when it comes
            self._advance(block)
            return Block([], begin, self.offset)
        block = block[:stop]
        self._advance(block)
        lines = block.split(b"\n")
        if self._skipping:
            del lines[0]
            self._skipping = False
            self.too_long += 1
        short = [line for line in lines if len(line) <= MAX_LINE]
        self.too_long += len(lines) - len(short)
        return Block(short, begin, self.offset)

    def _advance(self, block: bytes) -> None:
        self.offset += len(block)
        self._probe = (self._probe + block[-_PROBE:])[-_PROBE:]
