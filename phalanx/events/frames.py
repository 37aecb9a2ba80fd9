"""How the processes of one run speak to each other: both prove the run's secret before anything else is read, and neither sends it;
then come JSON messages, each sealed with a key of that one connection. Used by `control/channel` (asyncio), `parallel/store` (blocking)
and `checkpointing/replicas/replica_protocol` (the proof alone). Never loads torch.

The one who listens sends 32 random bytes; the one who asks answers with 32 of its own and its proof, and gets a proof back. Until then
only these fixed sizes are read. A seal covers direction and number of a message, so bytes that were changed, repeated, left out or
taken from another connection are refused. Nothing is encrypted: it is for the network inside a cluster, where training's own messages
travel too.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import time
from typing import Any

Address = tuple[str, int]

CONTROL, REPLICAS = b"control", b"copies"
"""What a proof is for: one for a holder of copies is worth nothing to an agent, and the other way round."""
NONCE = PROOF = 32
HANDSHAKE_SECONDS = 5.0
"""Seconds to prove oneself in, all together."""
MAX_MESSAGE = 16 << 20
"""Bytes of a message."""
REFUSAL = bytes(PROOF)
"""Sent in place of a proof to somebody who has none, so that they know it from a connection that broke."""

_LENGTH = struct.Struct("!I")
_NUMBER = struct.Struct("!Q")
HEADER = _LENGTH.size + PROOF
"""Bytes before each message: its length and its seal."""


class Refused(ConnectionError):
    """The other side does not know the secret, or said what nobody who knows it would say."""


class MessageSealer:
    """One connection's two directions: packs what goes out, opens what comes in. Each message has a number that nobody needs to send."""

    def __init__(self, key: bytes, asking: bool):
        self._key, (self._out, self._in) = key, (b"asks", b"tells") if asking else (b"tells", b"asks")
        self._sent = self._taken = 0

    def pack(self, message: dict[str, Any]) -> bytes:
        body = json.dumps(message).encode()
        if len(body) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(body)} bytes: at most {MAX_MESSAGE} can be sent at once")
        seal = self._seal(self._out, self._sent, body)
        self._sent += 1
        return _LENGTH.pack(len(body)) + seal + body

    def size(self, head: bytes) -> int:
        """Bytes of the message that follows this head."""
        (size,) = _LENGTH.unpack_from(head)
        if size > MAX_MESSAGE:
            raise Refused(f"it announced a message of {size} bytes")
        return int(size)

    def open(self, head: bytes, body: bytes) -> dict[str, Any]:
        if not hmac.compare_digest(head[_LENGTH.size :], self._seal(self._in, self._taken, body)):
            raise Refused("it sent a message whose seal is not this connection's")
        self._taken += 1
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
    """A connection on which this thread waits, to somebody who has proved to know the secret. For one thread at a time."""

    def __init__(self, sock: socket.socket, seals: MessageSealer):
        self._socket, self._seals = sock, seals

    def send(self, message: dict[str, Any]) -> None:
        self._socket.sendall(self._seals.pack(message))

    def receive(self, timeout: float | None) -> dict[str, Any]:
        """The next message, in at most so many seconds."""
        until = None if timeout is None else time.monotonic() + timeout
        head = receive_exactly(self._socket, HEADER, until)
        return self._seals.open(head, receive_exactly(self._socket, self._seals.size(head), until))

    def close(self) -> None:
        self._socket.close()


def open_channel(address: Address, token: str, use: bytes, timeout: float = HANDSHAKE_SECONDS) -> BlockingChannel:
    """To a `control/channel` listener; Refused where either does not know the token of the other."""
    sock, key = connect(address, token, use, timeout)
    return BlockingChannel(sock, MessageSealer(key, asking=True))


