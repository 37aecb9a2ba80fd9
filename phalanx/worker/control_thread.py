"""The thread of a rank that listens to the node's supervisor while the main thread trains, and wakes that thread when its generation
is over, whatever it waits in. Used by `worker/rank`."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

INTERRUPT = signal.SIGRTMIN + 1
"""Makes the main thread look whether it is to give up what it does."""


_AGAIN = 0.2  # seconds


class Halted(BaseException):
    """This generation is over. Not an Exception: nothing on the way up may take it for an error of its own."""


class ControlThread:
    """Orders come to `orders`; what concerns the step under way is done at once."""

    def __init__(self, link: socket.socket):
        self._link = link
        self._lock = threading.Lock()
        self.orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        """None: the supervisor is gone."""
        self.halted = -1
        """The newest generation that is over."""
        self.generation = -1
        """The one that the main thread works in."""
        self.working = False
        """The main thread is in it, and may be interrupted."""
        self.busy: Callable[[], bool] = lambda: False
        """Whether the main thread must not be interrupted now."""
        self.on_stop: Callable[[str], None] = lambda reason: None
        self.on_pause: Callable[[], None] = lambda: None
        self.where: Callable[[], dict[str, Any]] = dict
        self._main = threading.get_ident()
        signal.signal(INTERRUPT, self._look)

    def start(self) -> None:
        """Listen, from when everybody is there who has to be told: the first orders may have come already."""
        threading.Thread(target=self._listen, name="attendant", daemon=True).start()

    def tell(self, message: dict[str, Any]) -> None:
        """To the supervisor, from any thread."""
        with self._lock, contextlib.suppress(OSError):
            self._link.sendall(json.dumps(message).encode() + b"\n")

    @property
    def over(self) -> bool:
        """Whether the generation that the main thread works in is."""
        return self.halted >= self.generation

    def _listen(self) -> None:
        buffer = b""
        with contextlib.suppress(OSError):
            while block := self._link.recv(1 << 20):
                *lines, buffer = (buffer + block).split(b"\n")
                for line in lines:
                    self._hear(json.loads(line))
        self.orders.put(None)

    def _hear(self, message: dict[str, Any]) -> None:
        what = message["order"]
        if what == "halt":
            self.halted = max(self.halted, message["generation"])
            self.orders.put(message)
            threading.Thread(target=self._rouse, name="rousing", daemon=True).start()
        elif what == "stop":
            self.on_stop(message["reason"])
        elif what == "pause":
            if message["generation"] == self.generation:
                self.on_pause()
        elif what == "cut":  # a planted fault: the network
            cut_connections()
        elif what == "where":
            self.tell({"say": "where", "question": message["question"], "where": self.where()})
        else:
            self.orders.put(message)

    def _rouse(self) -> None:
        """Until the main thread has given up: it may open connections meanwhile, and an exception in a destructor is lost."""
        while self.working and self.over:
            cut_connections()
            time.sleep(_AGAIN)  # nearly always it falls over a connection by itself, at a place that is made for it
            if self.working and self.over:
                signal.pthread_kill(self._main, INTERRUPT)

    def _look(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, between two of its instructions."""
        if self.working and self.over and not self.busy():
            raise Halted


def cut_connections() -> None:
    """Shut down every connected TCP socket of this process: whoever waits in one, here or on the other side, wakes at once.

    gloo's own ways to abort wake nobody. Its listening sockets must not be touched, and the supervisor's is none of TCP.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                    one.getpeername()  # fails where it listens
                    one.shutdown(socket.SHUT_RDWR)
