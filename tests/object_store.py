"""A real S3 server on loopback for tests, and a wire to it that can be cut. Imported by tests as `object_store`."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator

import pytest

SERVER = """
import logging, sys
logging.disable(logging.CRITICAL)
from werkzeug.serving import make_server
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
server = make_server(sys.argv[1], 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.port, flush=True)
server.serve_forever()
"""
ACCESS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "a word", "AWS_DEFAULT_REGION": "us-east-1"}


Cut = Callable[[int, bytes], bool]


class Store:
    """The server, and what tests tell their programs of it."""

    def __init__(self, port: int, address: str = "127.0.0.1"):
        self.port, self.address = port, address

    def env(self, port: int | None = None) -> dict[str, str]:
        """The environment in which programs find it, through another port where one is given."""
        return ACCESS | {"AWS_ENDPOINT_URL": f"http://{self.address}:{port or self.port}"}

    def bucket(self) -> str:
        """A new and empty one."""
        name = f"bucket-{uuid.uuid4().hex[:12]}"
        with urllib.request.urlopen(urllib.request.Request(f"http://{self.address}:{self.port}/{name}", method="PUT")):
            return name


@contextlib.contextmanager
def serve(address: str = "127.0.0.1") -> Iterator[Store]:
    for package, why in (
        ("s3fs", "no S3 without it"),
        ("moto", "no server without it"),
        ("flask_cors", "moto's server needs it"),
    ):
        pytest.importorskip(package, reason=f"{package} is not installed: {why}")
    clean = {key: value for key, value in os.environ.items() if not key.startswith("AWS_")}
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, address], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=clean
    )
    assert server.stdout is not None
    try:
        yield Store(int(server.stdout.readline()), address)
    finally:
        server.kill()
        server.wait()
        server.stdout.close()


class Wire:
    """A port that leads to another. `cut` is asked with the number of bytes that went to the server so far and with the last of them;
    it ends connections abruptly, or holds them up by not answering."""

    def __init__(self, port: int, cut: Cut):
        self._to, self._cut = port, cut
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = 0
        self.cuts = 0
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._to))
            threading.Thread(target=self._carry, args=(near, far, True), daemon=True).start()
            threading.Thread(target=self._carry, args=(far, near, False), daemon=True).start()

    def _carry(self, source: socket.socket, to: socket.socket, up: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                if up:
                    with self._lock:
                        self.sent += len(data)
                        sent = self.sent
                    if self._cut(sent, data):
                        self.cuts += 1
                        break
                to.sendall(data)
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()


@contextlib.contextmanager
def wire(port: int, cut: Cut) -> Iterator[Wire]:
    made = Wire(port, cut)
    try:
        yield made
    finally:
        made.close()


def after(*marks: int) -> Cut:
    """Cut once at each of these numbers of bytes."""
    left, lock = list(marks), threading.Lock()

    def cut(sent: int, data: bytes) -> bool:
        with lock:
            if left and sent >= left[0]:
                left.pop(0)
                return True
        return False

    return cut
