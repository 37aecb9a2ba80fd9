"""Measures the link between two hosts: a TCP stream in each direction over the interface of the run, between processes that prove the
run's token. Used by `control/node_check` before the first step of a run."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from dataclasses import dataclass

from phalanx.events import frames
from phalanx.events.frames import Address

_BLOCK = 1 << 20  # bytes of a send or receive
_WINDOWS = 5  # parts of a measurement; the fastest counts, but not the first
_PINGS = 5
_PATIENCE = 5.0  # seconds that one side waits for the other
_NUMBER = struct.Struct("!d")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkSpeed:
    """The link between two hosts."""

    there: float
    """Bytes/s from the client to the server."""
    back: float
    """Bytes/s from the server to the client."""
    round_trip: float
    """Seconds."""


class LinkServer:
    """Answers `measure_link` until it is closed, each client in a thread of its own: a stranger that says nothing must not keep others waiting."""

    def __init__(self, bind: str, token: str, ports: range | None = None):
        """`bind`: address of the only interface to listen on. `ports`: take one of these."""
        self._listener = frames.listen(bind, ports)
        self.address: Address = self._listener.getsockname()[:2]
        self._token = token
        threading.Thread(target=self._serve, name="link server", daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(sock,), name="link", daemon=True).start()

    def _answer(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            frames.accept_client(sock, self._token, frames.LINKS, self.address)
            sock.settimeout(_PATIENCE)
            (seconds,) = _NUMBER.unpack(frames.receive_exactly(sock, _NUMBER.size, time.monotonic() + _PATIENCE))
            for _ in range(_PINGS):
                sock.sendall(frames.receive_exactly(sock, 1, time.monotonic() + _PATIENCE))
            sock.sendall(_NUMBER.pack(_receive(sock, seconds)))
            _send(sock, seconds)


def measure_link(address: Address, token: str, seconds: float) -> LinkSpeed:
    """The link to a `LinkServer`, measured for this time in each direction. Raises OSError if it cannot be measured."""
    sock, _ = frames.connect(address, token, frames.LINKS)
    with sock:
        sock.settimeout(_PATIENCE)
        sock.sendall(_NUMBER.pack(seconds))
        trips = []
        for _ in range(_PINGS):
            begin = time.monotonic()
            sock.sendall(b"x")
            frames.receive_exactly(sock, 1, begin + _PATIENCE)
            trips.append(time.monotonic() - begin)
        _send(sock, seconds)
        (there,) = _NUMBER.unpack(frames.receive_exactly(sock, _NUMBER.size, time.monotonic() + seconds + _PATIENCE))
        return LinkSpeed(there=there, back=_receive(sock, seconds), round_trip=min(trips))


def _send(sock: socket.socket, seconds: float) -> None:
    """Send as much as the link takes."""
    block, end = bytes(_BLOCK), time.monotonic() + seconds
    with contextlib.suppress(TimeoutError):
        while (left := end - time.monotonic()) > 0:
            sock.settimeout(left)
            sock.send(block)
    sock.settimeout(_PATIENCE)


def _receive(sock: socket.socket, seconds: float) -> float:
    """Bytes/s of the fastest window. A busy machine makes windows slower, and nothing makes one faster; only in the first one, a traffic
    shaper may let a burst pass, and TCP has not found its speed yet."""
    buffer, window, best = bytearray(_BLOCK), seconds / _WINDOWS, 0.0
    total = count = sock.recv_into(buffer)
    begin = mark = now = time.monotonic()
    while (left := begin + seconds - now) > 0:
        sock.settimeout(left)
        try:
            size = sock.recv_into(buffer)
        except (TimeoutError, ConnectionResetError):  # the other side has stopped, or ended with bytes of ours unread
            size = 0
        now = time.monotonic()
        total, count = total + size, count + size
        if now >= mark + window:
            if mark > begin:
                best = max(best, count / (now - mark))
            mark, count = now, 0
        if not size:
            break
    sock.settimeout(_PATIENCE)
    return best or total / max(now - begin, 1e-9)
