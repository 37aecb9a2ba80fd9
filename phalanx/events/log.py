"""Writes and reads events.jsonl: one line and one write per record. The controller of a run writes the records of all its processes; a launcher
adds the first and the last, and under torchrun every rank writes its own."""

from __future__ import annotations

import errno
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from phalanx.events.fault_log import DISK
from phalanx.events.records import Event, RunStarted, Step, StepSkipped, decode, encode

_MAX_QUEUED = 10_000  # records kept in memory while the disk is full; then the oldest are dropped
_TAIL_BYTES = 1 << 18  # enough for the newest records
_STEP_RECORDS = (b'{"event": "step"', b'{"event": "step_skipped"')
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
        self.write(encode(stamped))
        return stamped

    def write(self, line: str) -> None:
        """Write a record that has its time."""
        self._queue.append(f"{line}\n".encode())
        while self._queue and self._append(self._queue[0]):
            self._queue.popleft()

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


class RecordWriter:
    """Writes the records of all processes of a run, each once although it may arrive twice."""

    def __init__(self, path: Path):
        self._log = EventLog(path)
        self._written: dict[bytes | int, None] = {}
        """The newest lines, and the steps that they are records of, oldest first."""
        for line in _tail(path):
            self._remember(line, _step(line))

    def write(self, line: str, *, if_new: bool = False) -> None:
        """Write a record that has its time. `if_new`: the record of a step, unless there is one of that step."""
        content = line.encode()
        step = _step(content)
        if content not in self._written and not (if_new and step in self._written):
            self._remember(content, step)
            self._log.write(line)

    def _remember(self, line: bytes, step: int | None) -> None:
        self._written |= dict.fromkeys([line] if step is None else [line, step])
        while len(self._written) > _MAX_QUEUED:
            del self._written[next(iter(self._written))]

    def close(self) -> None:
        self._log.close()


def _step(line: bytes) -> int | None:
    """The step that the line is the record of."""
    event = decode_line(line) if line.startswith(_STEP_RECORDS) else None
    return event.step if isinstance(event, Step | StepSkipped) else None


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
            if (event := decode_line(line)) is not None:
                yield event


def read_events(path: Path) -> list[Event]:
    """All complete records of a run."""
    return list(EventReader(path).new())


def launch_events(path: Path) -> list[Event]:
    """The records of the current launch."""
    events = read_events(path)
    begin = max((index for index, event in enumerate(events) if isinstance(event, RunStarted)), default=0)
    return events[begin:]


def _tail(path: Path) -> list[bytes]:
    """The newest lines; the first may be cut short."""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().splitlines()


def decode_line(line: bytes) -> Event | None:
    """The record on a line; None if a crash has cut it short, or another version has written it."""
    try:
        return decode(line.decode())
    except (ValueError, TypeError, AttributeError):
        return None
