"""The thread of a rank that receives orders from the node's agent while the main thread trains, and interrupts the main thread when its
generation is over, wherever it is blocked. Used by `worker/rank_process`."""

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

from phalanx.control import codec, protocol
from phalanx.control.run_requests import Observe
from phalanx.recovery.diagnose import HangReport

INTERRUPT = signal.SIGRTMIN + 1
"""Makes the main thread check whether its generation is over."""
_RETRY = 0.2  # seconds between two interruptions


class Halted(BaseException):
    """The generation is over. Not an Exception, so that no handler on the way up takes it for its own error."""


class ControlThread:
    """Puts orders into `orders`; those that concern the running step are carried out at once."""

    def __init__(self, connection: socket.socket):
        self._connection = connection
        self._lock = threading.Lock()
        self._cutting = threading.Lock()  # held while connections of a generation that is over are cut
        self.orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        """None: the agent is gone."""
        self.halted = -1
        """The newest generation that is over."""
        self.generation = -1
        """The generation that the main thread works in."""
        self.working = False
        """The main thread works in its generation and may be interrupted."""
        self.uninterruptible: Callable[[], bool] = lambda: False
        """Whether the main thread must not be interrupted now."""
        self.on_stop: Callable[[str], None] = lambda reason: None
        self.on_pause: Callable[[], None] = lambda: None
        self.on_halt: Callable[[int], None] = lambda generation: None
        self.on_observe: Callable[[Observe], None] = lambda order: None
        self.locate: Callable[[], HangReport] = HangReport
        self._main_thread = threading.get_ident()
        signal.signal(INTERRUPT, self._on_interrupt)

    def start(self) -> None:
        """Start to receive, once all callbacks are set: the first orders may be there already."""
        threading.Thread(target=self._receive, name="control", daemon=True).start()

    def report(self, report: protocol.RankReport | protocol.Record | protocol.Computed | protocol.DataPrepared) -> None:
        """Send a report or record to the agent, from any thread."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.sendall(json.dumps(codec.encode(report)).encode() + b"\n")

    @property
    def over(self) -> bool:
        """Whether the generation of the main thread is over."""
        return self.halted >= self.generation

    def begin(self, generation: int) -> bool:
        """Enter a generation; False if it is over already."""
        with self._cutting:
            self.generation = generation
            self.working = not self.over
            return self.working

    def wait_until_cut(self) -> None:
        """Wait, after work has ended, for a cut that is under way: it would hit the connections that the main thread opens next."""
        with self._cutting:
            pass

    def _receive(self) -> None:
        buffer = b""
        with contextlib.suppress(OSError):
            while block := self._connection.recv(1 << 20):
                *lines, buffer = (buffer + block).split(b"\n")
                for line in lines:
                    self._handle(codec.decode(json.loads(line)))
        self.orders.put(None)

    def _handle(self, order: Any) -> None:
        match order:
            case protocol.Halt():
                self.on_halt(order.generation)
                self.halted = max(self.halted, order.generation)
                self.orders.put(order)
                threading.Thread(target=self._interrupt, name="interrupt", daemon=True).start()
            case protocol.Stop():
                self.on_stop(order.reason)
            case protocol.Pause():
                if order.generation == self.generation:
                    self.on_pause()
            case Observe():
                if order.generation == self.generation:
                    self.on_observe(order)
            case protocol.CutConnections():
                cut_connections()
            case protocol.LocateRanks():
                location = protocol.RankLocation(generation=order.generation, question=order.question, report=self.locate())
                self.report(location)
            case _:
                self.orders.put(order)

    def _interrupt(self) -> None:
        """Repeat until the main thread has given up: it may open new connections, and an exception in a destructor is lost."""
        while self.working and self.over:
            with self._cutting:
                if self.working and self.over:
                    cut_connections()
            time.sleep(_RETRY)  # usually the main thread fails on a connection by itself, at a place made for it
            if self.working and self.over:
                signal.pthread_kill(self._main_thread, INTERRUPT)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        """Runs in the main thread, between two of its instructions."""
        if self.working and self.over and not self.uninterruptible():
            raise Halted


def cut_connections() -> None:
    """Shut down every TCP connection of this process, which wakes everybody blocked on one, here or on the other side; also those that
    are not established yet, because the other host does not answer.

    gloo's own ways to abort wake nobody. Its listening sockets must not be touched; the agent's connection is not TCP.
    """
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            fd = int(name)
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as sock:
                tcp = sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM
                if tcp and not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # not listening
                    sock.shutdown(socket.SHUT_RDWR)
