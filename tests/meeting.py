"""An agent that is only its listener and its stores, as a process of its own. Imported by tests as `meeting`, and run as a command.

Lines on its standard input: "end GENERATION REASON" ends a store; at the end of its input it says whom it has refused, and ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from phalanx.control.channel import Channel, Listener
from phalanx.control.store_server import KeyValueStore, serve
from phalanx.events.frames import Address
from phalanx.host.env import python_env

TOKEN = "a secret of the test"
GENERATIONS = 10


class Agent:
    """The process, and what can be said to it and seen of it from outside."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.process = subprocess.Popen(command, env=python_env(), text=True, **pipes)
        assert self.process.stdout is not None
        host, port = json.loads(self.process.stdout.readline())
        self.address: Address = (host, port)

    def end(self, generation: int, reason: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"end {generation} {reason}\n")
        self.process.stdin.flush()

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def memory(self) -> int:
        """Bytes in RAM."""
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self) -> dict[str, int]:
        """Reasons why somebody was refused, and how often."""
        said, _ = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, self.process.returncode
        return dict(json.loads(said))


@contextmanager
def agent() -> Iterator[Agent]:
    one = Agent()
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.kill()
        for pipe in (one.process.stdin, one.process.stdout):
            assert pipe is not None
            pipe.close()


def until(condition: Any, what: str, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not in {seconds} s"
        time.sleep(0.01)


async def _main() -> None:
    refused: Counter[str] = Counter()
    stores = {generation: KeyValueStore() for generation in range(GENERATIONS)}

    async def on_channel(channel: Channel) -> None:
        await serve(channel, stores, await channel.receive())

    listener = Listener("127.0.0.1", TOKEN, on_channel, lambda address, reason: refused.update([reason]))
    print(json.dumps(listener.address), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := (await reader.readline()).decode():
        _, generation, reason = line.rstrip("\n").split(" ", 2)
        stores[int(generation)].end(reason)
    await listener.close()
    print(json.dumps(refused))


if __name__ == "__main__":
    asyncio.run(_main())