def connect(address: Address, token: str, use: bytes, timeout: float = HANDSHAKE_SECONDS) -> tuple[socket.socket, bytes]:
    """Connect and prove oneself: the socket, and the key for `MessageSealer`. A listener that is crowded by strangers is asked again."""
    until = time.monotonic() + timeout
    while True:
        sock = socket.create_connection(address, timeout=max(until - time.monotonic(), 0.01))
        try:
            set_socket_options(sock)
            answer, expected, key = client_response(token, use, receive_exactly(sock, NONCE, until))
            sock.sendall(answer)
            check_server(receive_exactly(sock, PROOF, until), expected, format_address(address))
            sock.settimeout(None)
            return sock, key
        except Refused:
            sock.close()
            raise
        except ConnectionError:
            sock.close()
            if time.monotonic() > until - 0.1:
                raise
            time.sleep(retry_delay())
        except BaseException:
            sock.close()
            raise


def accept_client(sock: socket.socket, token: str, use: bytes) -> bytes:
    """Let somebody prove themselves who has connected; the key for `MessageSealer`. Refused, in time, where they cannot."""
    until, ours = time.monotonic() + HANDSHAKE_SECONDS, secrets.token_bytes(NONCE)
    set_socket_options(sock)
    sock.settimeout(HANDSHAKE_SECONDS)
    try:
        sock.sendall(ours)
        said = receive_exactly(sock, NONCE + PROOF, until)
    except OSError as error:
        raise Refused(f"it did not answer the greeting ({error})") from None
    try:
        proof, key = check_client(token, use, ours, said)
    except Refused:
        sock.send(REFUSAL)
        raise
    sock.sendall(proof)
    sock.settimeout(None)
    return key


def client_response(token: str, use: bytes, theirs: bytes) -> tuple[bytes, bytes, bytes]:
    """What the one who asks says to the listener's random bytes, the proof it expects in return, and the key then."""
    ours = secrets.token_bytes(NONCE)
    asks, tells, key = (_proof(token, use, word, theirs + ours) for word in (b"asks", b"tells", b"key"))
    return ours + asks, tells, key


def check_client(token: str, use: bytes, ours: bytes, said: bytes) -> tuple[bytes, bytes]:
    """The listener's proof and the key, for somebody whose own proof is right; else Refused."""
    theirs, proof = said[:NONCE], said[NONCE:]
    asks, tells, key = (_proof(token, use, word, ours + theirs) for word in (b"asks", b"tells", b"key"))
    if not hmac.compare_digest(proof, asks):
        raise Refused("it does not know the token of this run")
    return tells, key


def check_server(proof: bytes, expected: bytes, who: str) -> None:
    """Refused where the listener's proof is not what `client_response` expected."""
    if hmac.compare_digest(proof, REFUSAL):
        raise Refused(f"{who} belongs to another run: it refused this one's token")
    if not hmac.compare_digest(proof, expected):
        raise Refused(f"{who} does not know the token of this run")


def receive_exactly(sock: socket.socket, size: int, until: float | None) -> bytes:
    """So many bytes, before a point in time however slowly they come, else TimeoutError."""
    found = bytearray()
    if until is None:
        sock.settimeout(None)
    while len(found) < size:
        if until is not None:
            left = until - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            sock.settimeout(left)
        part = sock.recv(min(size - len(found), 1 << 20))
        if not part:
            raise ConnectionError("the connection ended")
        found += part
    return bytes(found)


def set_socket_options(sock: socket.socket) -> None:
    """Small messages leave at once, and a machine that has vanished is noticed even where nobody speaks."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def retry_delay() -> float:
    """Seconds before one asks again; never the same for all who were sent away together."""
    return 0.02 + secrets.randbelow(60) / 1000


def format_address(address: Address) -> str:
    return f"{address[0]}:{address[1]}"


def _proof(token: str, use: bytes, word: bytes, nonces: bytes) -> bytes:
    return hmac.digest(token.encode(), use + b" " + word + b"\0" + nonces, "sha256")
