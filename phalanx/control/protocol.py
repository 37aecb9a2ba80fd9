"""How the end of a rank reads: by a signal, without a word, or only as the echo of another's: when one dies, the others fail too, for a
reason that explains nothing."""

from __future__ import annotations

import shutil
import signal

from phalanx.events.rundir import RunDir

RESUMABLE = 75
"""Exit code of a run that was told to stop, has saved and can be resumed (EX_TEMPFAIL)."""

# What a rank says when it was another that went away.
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "Socket closed",
    "NCCL communicator was aborted",
    "Timed out waiting",
    "unexpected EOF",
    "Transport endpoint is not connected",
    "Bad file descriptor",
    " is over",  # of a generation: nobody meets there any more
    "no longer, met here",
)
_FULL = 1 << 20  # bytes left


def is_secondary_error(reason: str) -> bool:
    """Whether a rank says only that another went away."""
    return any(words in reason for words in _ECHOES)


def describe_exit(rundir: RunDir, rank: int, code: int) -> tuple[str, str]:
    """Why a rank ended that has not said so itself, and its last words."""
    if code < 0:
        return describe_signal(-code), ""
    log = rundir.rank_log(rank)
    tail = log.read_text(errors="replace")[-4000:] if log.is_file() else ""
    return f"it ended with exit code {code}{_disk_full(rundir)}", tail


def describe_signal(number: int) -> str:
    """By a signal."""
    name = signal.Signals(number).name
    if number == signal.SIGKILL:
        return f"it was killed by {name}; if nobody did that, the machine ran out of memory (see dmesg)"
    return f"it was ended by {name}"


def _disk_full(rundir: RunDir) -> str:
    """A rank that cannot write why it failed may have failed of just that."""
    free = shutil.disk_usage(rundir.path).free
    return f"; the disk of {rundir.path} is full" if free < _FULL else ""
