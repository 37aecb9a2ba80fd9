"""The local launcher: agents are processes of this machine and end with this process."""

from __future__ import annotations

import contextlib
import json
import os
import select
from pathlib import Path

from phalanx.control.protocol import AgentSettings, Message, decode, encode
from phalanx.host.process_tree import start_module


class LocalAgent:
    """An agent, as a process in a session of its own: Ctrl-C reaches only this process, which asks all nodes to stop together."""

    def __init__(self, settings: AgentSettings, log: Path):
        self._process, self._input, self._output = start_module("phalanx.control.agent", encode(settings), log)
        self._buffer = b""

    def fileno(self) -> int:
        return self._output.fileno()

    def send(self, message: Message) -> bool:
        try:
            self._input.write(json.dumps(encode(message)).encode() + b"\n")
            self._input.flush()
        except OSError:
            return False
        return True

    def receive(self) -> list[Message]:
        while select.select([self._output], [], [], 0)[0] and (block := os.read(self._output.fileno(), 65536)):
            self._buffer += block
        *lines, self._buffer = self._buffer.split(b"\n")
        return [decode(json.loads(line)) for line in lines]

    def poll(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()  # its ranks die with it

    def close(self) -> None:
        self.kill()
        self._process.wait()
        with contextlib.suppress(OSError):
            self._input.close()
        self._output.close()


LAUNCHER = LocalAgent
