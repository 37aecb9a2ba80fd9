"""Processes that die with their parent, and parents that adopt. Used by the supervisor and by what it starts, before anything heavy
is loaded."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Who sends one of these wants the run to save and end."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent, of process id `parent`, dies; now, if it is dead already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Processes whose parent ends become children of this one, if it is among their ancestors."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """What is started inside does not hear `STOP_SIGNALS` until it says that it is ready to: who tells all processes of a job to stop must
    not end one that has just begun to load, and one that only looks after others hears of it in another way."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_stop_signals() -> None:
    """From now on this process hears `STOP_SIGNALS`, also what has come before."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
