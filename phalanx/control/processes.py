"""A node's nursery and the ranks that it has forked, as the node's agent sees them: started, spoken to, waited for. Never loads torch."""

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
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phalanx.checkpointing.replicas import shm_slots
from phalanx.checkpointing.replicas.replica_protocol import Address
from phalanx.events import heartbeat
from phalanx.events.rundir import RunDir
from phalanx.host.env import python_env, worker_env
from phalanx.host.process_tree import stop_signals_blocked
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

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


async def inspect_process(worker: Worker) -> tuple[str | None, str | None]:
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


class ForkClient:
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
        with theirs, (self._rundir.logs / "launch.log").open("ab") as log, stop_signals_blocked():
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=worker_env(self._plan),
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


ONE_NODE = (
    "checkpoint.memory_every: this run is on one machine, so no other has a second copy of its state: the copies in memory outlive "
    "dead workers, not the machine."
)
NO_COPIES = (
    "checkpoint.memory_every has no effect under torchrun, which ends everything on a machine together: start with `phalanx train`, "
    "or rely on checkpoint.every."
)
BYTES_PER_PARAMETER = 12  # weights and two Adam moments in fp32
_UNTIL_GONE = 10.0  # seconds in which gigabytes of memory are given back


class ReplicaProcess:
    """The holder of this machine."""

    def __init__(self, rundir: RunDir, node: int = 0, bind: str = "127.0.0.1", token: str | None = None):
        self.token, self._node, self._bind = token or secrets.token_hex(16), node, bind
        self._log = rundir.logs / f"holder-{node}.log"
        # A name of its own for each launch: what an earlier one left is stale, and goes.
        known = hashlib.sha256(str(rundir.path.absolute()).encode()).hexdigest()[:8]
        self.folder, self._lock = shm_slots.claim(shm_slots.default_root(), f"{known}-{secrets.token_hex(4)}-node{node}")
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log, stop_signals_blocked():  # it ends when its standard input does, after the workers
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "phalanx.checkpointing.replicas.replica_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(self._lock,),  # the folder is in use as long as either lives
                env=python_env(),
                start_new_session=True,
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        # Not among its arguments, which every user of the machine can read.
        given = {"folder": str(self.folder), "node": self._node, "bind": self._bind, "token": self.token}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(given).encode() + b"\n")
            self._process.stdin.flush()
        said = self._process.stdout.readline()
        if not said:
            self.close()
            raise OSError(f"the process that keeps them ended at once; {self._log} says why")
        host, port = json.loads(said)["address"]
        self.address: Address = (host, port)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def lost(self) -> bool:
        """The process has ended, and nobody asked it to."""
        return self._lock >= 0 and self._process.poll() is not None

    def restart(self) -> None:
        """In place of the lost one, in the same folder: what was whole in there still is. Listens elsewhere. OSError where it cannot be."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.stdout.close()
        self._start()

    def close(self) -> None:
        """The run has ended: give the memory back."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()  # that ends it
        try:
            self._process.wait(_UNTIL_GONE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        shm_slots.SlotDir(self.folder).remove()  # where it was killed, by somebody or here
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def give_back() -> None:
    """The memory of nodes that were lost with all their processes, which could not do so themselves."""
    with contextlib.suppress(OSError):
        shm_slots.remove_stale(shm_slots.default_root())


def room_for_copies(run: Run, plan: Plan) -> None:
    """RunError where the run file asks for copies in memory and this machine has no room for them."""
    if run.checkpoint.memory_every is None:
        return
    key, root = f"checkpoint.memory_every = {run.checkpoint.memory_every}", shm_slots.default_root()
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        free = shm_slots.free_bytes(root)
    except OSError as error:
        raise RunError([f"{key}: no copies can be kept in memory ({error}). Without that key the run needs none."]) from None
    # Each node has copies of its own ranks and of its neighbour's, and all nodes of the local launcher are on this machine.
    need = 2 * plan.parameters * BYTES_PER_PARAMETER * min(2, run.cluster.nodes)
    if need > free:
        raise RunError(
            [
                f"{key}: two copies of the state of {plan.parameters / 1e6:,.1f} M parameters take {need / 2**20:,.0f} MiB of memory, "
                f"but {root} has {free / 2**20:,.0f} MiB free: free some, give a container more shared memory, or leave the key out."
            ]
        )
