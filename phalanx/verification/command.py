"""One run as a command of its own, with the faults that it is given, and what is left when it has ended. `verification/chaos_campaign` compares
two of them."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from phalanx.checkpointing.replicas import shm_slots
from phalanx.events.log import read_events
from phalanx.events.records import Event
from phalanx.events.rundir import RunDir
from phalanx.faults.grammar import Fault, format_faults
from phalanx.host.process_tree import die_with

_GONE = 5.0  # seconds that processes have to follow the one that started them


@dataclass(frozen=True, kw_only=True, slots=True)
class Side:
    """One of the two runs, when it has ended."""

    name: str
    directory: Path
    code: int | None
    """None: it had to be ended."""
    seconds: float
    events: list[Event]
    left: tuple[str, ...]
    """Processes that outlived it, and files that it left half-written."""
    said: str
    """The end of what it printed."""


def train(file: Path, directory: Path, faults: Sequence[Fault], limit: float) -> Side:
    """Run it to its end, or for `limit` seconds. Call `family.adopt_orphans` first: what it leaves behind then comes to this process."""
    command = [sys.executable, "-m", "phalanx", "train", str(file), "--run-dir", str(directory), "--json"]
    if faults:
        command += ["--chaos", format_faults(faults)]
    before = _children()
    began = time.monotonic()
    printed = file.with_name(f"{directory.name}.log")
    with printed.open("wb") as output:
        me = os.getpid()
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, preexec_fn=lambda: die_with(me)
        )
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
        except BaseException:  # whoever asked for this has had enough: it ends with everything that it started
            process.kill()
            process.wait()
            _outlived(before)
            raise
    seconds = time.monotonic() - began
    left = [*_outlived(before), *_half_written(directory)]
    # Records that waited for room on the disk stand behind later ones.
    events = sorted(read_events(RunDir(directory).events_file), key=lambda event: event.time)
    tail = printed.read_text(errors="replace")[-2000:]
    return Side(
        name=directory.name, directory=directory, code=code, seconds=seconds, events=events, left=tuple(left), said=tail
    )


def _children() -> set[int]:
    """Processes whose parent is this one. Orphans below it are, as it adopts them."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(fields[1]) == os.getpid():
            found.add(int(folder.name))
    return found


def _outlived(before: set[int]) -> list[str]:
    """What a run that has ended left running, by command; it is ended here."""
    end = time.monotonic() + _GONE
    while (left := _living(_children() - before)) and time.monotonic() < end:
        time.sleep(0.05)
    words = [f"process {pid} ({_command(pid)})" for pid in left]
    while left:  # the children of whoever is ended here come next
        for pid in left:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        left = _living(_children() - before)
    return words


def _living(pids: set[int]) -> list[int]:
    """Those that have not ended; who has is waited for by nobody else."""
    return [pid for pid in sorted(pids) if os.waitpid(pid, os.WNOHANG)[0] == 0]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"


def _half_written(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*.partial")):
        yield f"{path.relative_to(directory)}, half-written"
    known = hashlib.sha256(str(directory.absolute()).encode()).hexdigest()[:8]  # as control/processes names them
    for path in sorted(shm_slots.default_root().glob(f"{known}-*")):
        yield f"{path}, copies in memory"
