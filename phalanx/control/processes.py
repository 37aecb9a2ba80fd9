"""The processes of one node, as its agent sees them: the fork server, the ranks that it forks, and the replica server."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.checkpointing.replicas import shm_slots
from phalanx.control.codec import decode, encode
from phalanx.control.protocol import Computed, DataPrepared, RankFailure, RankReport, Record
from phalanx.events import heartbeat
from phalanx.events.frames import Address
from phalanx.events.rundir import RunDir
from phalanx.host.process_tree import ModuleProcess, python_command, stop_signals_blocked
from phalanx.recovery.diagnose import HangReport
from phalanx.spec.json_value import JsonObject

BYTES_PER_PARAMETER = 12  # weights and two Adam moments in fp32
_MAX_PACKET = 65536  # bytes of a message from the fork server
_MAX_LINE = 16 << 20  # bytes of a message from a rank
_LOAD_ATTEMPTS = 2  # at loading torch
_STACK_DUMP_SECONDS = 0.4  # in which a process writes its stack, if it can
_RELEASE_SECONDS = 10.0  # in which the replica server gives back gigabytes of memory


@dataclass(slots=True)
class Worker:
    """A process that is or was a rank."""

    name: str
    slot: int
    """Its place on the node, which determines its device."""
    pid: int
    writer: asyncio.StreamWriter
    heartbeat: Path
    rank: int | None = None
    generation: int = -1
    exit_code: int | None = None
    """The exit code that it announced."""
    failure: RankFailure | None = None
    """Why it failed or was killed."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    last_step: int | None = None
    """Last complete step, known once the process is gone."""

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self.writer.write(json.dumps(encode(message)).encode() + b"\n")

    def kill(self, number: int = signal.SIGKILL) -> None:
        if self.gone.is_set():
            return  # its process id may belong to another process by now
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def on_exit(self) -> None:
        """Read the last heartbeat and remove its files."""
        if (beat := heartbeat.read(self.heartbeat)) is not None and beat.generation == self.generation:
            self.last_step = beat.step
        self.gone.set()
        self.heartbeat.unlink(missing_ok=True)
        self.heartbeat.with_suffix(".stack").unlink(missing_ok=True)


OnReport = Callable[[Worker, RankReport | Record | Computed | DataPrepared], None]


async def inspect_process(worker: Worker) -> HangReport:
    """Look from outside at a rank that does not answer: its state in /proc, and its stack as `faulthandler` writes it."""
    dump = worker.heartbeat.with_suffix(".stack")
    with contextlib.suppress(OSError):
        os.truncate(dump, 0)
    worker.kill(signal.SIGUSR2)
    await asyncio.sleep(_STACK_DUMP_SECONDS)
    state, stack = None, None
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()[0]
    with contextlib.suppress(OSError):
        stack = dump.read_text(errors="replace")
    return {"state": state, "dump": stack}


