"""The measurement of a link, over loopback."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from phalanx.events.frames import Refused
from phalanx.host.link_probe import LinkServer, measure_link


def test_both_directions_of_a_link_are_measured() -> None:
    server = LinkServer("127.0.0.1", "token")
    try:
        for _ in range(2):
            speed = measure_link(server.address, "token", 0.1)
            assert min(speed.there, speed.back) > 1e6 and 0 < speed.round_trip < 1
    finally:
        server.close()
    with pytest.raises(OSError):
        measure_link(server.address, "token", 0.1)


def test_a_stranger_is_refused() -> None:
    server = LinkServer("127.0.0.1", "token")
    try:
        with pytest.raises(Refused):
            measure_link(server.address, "other", 0.1)
        with socket.create_connection(server.address):  # says nothing
            assert measure_link(server.address, "token", 0.05).there > 0
    finally:
        server.close()


@contextmanager
def relay(to: tuple[str, int], rate: float) -> Iterator[tuple[str, int]]:
    """Relays one connection, with this many bytes/s towards the server and everything on the way back."""

    def copy(source: socket.socket, target: socket.socket, rate: float | None) -> None:
        begin, sent = time.monotonic(), 0
        with suppress(OSError):
            while block := source.recv(1 << 14):
                sent += len(block)
                if rate is not None and (ahead := sent / rate - (time.monotonic() - begin)) > 0:
                    time.sleep(ahead)
                target.sendall(block)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        client, _ = listener.accept()
        with client, socket.create_connection(to) as server:
            back = threading.Thread(target=copy, args=(server, client, None))
            back.start()
            copy(client, server, rate)
            back.join()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[:2]
        thread.join()


def test_a_slow_direction_is_seen() -> None:
    server = LinkServer("127.0.0.1", "token")
    try:
        with relay(server.address, 2e6) as address:
            server.address = address  # a handshake is valid at one address only
            speed = measure_link(address, "token", 0.5)
    finally:
        server.close()
    assert 1e5 < speed.there < 4e6 < speed.back
