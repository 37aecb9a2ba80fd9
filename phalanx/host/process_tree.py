"""Ties the lives of processes together, and blocks stop signals while they start. Used by agents and the processes they start, before
anything heavy is imported."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""Signals that ask the run to save and end."""
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies; exit now if the parent is no longer `parent`."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of descendants whose own parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


@contextlib.contextmanager
def stop_signals_blocked() -> Iterator[None]:
    """Start child processes with `STOP_SIGNALS` blocked until they call `unblock_stop_signals`: a signal to all processes of a job must not
    kill one that is still loading, and helper processes are asked to stop in another way."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def unblock_stop_signals() -> None:
    """Receive `STOP_SIGNALS` from now on, including pending ones."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
