"""Starts Python processes, ties their lives together, and blocks stop signals while they start. Used by agents and the processes they
start, before anything heavy is imported."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from phalanx.host.env import python_env
from phalanx.spec.json_value import JsonObject

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


def python_command(module: str, *arguments: str) -> list[str]:
    """The command of a Python module. -P: a file in the working directory must not shadow a module of the same name."""
    return [sys.executable, "-P", "-m", module, *arguments]


def start_module(
    module: str, settings: JsonObject, log: Path, fds: Sequence[int] = ()
) -> tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]:
    """Start a Python module in a session of its own. Returns the process, its standard input and its standard output.

    It reads `settings` as its first line of input, because every user of the machine can read the arguments of a process.
    """
    pipe = subprocess.PIPE
    with log.open("ab") as errors, stop_signals_blocked():
        process = subprocess.Popen(
            python_command(module),
            stdin=pipe,
            stdout=pipe,
            stderr=errors,
            pass_fds=fds,
            env=python_env(),
            start_new_session=True,
        )
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(settings).encode() + b"\n")
        process.stdin.flush()
    return process, process.stdin, process.stdout
