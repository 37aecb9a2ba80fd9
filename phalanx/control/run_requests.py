"""What somebody asks a running job for, such as `phalanx profile`: the messages, and the files in which a request arrives.

A request is a file in the control folder of the run directory. The controller reads it there (`control/registry`) or, if it does not see that folder,
gets it from the launcher through an agent. It decides in which steps the ranks carry it out (`control/observation`), and passes it on to them
through their agents. The answers are records of the run: they reach every reader, wherever the ranks are.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat

from phalanx.control.codec import Message
from phalanx.control.protocol import Order, RankReport, Report
from phalanx.events.rundir import RunDir, replace_file

PROFILE, MEMORY, BEATS = "profile", "memory", "beats"
MAX_STEPS = 100
"""Of one request: more of them would be a file that no program opens."""
_MAX_FILE = 1 << 20  # bytes of a request
_MAX_ID = 40  # characters

# --- requests to a running job ---------------------------------------------------------------------------------------


class RunRequest(Report):
    """Somebody asks the running job for something. The launcher sends it to an agent, which passes it on to the controller."""

    id: str
    """Names the request in the records that answer it."""
    kind: str
    """"profile" or "memory" of some steps; "beats": publish the heartbeats of all ranks for some seconds."""
    steps: int = 0
    ranks: list[int] | None = None
    """None: all."""


class Observe(Order):
    """Ranks carry out a request in its number of steps, from step `first` on."""

    generation: int
    request: RunRequest
    ranks: list[int]
    first: int


class Observed(RankReport):
    """The rank has carried out `Observe`, unless there is a problem."""

    request: str
    problem: str = ""


class LiveBeats(Message):
    """The controller publishes the heartbeats of all ranks where the launcher sees them."""

    text: str
    """The contents of control/beats.json."""


# The files.


def ask(rundir: RunDir, request: RunRequest) -> bool:
    """Leave a request for the running job; False if another one is there that nobody has taken yet."""
    table = {"id": request.id, "kind": request.kind, "steps": request.steps, "ranks": request.ranks}
    partial = rundir.control / f".ask-{request.id}"
    partial.write_text(json.dumps(table))
    try:
        os.link(partial, rundir.ask_file)  # unlike a rename, it replaces nothing
    except FileExistsError:
        return False
    except OSError:  # a file system without hard links
        if rundir.ask_file.exists():
            return False
        os.replace(partial, rundir.ask_file)
    finally:
        partial.unlink(missing_ok=True)
    return True


class RequestFiles:
    """Takes the requests that arrive in a run directory."""

    def __init__(self, rundir: RunDir):
        self._rundir = rundir
        self._touched = self._touch_time()

    def take(self) -> list[RunRequest]:
        """New requests; each is returned once."""
        requests = [] if (request := self._take_asked()) is None else [request]
        if (touched := self._touch_time()) != self._touched:
            self._touched = touched
            requests += [] if touched is None else [RunRequest(id=BEATS, kind=BEATS)]
        return requests

    def publish(self, text: str) -> None:
        """Write the heartbeats of all ranks."""
        with contextlib.suppress(OSError):
            replace_file(self._rundir.beats_file, text)

    def _touch_time(self) -> int | None:
        """Compared with itself only: the clock of the file system may be another one."""
        try:
            return os.stat(self._rundir.top_file, follow_symlinks=False).st_mtime_ns
        except OSError:
            return None

    def _take_asked(self) -> RunRequest | None:
        path, content = self._rundir.ask_file, b""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError:
            fd = -1
        with contextlib.suppress(OSError):  # a folder, for example
            if fd >= 0:
                content = os.read(fd, _MAX_FILE) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
        if fd >= 0:
            os.close(fd)
        with contextlib.suppress(OSError):
            path.unlink()
            return _parsed(content)
        return None  # what cannot be removed would be a request again and again


def _parsed(content: bytes) -> RunRequest | None:
    """A request as somebody has written it; None if it is not one."""
    try:
        table = json.loads(content)
        number, kind, steps, ranks = (table[name] for name in ("id", "kind", "steps", "ranks"))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not (isinstance(number, str) and len(number) <= _MAX_ID and isinstance(kind, str) and type(steps) is int):
        return None
    if ranks is not None and not (isinstance(ranks, list) and all(type(rank) is int for rank in ranks)):
        return None
    return RunRequest(id=number, kind=kind, steps=steps, ranks=ranks)
