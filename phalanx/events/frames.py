"""Authenticated connections between the processes of a run: a handshake that proves the run's token without sending it, then JSON messages
and blocks of bytes that are each sealed (HMAC) with a key of the connection. Used by `control/channel` (asyncio), `parallel/store` (blocking)
and `checkpointing/replicas/replica_server`.

The server sends a 32-byte nonce; the client answers with its own nonce and its proof, and receives the server's proof. Before that only
these fixed sizes are read. Proofs cover the address that the client asked for, so that a connection cannot be redirected to another member
of the run. A seal covers the direction and number of what it seals, so changed, repeated, dropped or foreign frames are refused. The length
of a message has a seal of its own: nobody waits for bytes that were never sent. Nothing is encrypted: this is for the network inside a
cluster, which carries training traffic in the clear as well.
"""

from __future__ import annotations

import errno
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
MAX_MESSAGE = 16 << 20  # bytes of a control message
REFUSAL = bytes(PROOF)
"""Sent instead of a proof to a client with a wrong token, so that it can tell refusal from a broken connection."""

SEAL = 32  # bytes
_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
HEADER = _LENGTH.size + SEAL
"""Bytes of a message's length and the seal of the length. The seal of the message and the message follow."""


class Refused(ConnectionError):
    """The peer does not know the token, or sent something that no peer with the token sends."""


def to_body(message: JsonObject) -> bytes:
    """A message as bytes, for `MessageSealer.pack_body`."""
    return json.dumps(message).encode()


class MessageSealer:
    """Seals outgoing frames and opens incoming ones. Frames are numbered in each direction; the numbers are not sent."""

    def __init__(self, key: bytes, client: bool, max_message: int = MAX_MESSAGE):
        self._key, (self._out, self._in) = key, (b"asks", b"tells") if client else (b"tells", b"asks")
        self._sent = self._received = 0
        self._max_message = max_message

    def pack(self, message: JsonObject) -> bytes:
        return self.pack_body(to_body(message))

    def pack_body(self, body: bytes) -> bytes:
        """A message that is encoded already."""
        if len(body) > self._max_message:
            raise ValueError(f"a message of {len(body)} bytes: at most {self._max_message} can be sent at once")
        length = _LENGTH.pack(len(body))
        return length + self.seal(length) + self.seal(body) + body

    def size(self, header: bytes) -> int:
        """Bytes of the message that follows this header, with its seal."""
        self.check(header[_LENGTH.size :], header[: _LENGTH.size])
        (size,) = _LENGTH.unpack_from(header)
        if size > self._max_message:
            raise Refused(f"it announced a message of {size} bytes")
        return SEAL + int(size)

    def open(self, sealed: bytes) -> JsonObject:
        """The message in the bytes after a header."""
        body = sealed[SEAL:]
        self.check(sealed[:SEAL], body)
        try:
            message = json.loads(body)
        except (ValueError, RecursionError):
            raise Refused("it sent a message that is not JSON") from None
        if not isinstance(message, dict):
            raise Refused("it sent a message that is no table")
        return message

    def seal(self, frame: bytes | memoryview) -> bytes:
        """The seal of the next outgoing frame."""
        self._sent += 1
        return self._mac(self._out, self._sent, frame)

    def check(self, seal: bytes, frame: bytes | memoryview) -> None:
        """Raise Refused unless this is the next incoming frame, unchanged."""
        self._received += 1
        if not hmac.compare_digest(seal, self._mac(self._in, self._received, frame)):
            raise Refused("it sent a message whose seal is not this connection's")

    def _mac(self, direction: bytes, number: int, frame: bytes | memoryview) -> bytes:
        mac = hmac.new(self._key, direction + _NUMBER.pack(number), "sha256")
        mac.update(frame)  # without a copy, and without the interpreter's lock if it is large
        return mac.digest()


class BlockingChannel:
    """A blocking connection to a `control/channel` listener, for one thread at a time. Raises Refused if either side does not know the
    token."""

    def __init__(self, address: Address, token: str, use: bytes):
        self._socket, key = connect(address, token, use)
        self._seals = MessageSealer(key, client=True)

    @property
    def own_host(self) -> str:
        """This side's address."""
        return str(self._socket.getsockname()[0])

    @property
    def family(self) -> socket.AddressFamily:
        return self._socket.family

    def send(self, message: JsonObject) -> None:
        self._socket.sendall(self._seals.pack(message))

    def receive(self, timeout: float | None) -> JsonObject:
        """The next message; TimeoutError after `timeout` seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        size = self._seals.size(receive_exactly(self._socket, HEADER, until))
        return self._seals.open(receive_exactly(self._socket, size, until))

    def close(self) -> None:
        self._socket.close()


def connect(address: Address, token: str, use: bytes, timeout: float = HANDSHAKE_SECONDS) -> tuple[socket.socket, bytes]:
    """Connect and authenticate; returns the socket and the key for `MessageSealer`. Retries if the listener is overloaded."""
    until = time.monotonic() + timeout
    while True:
        sock = socket.create_connection(address, timeout=max(until - time.monotonic(), 0.01))
        try:
            return sock, _authenticate(sock, client_handshake(token, use, address), until)
        except BaseException as error:
            sock.close()
            if isinstance(error, Refused) or not isinstance(error, ConnectionError) or time.monotonic() > until - 0.1:
                raise
            time.sleep(retry_delay())


def listen(bind: str, ports: range | None = None, backlog: int = 512) -> socket.socket:
    """A listening socket at an address of this machine: at a free port of `ports`, or at any. OSError if none of them is free."""
    assert bind, "an empty name would be every interface"
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    for port in ports or (0,):
        try:
            return socket.create_server((bind, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise OSError(errno.EADDRINUSE, f"no port of {bind} from {ports[0]} to {ports[-1]} is free" if ports else "no port is free")


def accept_client(sock: socket.socket, token: str, use: bytes, address: Address) -> bytes:
    """Authenticate a client that has connected to this address; returns the key for `MessageSealer`. Raises Refused, also on timeout."""
    try:
        return _authenticate(sock, server_handshake(token, use, address), time.monotonic() + HANDSHAKE_SECONDS)
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


def client_handshake(token: str, use: bytes, address: Address) -> Handshake:
    """`address`: of the server."""
    server_nonce = yield b"", NONCE
    nonce, who = secrets.token_bytes(NONCE), format_address(address)
    client, server, key = _proofs(token, use, address, server_nonce + nonce)
    proof = yield nonce + client, PROOF
    if hmac.compare_digest(proof, REFUSAL):
        raise Refused(f"{who} belongs to another run: it refused this one's token")
    if not hmac.compare_digest(proof, server):
        raise Refused(f"{who} does not know the token of this run")
    return key


def server_handshake(token: str, use: bytes, address: Address) -> Handshake:
    """`address`: of this server, as its clients know it."""
    nonce = secrets.token_bytes(NONCE)
    answer = yield nonce, NONCE + PROOF
    client, server, key = _proofs(token, use, address, nonce + answer[:NONCE])
    known = hmac.compare_digest(answer[NONCE:], client)
    yield server if known else REFUSAL, 0
    if not known:
        raise Refused("it does not know the token of this run")
    return key


def _proofs(token: str, use: bytes, address: Address, nonces: bytes) -> list[bytes]:
    """The proofs of client and server, and the key of the connection."""
    rest = b" " + format_address(address).encode() + b"\0" + nonces
    return [hmac.digest(token.encode(), use + b" " + word + rest, "sha256") for word in (b"asks", b"tells", b"key")]


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
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
