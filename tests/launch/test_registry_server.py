"""The registry that the launcher keeps for nodes that share no folder, with the agents' side of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path

from phalanx.control.codec import Message, decode, encode
from phalanx.control.launcher_registry import LauncherRegistry
from phalanx.control.protocol import LogText, NodeInfo, RegistryState
from phalanx.events.log import EventLog, read_events
from phalanx.events.records import FailureNoticed, Finished, HostRejected, Warned
from phalanx.events.records import encode as encode_record
from phalanx.events.rundir import RunDir
from phalanx.launch.registry_server import RegistryServer

LEASE = 0.3  # seconds


class Agents:
    """Registries of several nodes at one launcher. A node that is cut off neither hears nor is heard."""

    def __init__(self, folder: Path, nodes: int):
        self.rundir, self.now = RunDir(folder), 0.0
        self.rundir.create()
        EventLog(self.rundir.events_file).close()
        self.server = RegistryServer(self.rundir, LEASE, self.clock)
        self.cut: set[int] = set()
        self.told: list[int] = []
        """Nodes in each message to an agent."""
        self.nodes = [LauncherRegistry(self._sender(node), LEASE, self.clock) for node in range(nodes)]

    def clock(self) -> float:
        return self.now

    def _sender(self, node: int) -> Callable[[Message], None]:
        def send(message: Message) -> None:
            if node not in self.cut:
                self.server.handle(
                    node, decode(encode(message)), lambda answer: self.nodes[node].receive(decode(encode(answer)))
                )
                self.tell()

        return send

    def _deliver(self, registry: LauncherRegistry, state: Message) -> bool:
        assert isinstance(state, RegistryState)
        self.told.append(len(state.nodes))
        registry.receive(decode(encode(state)))
        return True

    def tell(self) -> None:
        for node, registry in enumerate(self.nodes):
            if node not in self.cut:
                self.server.tell(node, partial(self._deliver, registry))

    def announce(self) -> None:
        for node, registry in enumerate(self.nodes):
            registry.announce(node, NodeInfo(name=f"{node}-x", address=["10.0.0.1", node], pid=1))


def test_one_node_leads_until_it_shows_no_life(tmp_path: Path) -> None:
    async def scenario() -> None:
        agents = Agents(tmp_path, 2)
        first, second = agents.nodes
        agents.announce()
        assert second.info(0) == NodeInfo(name="0-x", address=["10.0.0.1", 0], pid=1) and first.newest() == (0, "")
        assert await first.claim(1, "0-x") and not await second.claim(1, "1-x")
        assert first.newest() == second.newest() == (1, "0-x")
        assert first.holds(1, "0-x") and not second.holds(1, "1-x")
        assert not await second.claim(2, "1-x"), "the author of term 1 shows life"
        agents.now += LEASE * 0.8
        before = second.touched(0)
        first.touch(0)
        assert second.touched(0) != before
        agents.now += LEASE * 0.8
        assert not await second.claim(2, "1-x"), "it has shown life since"
        agents.now += LEASE * 1.2
        assert await second.claim(2, "1-x") and first.newest() == (2, "1-x")

    asyncio.run(scenario())


def test_node_that_is_cut_off_from_the_launcher_leads_nobody(tmp_path: Path) -> None:
    async def scenario() -> None:
        agents = Agents(tmp_path, 2)
        first, second = agents.nodes
        agents.announce()
        assert await first.claim(1, "0-x")
        agents.cut.add(0)
        assert first.holds(1, "0-x")
        agents.now += LEASE * 1.2
        assert not first.holds(1, "0-x") and first.newest() == (1, "0-x")
        assert not await first.claim(2, "0-x")
        assert await second.claim(2, "1-x")
        agents.cut.clear()
        agents.tell()
        assert first.newest() == (2, "1-x")

    asyncio.run(scenario())


def test_term_of_a_dead_or_generous_author_can_be_claimed_at_once(tmp_path: Path) -> None:
    async def scenario() -> None:
        agents = Agents(tmp_path, 3)
        first, second, third = agents.nodes
        agents.announce()
        assert await first.claim(1, "0-x") and not second.offered(1)
        agents.server.lose(0)
        assert await second.claim(2, "1-x") and second.info(0) is None
        second.offer(2)
        assert third.offered(2) and await third.claim(3, "2-x")

    asyncio.run(scenario())


def test_records_and_logs_arrive_and_history_is_what_a_controller_needs(tmp_path: Path) -> None:
    async def scenario() -> None:
        agents = Agents(tmp_path, 1)
        events = [
            Warned(message="a", time=1.0),
            HostRejected(node=1, host="b", message="c", time=2.0),
            FailureNoticed(number=1, cause="died", message="b", step=3, time=2.0),
            Finished(step=9, time=3.0),
        ]
        for event in events:
            agents.nodes[0].record(encode_record(event))
        assert read_events(agents.rundir.events_file) == events
        assert await agents.nodes[0].history() == events[1:]
        for name in ("rank-3.log", "../../escape.log"):
            agents.server.handle(0, LogText(name=name, text="one\n", time=1.0), lambda answer: None)
            agents.server.handle(0, LogText(name=name, text="two\n", time=2.0), lambda answer: None)
        assert {path.name: path.read_text() for path in agents.rundir.logs.glob("*.log")} == {
            "rank-3.log": "one\ntwo\n",
            "escape.log": "one\ntwo\n",
        }

    asyncio.run(scenario())


def test_agents_are_told_only_what_has_changed(tmp_path: Path) -> None:
    """Else 2,000 nodes that come one after the other would be told 2,000 * 2,000 * 2,000 addresses."""
    agents = Agents(tmp_path, 30)
    agents.announce()
    assert agents.nodes[0].announced().keys() == agents.nodes[29].announced().keys() == set(range(30))
    assert sum(agents.told) == 30 * 30 and max(agents.told) == 1
    agents.cut |= {5, 7}
    agents.server.lose(7)
    agents.tell()
    assert agents.nodes[0].info(7) is None and agents.nodes[5].info(7) is not None
    agents.cut.remove(5)
    agents.tell()
    assert agents.nodes[5].announced().keys() == set(range(30)) - {7}
    agents.cut.clear()
    agents.nodes[7] = LauncherRegistry(agents._sender(7), LEASE, agents.clock)
    agents.nodes[7].announce(7, NodeInfo(name="7-y", address=["10.0.0.1", 7], pid=1))
    assert agents.nodes[7].announced() == agents.nodes[0].announced() and len(agents.nodes[0].announced()) == 30
