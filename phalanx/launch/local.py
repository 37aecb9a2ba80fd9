"""The local launcher: agents are processes of this machine and end with this process."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Sequence
from pathlib import Path

from phalanx.control.protocol import AgentSettings, Message, decode, encode
from phalanx.host.process_tree import ModuleProcess


class LocalAgent(ModuleProcess):
    """An agent, as a process in a session of its own: Ctrl-C reaches only this process, which asks all nodes to stop together.
    Its ranks die with it."""

    def __init__(self, settings: AgentSettings, log: Path, prefix: Sequence[str] = ()):
        super().__init__("phalanx.control.agent", encode(settings), log, prefix=prefix)
        self._buffer = b""

    def fileno(self) -> int:
        return self.stdout.fileno()

    def send(self, message: Message) -> bool:
        return self.write(encode(message))

    def receive(self) -> list[Message]:
        while select.select([self], [], [], 0)[0] and (block := os.read(self.fileno(), 65536)):
            self._buffer += block
        *lines, self._buffer = self._buffer.split(b"\n")
        return [decode(json.loads(line)) for line in lines]


LAUNCHER = LocalAgent
