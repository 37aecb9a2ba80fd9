"""Replica servers for tests, each in its own process: as many nodes on this machine as a test needs. Imported as `replica_nodes`."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from phalanx.checkpointing.replicas.replica_index import set_peers
from phalanx.checkpointing.replicas.replica_protocol import Address
from phalanx.host.env import python_env

TOKEN = "a secret of the test"


class Node:
    """A node that has only a replica server, with its own folder."""

    def __init__(self, root: Path, number: int):
        self.number, self.log = number, root / f"replicas-{number}.log"
        command = [sys.executable, "-m", "phalanx.checkpointing.replicas.replica_server"]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=python_env(), text=True
            )
        given = {"run": "test", "node": number, "root": str(root / f"memory-{number}"), "token": TOKEN}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(given) + "\n")
        self.process.stdin.flush()

    def listen(self) -> None:
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.address: Address = (said["address"][0], said["address"][1])
        self.folder = Path(said["folder"])

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
