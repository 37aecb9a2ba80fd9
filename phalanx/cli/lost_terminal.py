"""A terminal or a pipe that goes away must not cost work. Used by `main` for every verb, and by the verbs that follow a job.

A verb that makes something goes on without its reader: what it prints is dropped from then on. Other verbs end quietly. A hang-up (SIGHUP)
makes a job save and stop, unless the process ignores it, as under nohup.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, TextIO

from phalanx.host.process_tree import stop_signals

if TYPE_CHECKING:
    from phalanx.launch.job import Job
    from phalanx.launch.sweep import Sweep

_WORKING_VERBS = ("train", "launch", "node", "tokenize", "import", "export")
_GONE = (errno.EPIPE, errno.EIO, errno.ENXIO)  # a closed pipe, a closed terminal
_READER_GONE = 128 + signal.SIGPIPE  # the exit code that a shell shows for a process that SIGPIPE ended


class _Output(io.FileIO):
    """A standard stream that becomes /dev/null once its reader is gone."""

    def __init__(self, fd: int, goes_on: bool):
        super().__init__(fd, "wb", closefd=False)
        self._goes_on = goes_on

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in _GONE:
                raise
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        if not self._goes_on:
            raise SystemExit(_READER_GONE)
        return memoryview(data).nbytes


def tolerate_lost_readers(verb: str) -> None:
    """Replace the standard streams of this process by ones that a reader may leave at any time."""
    goes_on = verb in _WORKING_VERBS
    sys.stdout, sys.stderr = _tolerant(sys.stdout, goes_on), _tolerant(sys.stderr, goes_on)


def _tolerant(stream: TextIO, goes_on: bool) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper):
        return stream  # closed from the start, or not a file
    try:
        number = stream.fileno()
    except (OSError, ValueError):
        return stream  # in memory
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_Output(number, goes_on)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


@contextmanager
def stopped_by_signals(job: Job | Sweep) -> Iterator[None]:
    """Inside, the first SIGINT or SIGTERM makes the job save and stop, the second kills it. Notices of a batch system and hang-ups make it
    save and stop too, and may be repeated: a terminal that closes may send SIGHUP twice, and a service manager SIGTERM after it."""
    stopping, ordered = threading.Event(), threading.Event()

    def on_signal(number: int, frame: FrameType | None) -> None:
        again = ordered.is_set()
        if number not in (signal.SIGUSR1, signal.SIGHUP):
            ordered.set()
            if again:
                job.kill()
                return
        if not stopping.is_set():
            stopping.set()
            job.stop(signal.Signals(number).name)

    previous = {number: signal.signal(number, on_signal) for number in stop_signals()}
    try:
        yield
    finally:
        for number, handler in previous.items():
            if number == signal.SIGHUP and stopping.is_set():
                handler = signal.SIG_IGN  # what is left is to say what was saved
            signal.signal(number, handler)


def flush_or_drop() -> None:
    """Write what is buffered, before the interpreter ends and would complain about a reader that is gone."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(SystemExit, AttributeError, ValueError):  # None or closed if the process was started without it
            stream.flush()
