"""Orders that reach a rank while it leaves one generation and enters the next."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from phalanx.control import codec, protocol
from phalanx.host.env import python_env
from phalanx.worker import control_thread
from phalanx.worker.control_thread import INTERRUPT, ControlThread


class Agent:
    """The agent's side of a rank's control thread."""

    def __init__(self, connection: socket.socket):
        self._connection = connection

    def halt(self, generation: int) -> None:
        self._connection.sendall(json.dumps(codec.encode(protocol.Halt(generation=generation))).encode() + b"\n")


@pytest.fixture
def sides() -> Iterator[tuple[Agent, ControlThread]]:
    handler = signal.getsignal(INTERRUPT)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Agent(ours), ControlThread(theirs)
    signal.signal(INTERRUPT, handler)


def test_no_generation_begins_while_connections_of_the_last_are_being_cut(
    sides: tuple[Agent, ControlThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    cutting, finish = threading.Event(), threading.Event()

    def cut_slowly() -> None:
        cutting.set()
        finish.wait()

    monkeypatch.setattr(control_thread, "cut_connections", cut_slowly)
    agent, control = sides
    assert control.begin(0)
    control.start()
    agent.halt(0)
    cutting.wait()
    control.working = False  # as the main thread does when it has left the generation
    next_steps = [threading.Thread(target=control.wait_until_cut), threading.Thread(target=control.begin, args=(1,))]
    for thread in next_steps:
        thread.start()
        thread.join(0.1)
    assert all(thread.is_alive() for thread in next_steps), "connections opened now would be cut"
    finish.set()
    for thread in next_steps:
        thread.join()
    assert control.generation == 1 and control.working and not control.over


def test_generation_that_is_over_does_not_begin(sides: tuple[Agent, ControlThread]) -> None:
    agent, control = sides
    control.start()
    agent.halt(3)
    assert control.orders.get() == protocol.Halt(generation=3)
    assert not control.begin(3) and not control.working
    assert control.begin(4) and control.working


CONNECT = """
import socket, threading
from phalanx.worker.control_thread import cut_connections

def connecting(address):
    sock = socket.socket()
    sock.setblocking(False)
    sock.connect_ex(address)
    return sock

def state(sock):
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]

SYN_SENT, LISTEN = 2, 10
server = socket.create_server(("127.0.0.1", 0), backlog=0)
full = []
while not full or state(full[-1]) != SYN_SENT:  # until the kernel no longer answers, like a host that is cut off
    full.append(connecting(server.getsockname()))
sock, ended = socket.socket(), []

def connect():
    try:
        sock.connect(server.getsockname())
    except OSError as error:
        ended.append(error)

thread = threading.Thread(target=connect, daemon=True)
thread.start()
while state(sock) != SYN_SENT:
    pass
cut_connections()
thread.join(60)
print(len(ended), state(server) == LISTEN)
"""


def test_rank_that_waits_for_a_host_which_does_not_answer_is_woken() -> None:
    done = subprocess.run([sys.executable, "-c", CONNECT], capture_output=True, text=True, env=python_env())
    assert done.stdout == "1 True\n", done.stderr
