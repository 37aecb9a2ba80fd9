"""A node's nursery and the ranks that it has forked, as the node's agent sees them: started, spoken to, waited for. Never loads torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.events import heartbeat
from phalanx.events.rundir import RunDir
from phalanx.host.env import for_workers
from phalanx.host.process_tree import deaf
from phalanx.spec.plan import Plan

_MOST = 65536  # bytes of a message from the nursery
_ATTEMPTS = 2  # at loading torch, after which it is no accident
_DUMP = 0.4  # seconds in which a process writes its stack, if it can
_LINE = 16 << 20  # bytes of a line from a rank


@dataclass(slots=True)
class Worker:
    """One process that is, or was, a rank."""

    name: str
    slot: int
    """Its place on the node: which device is its own."""
    pid: int
    writer: asyncio.StreamWriter
    heartbeat: Path
    rank: int | None = None
    generation: int = -1
    ended: int | None = None
    """What it said that it ends with."""
    failure: dict[str, Any] | None = None
    """What it said went wrong."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    step: int | None = None
    """The last that it completed, once it is gone."""

    def order(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write(json.dumps(message).encode() + b"\n")

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.gone.is_set():
            return  # its number may be another's by now
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def bury(self) -> None:
        """It is gone: keep what its pulse said last."""
        if (last := heartbeat.read(self.heartbeat)) is not None and last.generation == self.generation:
            self.step = last.step
        self.gone.set()
        self.heartbeat.unlink(missing_ok=True)
        self.heartbeat.with_suffix(".stack").unlink(missing_ok=True)


async def inspect(worker: Worker) -> tuple[str | None, str | None]:
    """What can be seen from outside of a rank that does not answer: its state, and its stack as the interpreter's last resort writes it."""
    dump = worker.heartbeat.with_suffix(".stack")
    with contextlib.suppress(OSError):
        os.truncate(dump, 0)
    worker.kill(signal.SIGUSR2)
    await asyncio.sleep(_DUMP)
    state, stack = None, None
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]
    with contextlib.suppress(OSError):
        stack = dump.read_text(errors="replace")
    return state, stack or None


class Nursery:
    """The process that forks ranks. Lost, it is started again; the ranks live on."""

    def __init__(self, rundir: RunDir, plan: Plan):
        self._rundir, self._plan = rundir, plan
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._ready = asyncio.Event()
        self._asked: dict[str, asyncio.Future[int]] = {}
        self._closed = False
        self._unready = 0
        self.on_failure: Callable[[str], None] = lambda reason: None
        """Told why none can be had."""

    def start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # -P: a file of the working directory that is called like a module must not be taken for it.
        command = [
            sys.executable,
            "-P",
            "-m",
            "phalanx.worker.fork_server",
            str(self._rundir.path),
            str(theirs.fileno()),
            str(os.getpid()),
        ]
        with theirs, (self._rundir.logs / "launch.log").open("ab") as log, deaf():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=for_workers(self._plan),
                start_new_session=True,
            )
        ours.setblocking(False)
        self._control = ours
        self._ready.clear()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._hear, ours)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def _hear(self, control: socket.socket) -> None:
        try:
            block = control.recv(_MOST)
        except BlockingIOError:
            return
        except OSError:
            block = b""
        if block:
            message = json.loads(block)
            self._ready.set()
            self._unready = 0
            if "pid" in message and (asked := self._asked.pop(message["worker"], None)) is not None and not asked.done():
                asked.set_result(message["pid"])
            return
        asyncio.get_running_loop().remove_reader(control.fileno())
        control.close()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ConnectionError("the process that starts the workers has ended"))
        self._asked.clear()
        was_ready = self._ready.is_set()
        self._ready.clear()
        assert self._process is not None
        code = self._process.wait()
        if self._closed:
            return
        self._unready += not was_ready
        if self._unready < _ATTEMPTS:
            self.start()
        else:
            log = (self._rundir.logs / "launch.log").read_text(errors="replace")[-4000:]
            self.on_failure(f"The process that starts the workers ended with exit code {code}.\n{log}")

    async def ready(self) -> None:
        """Until torch is loaded."""
        await self._ready.wait()

    async def fork(self, name: str, slot: int, page: Path, said: Callable[[Worker, dict[str, Any]], None]) -> Worker:
        """A new process, in milliseconds where the nursery is ready; what it says goes to `said`."""
        while True:
            await self.ready()
            ours, theirs = socket.socketpair()
            asked: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._asked[name] = asked
            assert self._control is not None
            try:
                with theirs:
                    socket.send_fds(self._control, [json.dumps({"worker": name}).encode()], [theirs.fileno()])
                pid = await asked
                break
            except OSError:  # it was lost just now: the next one will
                ours.close()
                await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection(sock=ours, limit=_LINE)
        worker = Worker(name, slot, pid, writer, page)
        task = asyncio.create_task(_listen(reader, worker, said))
        task.add_done_callback(lambda _: writer.close())
        return worker

    def close(self) -> None:
        self._closed = True
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


async def _listen(reader: asyncio.StreamReader, worker: Worker, said: Callable[[Worker, dict[str, Any]], None]) -> None:
    with contextlib.suppress(OSError, ValueError):
        while line := await reader.readline():
            said(worker, json.loads(line))
