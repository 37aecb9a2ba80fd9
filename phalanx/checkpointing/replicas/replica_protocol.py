"""Messages of replica servers: JSON followed by bytes, over TCP, between processes that know the run's token. Does not import torch.

Both sides prove the token before anything else is read (`events/frames`). Messages are not encrypted: they are for the network inside a
cluster, which training's own messages use too.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any, BinaryIO

from phalanx.events import frames
from phalanx.events.frames import Address, Refused

__all__ = ["Address", "Caller", "Connection", "Refused", "accept", "connect"]

_FRAME = struct.Struct("!QQ")  # bytes of the message, bytes after it
_MAX_MESSAGE = 256 << 20  # bytes: names and checksums of a large rank's state are a few megabytes
_PATIENCE = 60.0  # seconds without a byte after which the other side counts as dead


class Connection:
    """A connection to a process that has proved the token. Not thread-safe."""

    def __init__(self, sock: socket.socket):
        self._socket = sock

    def send(self, message: dict[str, Any], payload: memoryview | bytes = b"") -> None:
        self._head(message, len(payload))
        if payload:
            self._socket.sendall(payload)

    def send_file(self, message: dict[str, Any], file: BinaryIO, begin: int, length: int) -> None:
        """Send bytes of a file after the message, without copying them through this process."""
        self._head(message, length)
        if length and self._socket.sendfile(file, begin, length) != length:
            raise ConnectionError("a file has become shorter")

    def _head(self, message: dict[str, Any], length: int) -> None:
        text = json.dumps(message).encode()
        self._socket.sendall(_FRAME.pack(len(text), length) + text)

    def receive(self) -> tuple[dict[str, Any], int]:
        """A message, and the number of bytes after it, which must be received or dropped next."""
        size, length = _FRAME.unpack(_receive_exactly(self._socket, _FRAME.size))
        if size > _MAX_MESSAGE:
            raise ConnectionError(f"a message of {size} bytes is longer than {_MAX_MESSAGE}")
        message = json.loads(_receive_exactly(self._socket, size))
        if not isinstance(message, dict):
            raise ConnectionError("a message is not a JSON object")
        return message, length

    def receive_into(self, into: memoryview) -> None:
        """Fill `into` with the bytes after a message."""
        while into:
            count = self._socket.recv_into(into)
            if not count:
                raise ConnectionError("the connection ended during a message")
            into = into[count:]

    def drop(self, length: int) -> None:
        """Receive and discard bytes, so that the next message can be received."""
        buffer = memoryview(bytearray(min(length, 1 << 20)))
        while length:
            part = buffer[: min(length, len(buffer))]
            self.receive_into(part)
            length -= len(part)

    def set_timeout(self, seconds: float | None) -> None:
        """How long the other side may be silent."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._socket.close()


def connect(address: Address, token: str, patience: float = _PATIENCE) -> Connection:
    """Connect to a replica server. Raises Refused if either side does not know the token."""
    sock, _ = frames.connect(address, token, frames.REPLICAS, min(frames.HANDSHAKE_SECONDS, patience))
    sock.settimeout(patience)
    return Connection(sock)


def accept(sock: socket.socket, token: str) -> Connection:
    """Accept a connection. Raises Refused, within a time limit, if the other side does not prove the token."""
    frames.accept_client(sock, token, frames.REPLICAS)
    sock.settimeout(_PATIENCE)
    return Connection(sock)


def _receive_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(min(size - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the connection ended")
        data += part
    return bytes(data)


class Caller:
    """Sends requests to one replica server, from any thread; reuses connections."""

    def __init__(self, address: Address, token: str, patience: float = _PATIENCE):
        self.address, self._token, self._patience = (address[0], int(address[1])), token, patience
        self._idle: list[Connection] = []
        self._lock = threading.Lock()

    def ask(self, message: dict[str, Any], payload: memoryview | bytes = b"") -> dict[str, Any]:
        """The answer to a request. OSError with the server's reason if it refuses."""
        return self._request(lambda link: link.send(message, payload))[0]

    def send_file(self, message: dict[str, Any], file: BinaryIO, length: int) -> dict[str, Any]:
        return self._request(lambda link: link.send_file(message, file, 0, length))[0]

    def fetch(self, message: dict[str, Any]) -> bytes:
        """The bytes after the answer."""
        return self._request(lambda link: link.send(message))[1]

    def _request(self, send: Callable[[Connection], None]) -> tuple[dict[str, Any], bytes]:
        with self._lock:
            link = self._idle.pop() if self._idle else None
        if link is not None:
            try:
                send(link)
                return self._answer(link)
            except ConnectionError:  # it ended while idle: try once more on a new one
                link.close()
        link = connect(self.address, self._token, self._patience)
        try:
            send(link)
        except BaseException:
            link.close()
            raise
        return self._answer(link)

    def _answer(self, link: Connection) -> tuple[dict[str, Any], bytes]:
        try:
            answer, length = link.receive()
            payload = bytearray(length)
            link.receive_into(memoryview(payload))
        except BaseException:
            link.close()
            raise
        with self._lock:
            self._idle.append(link)
        if "missing" in answer:
            raise FileNotFoundError(str(answer["missing"]))
        if "error" in answer:
            raise OSError(str(answer["error"]))
        return answer, bytes(payload)

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for link in idle:
            link.close()

    def __del__(self) -> None:
        for link in self._idle:
            link.close()
