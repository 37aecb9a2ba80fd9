"""Writes and reads events.jsonl. All processes of a run append to the same file, one write per record."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from phalanx.events.fault_log import DISK
from phalanx.events.records import Event, Step, StepSkipped, decode, encode

_MAX_QUEUED = 10_000  # records kept in memory while the disk is full; then the oldest are dropped
_TAIL_BYTES = 1 << 18  # enough for the newest records
_FULL = (errno.ENOSPC, errno.EDQUOT)


class EventLog:
    """Appends records. Lines of several processes never mix: each is one write to a file opened for appending.

    A full disk does not end the run: records wait in memory until there is space.
    """

    def __init__(self, path: Path):
        self._path = path
        self._queue: deque[bytes] = deque(maxlen=_MAX_QUEUED)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a crash cut the last line short; do not append to it

    def emit(self, event: Event) -> Event:
        """Write a record with the current time; returns it as written."""
        stamped = replace(event, time=time.time())
        self._queue.append((encode(stamped) + "\n").encode())
        while self._queue and self._append(self._queue[0]):
            self._queue.popleft()
        return stamped

    def _append(self, line: bytes) -> bool:
        """Returns False if the disk is full."""
        try:
            DISK.check()
            written = os.write(self._fd, line)
        except OSError as error:
            if error.errno in _FULL:
                return False
            raise
        if written < len(line):
            self._end_part(os.lseek(self._fd, 0, os.SEEK_CUR))
        return written == len(line)

    def _end_part(self, end: int) -> None:
        """End the part of a line that had room, so that no other process appends its own line to it. Readers skip it; the whole line is
        written again. Replacing its last byte needs no space, but a file that is not open for appending."""
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        os.pwrite(fd, b"\n", end - 1)
        os.close(fd)

    def close(self) -> None:
        os.close(self._fd)


class EventReader:
    """Reads records as they are written."""

    def __init__(self, path: Path, *, offset: int = 0):
        self._path = path
        self._offset = offset

    def new(self) -> Iterator[Event]:
        """Records completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                block = file.read()
        except FileNotFoundError:
            return
        end = block.rfind(b"\n") + 1  # the rest is still being written
        self._offset += end
        for line in block[:end].splitlines():
            try:
                event = decode(line.decode())
            except (ValueError, TypeError, AttributeError):
                continue  # a line cut short by a crash
            if event is not None:
                yield event


def read_events(path: Path) -> list[Event]:
    """All complete records of a run."""
    return list(EventReader(path).new())


def recorded_steps(path: Path) -> set[int]:
    """Steps among the newest records."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        reader = EventReader(path, offset=max(0, size - _TAIL_BYTES))
    return {event.step for event in reader.new() if isinstance(event, Step | StepSkipped)}
