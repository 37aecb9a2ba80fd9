"""The process that keeps copies of the state in this machine's memory, as long as the launcher lives. Started by the launcher before
the workers, where the run file asks for copies; `checkpointing/replicas/replica_server` is what it runs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import subprocess
import sys

from phalanx.checkpointing.replicas import shm_slots
from phalanx.checkpointing.replicas.replica_protocol import Address
from phalanx.events.rundir import RunDir
from phalanx.host.env import for_python
from phalanx.host.process_tree import deaf
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Plan
from phalanx.spec.run import Run

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


class Keeper:
    """The holder of this machine."""

    def __init__(self, rundir: RunDir, node: int = 0, bind: str = "127.0.0.1", token: str | None = None):
        self.token, self._node, self._bind = token or secrets.token_hex(16), node, bind
        self._log = rundir.logs / f"holder-{node}.log"
        # A name of its own for each launch: what an earlier one left is stale, and goes.
        known = hashlib.sha256(str(rundir.path.absolute()).encode()).hexdigest()[:8]
        self.folder, self._lock = shm_slots.claim(shm_slots.default_root(), f"{known}-{secrets.token_hex(4)}-node{node}")
        self._start()

    def _start(self) -> None:
        with self._log.open("ab") as log, deaf():  # it ends when its standard input does, after the workers
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "phalanx.checkpointing.replicas.replica_server"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                pass_fds=(self._lock,),  # the folder is in use as long as either lives
                env=for_python(),
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
