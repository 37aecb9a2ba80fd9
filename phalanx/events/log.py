"""Appends records to events.jsonl and follows it. Every process of a run writes to the one file: a line is one append."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from phalanx.events.records import Event, decode, encode


class EventLog:
    """The writing end. Lines of several processes never mix: each is one write to a file opened for appending."""

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")  # a crash tore the last line; ours must not be lost with it

    def emit(self, event: Event) -> Event:
        """Write a record with the present time; returns it as written."""
        stamped = replace(event, time=time.time())
        os.write(self._fd, (encode(stamped) + "\n").encode())
        return stamped

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
