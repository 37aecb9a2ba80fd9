"""Appends records to events.jsonl and follows it. Every process of a run writes to the one file: a line is one append."""

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

_WAITING = 10_000  # records kept in memory while the disk is full; then the oldest go
_TAIL = 1 << 18  # bytes of a log that hold its newest records
_FULL = (errno.ENOSPC, errno.EDQUOT)


class EventLog:
    """The writing end. Lines of several processes never mix: each is one write to a file opened for appending.

    A full disk ends no run: records wait in memory until there is room again.
    """

    def __init__(self, path: Path):
        self._waiting: deque[bytes] = deque(maxlen=_WAITING)
        self._torn = False
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a crash tore the last line; ours must not be lost with it

    def emit(self, event: Event) -> Event:
        """Write a record with the present time; returns it as written."""
        stamped = replace(event, time=time.time())
        self._waiting.append((encode(stamped) + "\n").encode())
        while self._waiting and self._append(self._waiting[0]):
            self._waiting.popleft()
        return stamped

    def _append(self, line: bytes) -> bool:
        """Whether there was room for it."""
        whole = b"\n" * self._torn + line
        try:
            DISK.ask()
            written = os.write(self._fd, whole)
        except OSError as error:
            if error.errno in _FULL:
                return False
            raise
        self._torn = written < len(whole)  # what is there of it is no record; all of it comes again
        return not self._torn

    def close(self) -> None:
        os.close(self._fd)


class EventReader:
    """The reading end: each call gives the records that have been completed since the last."""

    def __init__(self, path: Path, *, offset: int = 0):
        self._path = path
        self._offset = offset

    def new(self) -> Iterator[Event]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                block = file.read()
        except FileNotFoundError:
            return
        end = block.rfind(b"\n") + 1  # what follows the last newline is still being written
        self._offset += end
        for line in block[:end].splitlines():
            try:
                event = decode(line.decode())
            except (ValueError, TypeError, AttributeError):
                continue  # a line torn by a crash is not a record
            if event is not None:
                yield event


def read_events(path: Path) -> list[Event]:
    """All complete records of a run."""
    return list(EventReader(path).new())


def recorded_steps(path: Path) -> set[int]:
    """Steps that the newest records tell of."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        reader = EventReader(path, offset=max(0, size - _TAIL))
    return {event.step for event in reader.new() if isinstance(event, Step | StepSkipped)}
