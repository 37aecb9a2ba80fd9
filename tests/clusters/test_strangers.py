"""Strangers, and people in the middle, on the network of a run over several hosts: refused and logged, and the run goes on as if alone."""

from __future__ import annotations

import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hosts import Hosts, OnHosts, available, losses
from strangers import Conversation, attack, leaks, recorded

from phalanx.events import frames
from phalanx.events.frames import Address
from phalanx.events.log import read_events
from phalanx.events.records import Copied, Event, FailureNoticed, Recovered, Step, StrangerRefused
from phalanx.launch.job import Job
from phalanx.launch.prepare import Request, prepare
from phalanx.spec.load import loads

pytestmark = [pytest.mark.clusters, pytest.mark.skipif(not available(), reason="needs root and network namespaces")]

PORTS = range(40000, 40010)
RUN = """
[model]
dim = 64
layers = 2
heads = 2
kv_heads = 2
[train]
batch = 4
micro_batch = 1
sequence_length = 64
steps = 300
[layout]
data = 2
[cluster]
threads = 1
nodes = {nodes}
ports = "40000-40009"
[checkpoint]
url = "{saved}"
memory_every = 1
[resilience]
spares = {spares}
"""
Losses = dict[int, tuple[float, int | None]]
ATTACKED = 5  # step at which it begins


def job(folder: Path, hosts: Hosts | None, nodes: int = 1, spares: int = 0) -> Job:
    text = RUN.format(nodes=nodes, spares=spares, saved=f"{folder}-saved")
    prepared = prepare(loads(text), "run", Request(directory=folder))
    if hosts is not None:
        prepared = replace(prepared, launcher=OnHosts(prepared.run, hosts))
    return Job(prepared)


def run(running: Job, during: Callable[[], None]) -> list[Event]:
    """Let a run go to its end, with something else going on from a step on; that must end before the run does."""
    ended_at: list[int] = []
    step, failed = [0], []

    def disturb() -> None:
        try:
            during()
        except BaseException as error:
            failed.append(error)
        ended_at.append(step[0])

    thread = threading.Thread(target=disturb)
    for event in running.events():
        if isinstance(event, Step):
            step[0] = event.step
            if event.step == ATTACKED:
                thread.start()
    thread.join()
    if failed:
        raise failed[0]
    print(f"disturbed from step {ATTACKED} to step {ended_at[0]} of {running.run.steps}")
    assert running.exit_code == 0 and ended_at[0] < running.run.steps - 1
    return read_events(running.rundir.events_file)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Losses:
    """Losses and batches of the run on this machine alone."""
    return losses(list(job(tmp_path_factory.mktemp("alone") / "run", None).events()))


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


def refusals(events: list[Event]) -> list[StrangerRefused]:
    return [event for event in events if isinstance(event, StrangerRefused)]


def replica_refusals(running: Job) -> list[str]:
    logs = running.rundir.logs.glob("replicas-*.log")
    return [line for log in sorted(logs) for line in log.read_text().splitlines() if " refused " in line]


def ours(hosts: Hosts) -> dict[str, list[Address]]:
    """The ports of agents and of replica servers."""
    found: dict[str, list[Address]] = {"agent": [], "replica_server": [], "rank": []}
    for host in range(hosts.count):
        for address, port, pid in hosts.listeners(host):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            kind = next((kind for kind in ("agent", "replica_server") if f".{kind}\0".encode() in command), "rank")
            found[kind].append((address, port))
    return found


def test_strangers_on_every_port_disturb_nothing(tmp_path: Path, hosts: Hosts, undisturbed: Losses) -> None:
    running = job(tmp_path / "run", hosts, nodes=3, spares=1)
    token, draw = running._settings.token, random.Random(8)

    def disturb() -> None:
        ports = ours(hosts)
        print({kind: len(found) for kind, found in ports.items()})
        addresses = {hosts.address(host) for host in range(3)}
        assert {address for found in ports.values() for address, _ in found} == addresses, "nothing listens elsewhere"
        for kind in ("agent", "replica_server"):
            assert {address for address, _ in ports[kind]} == addresses and {port for _, port in ports[kind]} <= set(PORTS)
        assert len(ports["rank"]) >= 2, "gloo's"
        questions = {"agent": [{"store": 999}, {"op": "count"}], "replica_server": [{"message": {"op": "list"}, "bytes": 0}]}
        uses = {"agent": frames.CONTROL, "replica_server": frames.REPLICAS}
        said = [draw.randbytes(draw.choice([8, 40, 64, 200])) for _ in range(20)]
        attacks: list[threading.Thread] = []
        for kind, found in ports.items():
            for address in found:
                conversation: Conversation = (said, said)
                if kind in uses:
                    conversation = recorded(address, token, uses[kind], questions[kind])
                    with pytest.raises(frames.Refused, match="belongs to another run"):
                        frames.connect(address, "another token", uses[kind])
                # Nobody answers strangers on gloo's ports.
                patience = 10.0 if kind in uses else 0.01
                arguments = (address, 400, random.Random(draw.random()), conversation, patience)
                attacks.append(threading.Thread(target=attack, args=arguments))
        silent = [socket.create_connection(address) for found in ports.values() for address in found for _ in range(100)]
        for thread in attacks:
            thread.start()
        for thread in attacks:
            thread.join()
        for sock in silent:
            sock.close()

    events = run(running, disturb)
    assert losses(events) == undisturbed
    assert not [event for event in events if isinstance(event, FailureNoticed)]
    assert {event.node for event in refusals(events)} == {0, 1, 2}
    assert {event.reason.split(" (")[0] for event in refusals(events)} & {
        "it does not know the token of this run",
        "it did not answer the greeting",
        "it did not prove itself before many others came",
    }
    assert len(replica_refusals(running)) >= 3 * 400
    assert token not in running.rundir.events_file.read_text()


