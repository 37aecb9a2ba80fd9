"""An agent that a launcher has started as a process: on this machine, or through a command such as ssh whose pipes lead to another."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from pathlib import Path

from phalanx.control.codec import Message, decode, encode
from phalanx.control.protocol import AgentSettings
from phalanx.host.process_tree import ModuleProcess

_MAX_UNREAD = 4 << 20  # bytes that an agent may leave unread; what is sent to it then is lost


class AgentProcess(ModuleProcess):
    """An agent, as a process in a session of its own: Ctrl-C reaches only the launcher, which asks all nodes to stop together. Its ranks die
    with it. Implements `launch/launcher.StartedAgent`."""

    def __init__(self, settings: AgentSettings, log: Path, wrap: Callable[[list[str]], list[str]] = list):
        super().__init__("phalanx.control.agent", encode(settings), log, wrap=wrap)
        os.set_blocking(self.stdin.fileno(), False)
        self._received, self._unsent = b"", b""

    def fileno(self) -> int:
        return self.stdout.fileno()

    def send(self, message: Message) -> bool:
        """A frozen agent, or a cut link, must not stop the launcher: what the pipe does not take now is sent with the next message."""
        if taken := len(self._unsent) < _MAX_UNREAD:
            self._unsent += json.dumps(encode(message)).encode() + b"\n"
        try:
            self._unsent = self._unsent[os.write(self.stdin.fileno(), self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return False
        return taken

    def receive(self) -> list[Message]:
        return [decode(json.loads(line)) for line in self.receive_lines()]

    def receive_lines(self) -> list[bytes]:
        """New messages as they came: for those who pass them on."""
        while select.select([self], [], [], 0)[0] and (block := os.read(self.fileno(), 65536)):
            self._received += block
        *lines, self._received = self._received.split(b"\n")
        return lines
