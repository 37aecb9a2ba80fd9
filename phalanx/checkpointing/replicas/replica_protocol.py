"""Messages between the processes that keep copies of the state: JSON with bytes after it, over TCP, among those who know the run's
secret. Spoken by `checkpointing/replicas/replica_server` and whoever asks it. Knows no tensors, and never loads torch.

Both sides prove the secret before anything else is read (`events/frames`). What follows is not encrypted: it is for the network
inside a cluster, where training's own messages travel too.
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
_MOST = 256 << 20  # bytes of a message: names and checksums of a large rank's state are a few megabytes
_PATIENCE = 60.0  # seconds without a byte, after which the other side is taken for dead


class Connection:
    """To somebody who has proved to know the secret. For one thread at a time."""

    def __init__(self, sock: socket.socket):
        self._socket = sock

    def send(self, message: dict[str, Any], payload: memoryview | bytes = b"") -> None:
        self._head(message, len(payload))
        if payload:
            self._socket.sendall(payload)

    def send_file(self, message: dict[str, Any], file: BinaryIO, begin: int, length: int) -> None:
        """Bytes of a file after the message; the system moves them by itself."""
        self._head(message, length)
        if length and self._socket.sendfile(file, begin, length) != length:
            raise ConnectionError("a file is shorter than it was")

    def _head(self, message: dict[str, Any], length: int) -> None:
        text = json.dumps(message).encode()
        self._socket.sendall(_FRAME.pack(len(text), length) + text)

    def receive(self) -> tuple[dict[str, Any], int]:
        """A message, and how many bytes come after it, which must be taken next."""
        size, length = _FRAME.unpack(_exactly(self._socket, _FRAME.size))
        if size > _MOST:
            raise ConnectionError(f"a message of {size} bytes")
        message = json.loads(_exactly(self._socket, size))
        if not isinstance(message, dict):
            raise ConnectionError("a message that is no table")
        return message, length

    def take(self, into: memoryview) -> None:
        while into:
            count = self._socket.recv_into(into)
            if not count:
                raise ConnectionError("the connection ended in the middle of a message")
            into = into[count:]

    def drop(self, length: int) -> None:
        """Take bytes and forget them, so that the next message can be read."""
        waste = memoryview(bytearray(min(length, 1 << 20)))
        while length:
            part = waste[: min(length, len(waste))]
            self.take(part)
            length -= len(part)

    def wait(self, seconds: float | None) -> None:
        """How long the other side may be silent."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        self._socket.close()


def connect(address: Address, token: str, patience: float = _PATIENCE) -> Connection:
    """To a holder. Refused where either does not know the token of the other."""
    sock, _ = frames.connect(address, token, frames.REPLICAS, min(frames.HANDSHAKE_SECONDS, patience))
    sock.settimeout(patience)
    return Connection(sock)


def accept(sock: socket.socket, token: str) -> Connection:
    """From somebody who has connected; Refused, in time, where they cannot prove that they belong here."""
    frames.accept_client(sock, token, frames.REPLICAS)
    sock.settimeout(_PATIENCE)
    return Connection(sock)


def _exactly(sock: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        part = sock.recv(min(size - len(found), 1 << 20))
        if not part:
            raise ConnectionError("the connection ended")
        found += part
    return bytes(found)


class Caller:
    """Asks one holder, from any thread; connections are kept and used again."""

    def __init__(self, address: Address, token: str, patience: float = _PATIENCE):
        self.address, self._token, self._patience = (address[0], int(address[1])), token, patience
        self._idle: list[Connection] = []
        self._lock = threading.Lock()

    def ask(self, message: dict[str, Any], payload: memoryview | bytes = b"") -> dict[str, Any]:
        """The answer to a question; OSError with the holder's words where it is a refusal."""
        return self._with(lambda link: link.send(message, payload))[0]

    def send_file(self, message: dict[str, Any], file: BinaryIO, length: int) -> dict[str, Any]:
        return self._with(lambda link: link.send_file(message, file, 0, length))[0]

    def fetch(self, message: dict[str, Any]) -> bytes:
        """The bytes that come with the answer."""
        return self._with(lambda link: link.send(message))[1]

    def _with(self, send: Callable[[Connection], None]) -> tuple[dict[str, Any], bytes]:
        with self._lock:
            link = self._idle.pop() if self._idle else None
        if link is not None:
            try:
                send(link)
                return self._answer(link)
            except ConnectionError:  # it lay idle and has ended meanwhile: once more, on a new one
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
            link.take(memoryview(payload))
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
