"""Which rank failed first. When one dies, the others fail too, a moment later and for a reason that explains nothing."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Mapping

from phalanx.events.records import WorkerFailed
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
    "generation",  # of the meeting place: it is over
)
_FULL = 1 << 20  # bytes left


def echo(reason: str) -> bool:
    """Whether a rank says only that another went away."""
    return any(words in reason for words in _ECHOES)


def first_failure(rundir: RunDir, ended: Mapping[int, int]) -> WorkerFailed:
    """The rank to look at: one that was killed or raised by itself before one that lost its peers; the earliest of those."""
    candidates: list[tuple[bool, float, WorkerFailed]] = []
    for rank, code in ended.items():
        report = rundir.error_of(rank)
        if code < 0:
            candidates.append((False, 0.0, WorkerFailed(rank=rank, reason=killed(-code))))
        elif report.is_file():
            said = json.loads(report.read_text())
            candidates.append(
                (
                    echo(said["reason"]),
                    said["time"],
                    WorkerFailed(rank=rank, reason=said["reason"], traceback=said["traceback"]),
                )
            )
        elif code:
            log = rundir.log_of(rank)
            tail = log.read_text(errors="replace")[-4000:] if log.is_file() else ""
            reason = f"it ended with exit code {code}{_disk_full(rundir)}"
            candidates.append((False, 0.0, WorkerFailed(rank=rank, reason=reason, traceback=tail)))
    return min(candidates, key=lambda candidate: candidate[:2])[2]


def killed(number: int) -> str:
    name = signal.Signals(number).name
    if number == signal.SIGKILL:
        return f"it was killed by {name}; if nobody did that, the machine ran out of memory (see dmesg)"
    return f"it was ended by {name}"


def _disk_full(rundir: RunDir) -> str:
    """A rank that cannot write why it failed may have failed of just that."""
    free = shutil.disk_usage(rundir.path).free
    return f"; the disk of {rundir.path} is full" if free < _FULL else ""
