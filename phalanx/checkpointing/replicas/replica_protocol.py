"""Messages of replica servers: JSON followed by bytes, over TCP, one request per connection. Does not import torch.

Both sides prove the run's token before anything else is read (`events/frames`). Messages are not encrypted: they are for the network inside a
cluster, which training's own messages use too.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any, BinaryIO

from phalanx.events import frames
from phalanx.events.frames import Address

_FRAME = struct.Struct("!QQ")  # bytes of the message, bytes after it
_MAX_MESSAGE = 256 << 20  # bytes: names and checksums of a large rank's state are a few megabytes
_PATIENCE = 60.0  # seconds without a byte after which a server counts as dead


class Connection:
    """A connection to a process that has proved the token."""

    def __init__(self, sock: socket.socket):
        self._socket = sock

    def send(self, message: dict[str, Any], file: BinaryIO | None = None, begin: int = 0, length: int = 0) -> None:
        """Send a message, and bytes of a file after it, which are not copied through this process."""
        text = json.dumps(message).encode()
        self._socket.sendall(_FRAME.pack(len(text), length) + text)
        if file is not None and length and self._socket.sendfile(file, begin, length) != length:
            raise ConnectionError("a file has become shorter")

    def receive(self) -> tuple[dict[str, Any], int]:
        """A message, and the number of bytes after it."""
        size, length = _FRAME.unpack(self.receive_bytes(_FRAME.size))
        if size > _MAX_MESSAGE:
            raise ConnectionError(f"a message of {size} bytes is longer than {_MAX_MESSAGE}")
        message = json.loads(self.receive_bytes(size))
        if not isinstance(message, dict):
            raise ConnectionError("a message is not a JSON object")
        return message, length

    def receive_bytes(self, size: int) -> bytearray:
        data = bytearray(size)
        self.receive_into(memoryview(data))
        return data

    def receive_into(self, into: memoryview) -> None:
        while into:
            count = self._socket.recv_into(into)
            if not count:
                raise ConnectionError("the connection ended during a message")
            into = into[count:]

    def drop(self, length: int) -> None:
        """Receive and discard bytes: the other side reads the answer only when it has sent all."""
        buffer = memoryview(bytearray(1 << 20))
        while length:
            part = buffer[:length]
            self.receive_into(part)
            length -= len(part)


def request(
    address: Address,
    token: str,
    message: dict[str, Any],
    *,
    patience: float = _PATIENCE,
    file: BinaryIO | None = None,
    length: int = 0,
) -> tuple[dict[str, Any], bytearray]:
    """A replica server's answer, and the bytes after it. `file`: its first `length` bytes are sent along.

    Raises Refused if either side does not know the token, and OSError with the server's reason if it cannot do what it is asked to.
    """
    sock, _ = frames.connect(address, token, frames.REPLICAS, min(frames.HANDSHAKE_SECONDS, patience))
    with sock:
        sock.settimeout(patience)
        connection = Connection(sock)
        connection.send(message, file, 0, length)
        answer, size = connection.receive()
        payload = connection.receive_bytes(size)
    if "missing" in answer:
        raise FileNotFoundError(str(answer["missing"]))
    if "error" in answer:
        raise OSError(str(answer["error"]))
    return answer, payload
