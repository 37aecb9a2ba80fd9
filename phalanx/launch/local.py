"""A job on this machine: starts its workers, hears how they end, stops them all when one fails. Never imports torch.

The workers are a command (`python -m phalanx.cli.worker`): one process that loads torch once, hosts the ranks' store on
a socket that the launcher opened, and forks the ranks. All of them die with the launcher, whatever kills it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from phalanx._version import __version__
from phalanx.events.log import EventLog, EventReader
from phalanx.events.records import Event, RunStarted, Warned, WorkerFailed
from phalanx.launch.copies import ONE_NODE, keep
from phalanx.launch.env import for_workers
from phalanx.launch.failure import first_failure
from phalanx.launch.prepare import Prepared
from phalanx.spec.errors import RunError, RunFailed
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

RESUMABLE = 75
"""Exit code of a run that was told to stop, has saved and can be resumed (EX_TEMPFAIL)."""

FORCED = 130
"""Exit code of a run that was ended at once, without saving: asked a second time, it does not wait."""

_POLL = 0.1  # seconds between looks at the event log
_LOOK = 1.0  # seconds between looks at whether the disk is full
_LAST_WORDS = 0.3  # seconds that the other ranks get to say why they failed, once one has


class Job:
    """A started run. Read `events()` to the end; then `exit_code` and `failure` say how it went."""

    def __init__(self, prepared: Prepared):
        self.run, self.plan, self.rundir = prepared.run, prepared.plan, prepared.rundir
        self.exit_code: int | None = None
        self.failure: WorkerFailed | None = None
        self._ended: dict[int, int] = {}
        self._forced = False
        self._buffer = b""
        self._full, self._looked = False, time.monotonic()
        try:
            self._keeper = keep(self.run, self.plan, self.rundir)
        except RunError:
            self.rundir.release()  # nothing was started
            raise
        self._log = EventLog(self.rundir.events_file)
        self._reader = EventReader(self.rundir.events_file, offset=self.rundir.events_file.stat().st_size)
        for stale in self.rundir.logs.glob("rank-*.error.json"):
            stale.unlink()
        self._log.emit(started(self.run, self.plan))
        for notice in (*prepared.notices, *((ONE_NODE,) if self._keeper else ())):
            self._log.emit(Warned(message=notice))
        self._control, self._process = self._start()

    def events(self) -> Iterator[Event]:
        """Everything that happens, as it happens, until the last worker has ended; a failure is raised at the end."""
        try:
            while self._alive():
                select.select([self._control], [], [], _POLL)
                self._hear()
                yield from self._reader.new()
                yield from self._disk()
                if self._failed():
                    self._end()
            self._settle()
            yield from self._reader.new()
        finally:
            self._kill()
            if self._keeper is not None:
                self._keeper.close()
            self._control.close()
            self._log.close()
            self.rundir.release()
        if self.failure is not None:
            raise RunFailed(describe(self.failure, self.rundir.path))

    def _disk(self) -> Iterator[Event]:
        """Whether it has filled up. What the workers say then waits in their memory, so nobody would hear of it."""
        if time.monotonic() < self._looked + _LOOK:
            return
        self._looked = time.monotonic()
        before = self._full
        with contextlib.suppress(OSError):
            self._full = not shutil.disk_usage(self.rundir.path).free
        if self._full and not before:
            yield Warned(
                message=f"The disk of {self.rundir.path} is full: training goes on, but its steps are neither shown nor recorded, and "
                "nothing is saved there, until there is room again. Free some space."
            )

    def stop(self) -> None:
        """Ask the workers to save and end."""
        self._tell("TERM")

    def kill(self) -> None:
        """End the workers now, without saving."""
        self._forced = True
        self._kill()

    def _kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()  # the ranks die with it
        self._process.wait()

    def _start(self) -> tuple[socket.socket, subprocess.Popen[bytes]]:
        ours, theirs = socket.socketpair()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        # -P: a file of the working directory that is called like a module must not be taken for it.
        command = [sys.executable, "-P", "-m", "phalanx.cli.worker", str(self.rundir.path)]
        command += [str(theirs.fileno()), str(listener.fileno()), str(os.getpid())]
        command += [str(self._keeper.folder)] if self._keeper else []
        with theirs, listener, (self.rundir.logs / "launch.log").open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(), listener.fileno()),
                env=for_workers(self.plan),
                start_new_session=True,  # Ctrl-C reaches the launcher alone, which asks all ranks to stop together
            )
        return ours, process

    def _alive(self) -> bool:
        return self._process.poll() is None and len(self._ended) < self.plan.ranks

    def _failed(self) -> bool:
        return any(code not in (0, RESUMABLE) for code in self._ended.values())

    def _hear(self) -> None:
        """Take in what the workers' parent reports, without waiting."""
        while select.select([self._control], [], [], 0)[0]:
            try:
                block = self._control.recv(65536)
            except ConnectionError:  # their parent died with something from us unread
                return
            if not block:
                return
            *lines, self._buffer = (self._buffer + block).split(b"\n")
            for line in lines:
                message: dict[str, int] = json.loads(line)
                self._ended[message["rank"]] = message["code"]

    def _end(self) -> None:
        """One rank has failed: hear the others out for a moment, then end them all."""
        deadline = time.monotonic() + _LAST_WORDS
        while time.monotonic() < deadline and self._alive():
            select.select([self._control], [], [], 0.02)
            self._hear()
        self.failure = first_failure(self.rundir, self._ended)
        self._write(self.failure)
        self._kill()

    def _settle(self) -> None:
        """All workers have ended, or their parent has: say how."""
        self._hear()
        if self._forced:
            self.exit_code = FORCED
            return
        if self.failure is None and self._failed():
            self._end()
        elif self.failure is None and len(self._ended) < self.plan.ranks:
            log = (self.rundir.logs / "launch.log").read_text(errors="replace")[-4000:]
            reason = f"The process that starts the workers ended with exit code {self._process.wait()}."
            self.failure = WorkerFailed(rank=None, reason=reason, traceback=log)
            self._write(self.failure)
        stopped = RESUMABLE in self._ended.values()
        self.exit_code = 1 if self.failure else RESUMABLE if stopped else 0

    def _write(self, event: Event) -> None:
        """Into the log if that can be: a full disk must not hide the failure that it has caused."""
        with contextlib.suppress(OSError):
            self._log.emit(event)

    def _tell(self, name: str) -> None:
        try:
            self._control.sendall(json.dumps({"signal": int(getattr(signal, f"SIG{name}"))}).encode() + b"\n")
        except OSError:
            self._write(Warned(message=f"SIG{name} could not be passed on: the workers have ended already."))


def started(run: Run, plan: Plan) -> RunStarted:
    """The first record of a launch."""
    return RunStarted(
        version=__version__,
        ranks=plan.ranks,
        device=plan.device,
        steps=run.steps,
        parameters=plan.parameters,
        micro_batch=plan.micro_batch,
        accumulation=plan.accumulation,
        layout=asdict(plan.layout),
        compute=plan.compute,
    )


def describe(failure: WorkerFailed, path: Path) -> str:
    """A failure as a person reads it: the traceback of the rank that failed first, then what and where."""
    who = "" if failure.rank is None else f"Rank {failure.rank} failed: "
    words = f"{who}{failure.reason}\nThe run has ended; its logs are in {path / 'logs'}."
    return f"{failure.traceback.rstrip()}\n\n{words}" if failure.traceback else words
