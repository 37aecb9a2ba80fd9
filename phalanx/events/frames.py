"""Authenticated connections between the processes of a run: a handshake that proves the run's token without sending it, then JSON messages
that are each sealed (HMAC) with a key of the connection. Used by `control/channel` (asyncio), `parallel/store` (blocking) and
`checkpointing/replicas/replica_server` (handshake only).

The server sends a 32-byte nonce; the client answers with its own nonce and its proof, and receives the server's proof. Before that only
these fixed sizes are read. A seal covers the direction and number of a message, so changed, repeated, dropped or foreign messages are
refused. Nothing is encrypted: this is for the network inside a cluster, which carries training traffic in the clear as well.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from collections.abc import Generator

from phalanx.spec.json_value import JsonObject

Address = tuple[str, int]

CONTROL, REPLICAS, LINKS = b"control", b"copies", b"links"
"""Purpose of a connection. A proof for a replica server is worthless to an agent, and the other way round."""
NONCE = PROOF = 32
HANDSHAKE_SECONDS = 5.0  # for the whole handshake
MAX_MESSAGE = 16 << 20  # bytes
REFUSAL = bytes(PROOF)
"""Sent instead of a proof to a client with a wrong token, so that it can tell refusal from a broken connection."""

_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
HEADER = _LENGTH.size + PROOF  # bytes before each message: length and seal


class Refused(ConnectionError):
    """The peer does not know the token, or sent something that no peer with the token sends."""


class MessageSealer:
    """Seals outgoing messages and opens incoming ones. Messages are numbered in each direction; the numbers are not sent."""

    def __init__(self, key: bytes, client: bool):
        self._key, (self._out, self._in) = key, (b"asks", b"tells") if client else (b"tells", b"asks")
        self._sent = self._received = 0

    def pack(self, message: JsonObject) -> bytes:
        body = json.dumps(message).encode()
        if len(body) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(body)} bytes: at most {MAX_MESSAGE} can be sent at once")
        seal = self._seal(self._out, self._sent, body)
        self._sent += 1
        return _LENGTH.pack(len(body)) + seal + body

    def size(self, head: bytes) -> int:
        """Bytes of the message that follows this header."""
        (size,) = _LENGTH.unpack_from(head)
        if size > MAX_MESSAGE:
            raise Refused(f"it announced a message of {size} bytes")
        return int(size)

    def open(self, head: bytes, body: bytes) -> JsonObject:
        if not hmac.compare_digest(head[_LENGTH.size :], self._seal(self._in, self._received, body)):
            raise Refused("it sent a message whose seal is not this connection's")
        self._received += 1
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise Refused("it sent a message that is not JSON") from None
        if not isinstance(message, dict):
            raise Refused("it sent a message that is no table")
        return message

    def _seal(self, direction: bytes, number: int, body: bytes) -> bytes:
        return hmac.digest(self._key, direction + _NUMBER.pack(number) + body, "sha256")


class BlockingChannel:
    """A blocking connection to a `control/channel` listener, for one thread at a time. Raises Refused if either side does not know the
    token."""

    def __init__(self, address: Address, token: str, use: bytes):
        self._socket, key = connect(address, token, use)
        self._seals = MessageSealer(key, client=True)

    def send(self, message: JsonObject) -> None:
        self._socket.sendall(self._seals.pack(message))

    def receive(self, timeout: float | None) -> JsonObject:
        """The next message; TimeoutError after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        head = receive_exactly(self._socket, HEADER, until)
        return self._seals.open(head, receive_exactly(self._socket, self._seals.size(head), until))

    def close(self) -> None:
        self._socket.close()


def connect(address: Address, token: str, use: bytes, timeout: float = HANDSHAKE_SECONDS) -> tuple[socket.socket, bytes]:
    """Connect and authenticate; returns the socket and the key for `MessageSealer`. Retries if the listener is overloaded."""
    until = time.monotonic() + timeout
    while True:
        sock = socket.create_connection(address, timeout=max(until - time.monotonic(), 0.01))
        try:
            return sock, _authenticate(sock, client_handshake(token, use, format_address(address)), until)
        except BaseException as error:
            sock.close()
            if isinstance(error, Refused) or not isinstance(error, ConnectionError) or time.monotonic() > until - 0.1:
                raise
            time.sleep(retry_delay())


def accept_client(sock: socket.socket, token: str, use: bytes) -> None:
    """Authenticate a client that has connected. Raises Refused, also on timeout."""
    try:
        _authenticate(sock, server_handshake(token, use), time.monotonic() + HANDSHAKE_SECONDS)
    except Refused:
        raise
    except OSError as error:
        raise Refused(f"it did not answer the greeting ({error})") from None


def _authenticate(sock: socket.socket, handshake: Handshake, until: float) -> bytes:
    set_socket_options(sock)
    sock.settimeout(max(until - time.monotonic(), 0.01))
    answer, size = next(handshake)
    try:
        while True:
            sock.sendall(answer)
            answer, size = handshake.send(receive_exactly(sock, size, until))
    except StopIteration as done:
        sock.settimeout(None)
        return bytes(done.value)


Handshake = Generator[tuple[bytes, int], bytes, bytes]
"""One side of a handshake without its socket: yields what to send and how many bytes to receive then, and returns the connection key.
Raises Refused."""


def client_handshake(token: str, use: bytes, who: str) -> Handshake:
    """`who`: the server, for messages."""
    server_nonce = yield b"", NONCE
    nonce = secrets.token_bytes(NONCE)
    client, server, key = _proofs(token, use, server_nonce + nonce)
    proof = yield nonce + client, PROOF
    if hmac.compare_digest(proof, REFUSAL):
        raise Refused(f"{who} belongs to another run: it refused this one's token")
    if not hmac.compare_digest(proof, server):
        raise Refused(f"{who} does not know the token of this run")
    return key


def server_handshake(token: str, use: bytes) -> Handshake:
    nonce = secrets.token_bytes(NONCE)
    answer = yield nonce, NONCE + PROOF
    client, server, key = _proofs(token, use, nonce + answer[:NONCE])
    known = hmac.compare_digest(answer[NONCE:], client)
    yield server if known else REFUSAL, 0
    if not known:
        raise Refused("it does not know the token of this run")
    return key


def _proofs(token: str, use: bytes, nonces: bytes) -> list[bytes]:
    """The proofs of client and server, and the key of the connection."""
    return [hmac.digest(token.encode(), use + b" " + word + b"\0" + nonces, "sha256") for word in (b"asks", b"tells", b"key")]


def receive_exactly(sock: socket.socket, size: int, until: float | None) -> bytes:
    """Receive exactly `size` bytes before a deadline; TimeoutError after it."""
    received = bytearray()
    while len(received) < size:
        left = None if until is None else until - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError("timed out")
        sock.settimeout(left)
        part = sock.recv(min(size - len(received), 1 << 20))
        if not part:
            raise ConnectionError("the connection ended")
        received += part
    return bytes(received)


def set_socket_options(sock: socket.socket) -> None:
    """Send small messages at once, and detect a vanished machine, whether the connection is idle or not."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 20_000)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def retry_delay() -> float:
    """Seconds before a retry, random so that refused clients do not return together."""
    return 0.02 + secrets.randbelow(60) / 1000


def format_address(address: Address) -> str:
    return f"{address[0]}:{address[1]}"