def test_token_is_seen_by_nobody(tmp_path: Path, hosts: Hosts) -> None:
    running = job(tmp_path / "run", hosts, nodes=3, spares=1)
    token, found = running._settings.token, []

    def look() -> None:
        for host in range(3):
            pids = hosts.pids(host)
            shared = Path(f"/proc/{pids[-1]}/root/dev/shm")
            assert any(token in path.read_text() for path in shared.rglob("server.json")), "where it has to be"
            found.extend(leaks(token, pids, [shared]))
        found.extend(leaks(token, map(int, filter(str.isdigit, os.listdir("/proc"))), [tmp_path]))

    run(running, look)
    assert not found and not leaks(token, [], [tmp_path])


_FIRST = frames.NONCE + frames.PROOF + frames.HEADER + frames.SEAL  # bytes that a client sends before its first message


class Middle:
    """Somebody between the hosts, who passes on what they say to each other's agents and replica servers, and changes some of it."""

    def __init__(self, hosts: Hosts, victims: str):
        """`victims`: connections to change: "agents", "store" or "replicas"."""
        self.victims, self.active = victims, threading.Event()
        self.changed, self.sessions = 0, list[tuple[Address, bytes]]()
        self._draw, self._last, self._listeners = random.Random(victims), 0.0, list[socket.socket]()
        towards = {}
        for host in range(hosts.count):
            own = hosts.address(host).rpartition(".")[0] + f".{110 + host}"
            hosts.add_address(own)
            towards[hosts.address(host)] = own
            for port in PORTS:
                listener = socket.create_server((own, port), backlog=64)
                self._listeners.append(listener)
                threading.Thread(target=self._accept, args=(listener, (hosts.address(host), port)), daemon=True).start()
        for host in range(hosts.count):
            hosts.redirect(host, PORTS, {address: own for address, own in towards.items() if address != hosts.address(host)})

    def close(self) -> None:
        for listener in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)  # wakes its thread
            listener.close()

    def _accept(self, listener: socket.socket, server: Address) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                onward = socket.create_connection(server, timeout=5.0)
            except OSError:
                client.close()
                continue
            onward.settimeout(None)
            threading.Thread(target=self._connect, args=(client, onward, server), daemon=True).start()

    def _connect(self, client: socket.socket, onward: socket.socket, server: Address) -> None:
        kind: list[str] = []
        with client, onward:
            back = threading.Thread(target=self._pass_on, args=(onward, client, kind, None), daemon=True)
            back.start()
            self._pass_on(client, onward, kind, server)
            back.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket, kind: list[str], server: Address | None) -> None:
        """In one direction; `server`: where to, None on the way back. The client's first message tells what the connection is for."""
        session = bytearray()
        with suppress(OSError):
            while part := source.recv(1 << 16):
                session += part
                if server is not None and not kind and len(session) > _FIRST + 20:
                    first = bytes(session[_FIRST:])
                    known = {b'{"store"': "store", b'{"message": {"op"': "replicas"}
                    kind.append(next((kind for begin, kind in known.items() if first.startswith(begin)), "agents"))
                sink.sendall(self._change(part) if kind == [self.victims] else part)
        if server is not None and kind and len(self.sessions) < 500:
            self.sessions.append((server, bytes(session[: 1 << 20])))
        for sock in (source, sink):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _change(self, part: bytes) -> bytes:
        """Flip a bit, at most once in a while: who changes everything has cut the cable."""
        if not self.active.is_set() or time.monotonic() < self._last + 0.7:
            return part
        self._last, changed = time.monotonic(), bytearray(part)
        changed[self._draw.randrange(len(changed))] ^= 1 << self._draw.randrange(8)
        self.changed += 1
        return bytes(changed)


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs the Debian package nftables")
@pytest.mark.parametrize("victims", ["agents", "replicas", "store"])
def test_bits_flipped_on_the_way_change_nothing(
    tmp_path: Path, hosts: Hosts, undisturbed: Losses, victims: str, request: pytest.FixtureRequest
) -> None:
    middle = Middle(hosts, victims)
    request.addfinalizer(middle.close)
    running = job(tmp_path / "run", hosts, nodes=3, spares=1)

    def disturb() -> None:
        middle.active.set()
        deadline = time.monotonic() + 8.0
        while time.monotonic() < deadline:
            time.sleep(0.1)
            for server, session in middle.sessions[:3]:  # and plays again what it has heard
                with suppress(OSError), socket.create_connection(server, timeout=1.0) as sock:
                    sock.sendall(session)
        middle.active.clear()

    events = run(running, disturb)
    print(f"{middle.changed} messages changed")
    assert middle.changed >= 5
    assert losses(events) == undisturbed
    assert not [event for event in events if isinstance(event, FailureNoticed)]
    seal = "it sent a message whose seal is not this connection's"
    logged = replica_refusals(running) if victims == "replicas" else [event.reason for event in refusals(events)]
    assert any(line.endswith(seal) for line in logged)


def test_run_over_ipv6_survives_the_loss_of_a_host(tmp_path: Path, undisturbed: Losses) -> None:
    with Hosts(2, ipv6=True) as hosts:
        running = job(tmp_path / "run", hosts, nodes=2)

        def disturb() -> None:
            addresses = {hosts.address(0), hosts.address(1)}
            assert {address for found in ours(hosts).values() for address, _ in found} == addresses
            hosts.kill_all(1)

        events = run(running, disturb)
    assert losses(events) == undisturbed
    assert any(event.peer for event in events if isinstance(event, Copied))
    (recovered,) = (event for event in events if isinstance(event, Recovered))
    assert (recovered.action, recovered.steps_lost) == ("shrink", 0)
