"""Replica servers for tests, each in its own process: as many nodes on this machine as a test needs. Imported as `replica_nodes`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from phalanx.checkpointing.replicas import shm_slots
from phalanx.checkpointing.replicas.replica_index import ReplicaState, complete_states, set_peers
from phalanx.events.frames import Address
from phalanx.host.env import python_env

TOKEN = "a secret of the test"


class Node:
    """A node that has only a replica server, with its own folder."""

    def __init__(self, root: Path, number: int):
        self.number, self.log = number, root / f"replicas-{number}.log"
        self.folder, lock = shm_slots.claim(root / f"memory-{number}", f"test-node{number}")
        command = [sys.executable, "-m", "phalanx.checkpointing.replicas.replica_server"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=python_env(), text=True, pass_fds=[lock]
            )
        os.close(lock)
        settings = {"node": number, "folder": str(self.folder), "token": TOKEN, "bind": "127.0.0.1"}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(settings) + "\n")
        self.process.stdin.flush()

    def listen(self) -> None:
        assert self.process.stdout is not None
        host, port = json.loads(self.process.stdout.readline())["address"]
        self.address: Address = (host, port)

    def lose(self) -> None:
        """As if the machine had gone: its processes, and what was in its memory."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.folder)

    def end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(10)
        self.process.stdout.close()


@contextmanager
def nodes(root: Path, count: int) -> Iterator[Sequence[Node]]:
    found = [Node(root, number) for number in range(count)]
    try:
        for node in found:
            node.listen()
        set_peers({node.number: node.address for node in found}, TOKEN)
        yield found
    finally:
        for node in found:
            node.end()


def newest_state(servers: Sequence[Address], token: str) -> ReplicaState | None:
    return next(iter(complete_states(servers, token)), None)


def nodes_of(state: ReplicaState) -> dict[int, tuple[int, ...]]:
    """By rank: the nodes that have its copy."""
    return {rank: tuple(replica.node for replica in replicas) for rank, replicas in enumerate(state.replicas)}