class ForkClient:
    """The fork server and the connection to it. It is restarted if it dies; the ranks it has forked live on."""

    def __init__(self, rundir: RunDir, environment: dict[str, str], on_failure: Callable[[str, str], None]):
        """`environment`: of the ranks. `on_failure` is called with the reason and the log when the fork server cannot be started."""
        self._rundir, self._environment, self._on_failure = rundir, environment, on_failure
        self.ready = asyncio.Event()
        """The fork server has loaded torch."""
        self._requests: dict[str, asyncio.Future[int]] = {}
        self._closed = False
        self._failed_starts = 0
        self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        arguments = [str(self._rundir.path), str(theirs.fileno()), str(os.getpid())]
        with theirs, (self._rundir.logs / "launch.log").open("ab") as log, stop_signals_blocked():
            self._process = subprocess.Popen(
                python_command("phalanx.worker.fork_server", *arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=self._environment,
                start_new_session=True,
            )
        ours.setblocking(False)
        self._control = ours
        self.ready.clear()
        asyncio.get_running_loop().add_reader(ours.fileno(), self._on_readable, ours)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _on_readable(self, control: socket.socket) -> None:
        try:
            packet = control.recv(_MAX_PACKET)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._on_death(control)
            return
        message = json.loads(packet)
        self.ready.set()
        self._failed_starts = 0
        if "pid" in message and (request := self._requests.pop(message["worker"], None)) is not None and not request.done():
            request.set_result(message["pid"])

    def _on_death(self, control: socket.socket) -> None:
        asyncio.get_running_loop().remove_reader(control.fileno())
        control.close()
        for request in self._requests.values():
            if not request.done():
                request.set_exception(ConnectionError("the process that starts the workers has ended"))
        self._requests.clear()
        was_ready = self.ready.is_set()
        self.ready.clear()
        code = self._process.wait()
        if self._closed:
            return
        self._failed_starts += not was_ready
        if self._failed_starts < _LOAD_ATTEMPTS:
            self._start()
        else:
            log = (self._rundir.logs / "launch.log").read_text(errors="replace")[-4000:]
            self._on_failure(f"The process that starts the workers ended with exit code {code}.", log)

    async def fork(self, name: str, slot: int, page: Path, on_report: OnReport) -> Worker:
        """Fork a new worker, in milliseconds once the fork server is ready. `page`: its heartbeat."""
        while True:
            await self.ready.wait()
            ours, theirs = socket.socketpair()
            request: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            self._requests[name] = request
            try:
                with theirs:
                    socket.send_fds(self._control, [json.dumps({"worker": name}).encode()], [theirs.fileno()])
                pid = await request
                break
            except OSError:  # the fork server died; the next one will do it
                ours.close()
                await asyncio.sleep(0.05)
        reader, writer = await asyncio.open_connection(sock=ours, limit=_MAX_LINE)
        worker = Worker(name, slot, pid, writer, page)

        async def receive() -> None:
            with contextlib.suppress(OSError, ValueError):
                while line := await reader.readline():
                    on_report(worker, decode(json.loads(line)))

        asyncio.create_task(receive()).add_done_callback(lambda _: writer.close())
        return worker

    def close(self) -> None:
        self._closed = True
        self._process.kill()
        self._process.wait()


class ReplicaProcess:
    """The replica server of this node, which holds copies of the state in host memory (`checkpointing/replicas/replica_server`)."""

    def __init__(
        self,
        rundir: RunDir,
        node: int = 0,
        bind: str = "127.0.0.1",
        token: str | None = None,
        ports: range | None = None,
    ):
        self.token, self._node, self._bind, self._ports = token or secrets.token_hex(16), node, bind, ports
        self._log = rundir.logs / f"replicas-{node}.log"
        # A folder of its own for each launch; what an earlier one left behind is removed.
        run = hashlib.sha256(str(rundir.path.absolute()).encode()).hexdigest()[:8]
        self.folder, self._lock = shm_slots.claim(shm_slots.default_root(), f"{run}-{secrets.token_hex(4)}-node{node}")
        self._start()

    def _start(self) -> None:
        settings: JsonObject = {"folder": str(self.folder), "node": self._node, "bind": self._bind, "token": self.token}
        if self._ports is not None:
            settings["ports"] = [self._ports.start, self._ports.stop]
        # It ends when its input does, after the workers. The folder is in use as long as either process lives.
        self._process = ModuleProcess("phalanx.checkpointing.replicas.replica_server", settings, self._log, (self._lock,))
        answer = self._process.stdout.readline()
        if not answer:
            self.close()
            raise OSError(f"the process that keeps them ended at once; {self._log} says why")
        host, port = json.loads(answer)["address"]
        self.address: Address = (host, port)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lost(self) -> bool:
        """The process ended without being asked to."""
        return self._lock >= 0 and self._process.poll() is not None

    def restart(self) -> None:
        """Start a new process on the same folder, at another address. Complete replicas in it remain. Raises OSError."""
        self._process.close()
        self._start()

    def close(self) -> None:
        """End the process and free the memory."""
        self._process.close(_RELEASE_SECONDS)
        shm_slots.SlotDir(self.folder).remove()  # in case it was killed
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1
