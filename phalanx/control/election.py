"""Which node is the controller: the client that follows the author of the newest term (`control/registry`) and, if that is lost, claims the
next. Used by `control/agent` and `control/controller`."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

from phalanx.control import codec, protocol
from phalanx.control.channel import Channel, connect
from phalanx.control.launcher_registry import LauncherRegistry
from phalanx.control.processes import ForkClient, ReplicaProcess, Worker
from phalanx.control.registry import FolderRegistry, Registry
from phalanx.control.store_server import KeyValueStore
from phalanx.events.frames import Address, Refused, format_address
from phalanx.events.records import Event, encode
from phalanx.events.rundir import RunDir, replace_file
from phalanx.spec.load import load
from phalanx.spec.plan import Plan

_BEAT = 0.2  # seconds between two heartbeats of a node, if there are few
_BEATS_PER_SECOND = 4000  # of all nodes, that a controller can easily receive
_RANK_BEATS_PER_SECOND = 10_000  # of all ranks
_MAX_RANK_BEAT = 2.0  # seconds between two heartbeats of each rank, at most
_REPORT_DELAY = 25e-6  # seconds for each node: reports that come within this time are sent together
_RETRY = 0.2  # seconds until an unreachable controller is tried again
_CONNECT_TIMEOUT = 1.0  # seconds
_TURN = 0.3  # seconds by which each node lets the one before it claim the next term first
_CLAIM_POLL = 0.1  # seconds between two looks whether another node has claimed
_FIRST_TERM = 20.0  # seconds that all nodes wait for node 0 to claim the first term: it may still be loading
_MAX_RECORDS = 10_000  # that wait for a controller; then the oldest are dropped


def beat_seconds(nodes: int, heartbeat: float) -> float:
    """Seconds between two heartbeats of each node, and of the controller. `heartbeat`: after which a silent node counts as lost."""
    return max(_BEAT, min(nodes / _BEATS_PER_SECOND, heartbeat / 5))


def rank_beat_seconds(nodes: int, ranks: int, heartbeat: float) -> float:
    """Seconds between two heartbeats of each rank, of which a node has this many. They tell that a rank hangs: that takes longer to notice
    than the loss of a node."""
    return max(beat_seconds(nodes, heartbeat), min(nodes * ranks / _RANK_BEATS_PER_SECOND, _MAX_RANK_BEAT))


def tell_launcher(message: codec.Message) -> None:
    """Send a message to the launcher."""
    print(json.dumps(codec.encode(message)), flush=True)


class RecordQueue:
    """Records of a node on their way to the controller, which writes them. One that the controller has not confirmed is sent to the next."""

    def __init__(self) -> None:
        self._records: deque[protocol.Record] = deque()
        self._send: Callable[[protocol.Record], object] | None = None
        self._confirmed = 0

    def add(self, record: protocol.Record) -> None:
        if len(self._records) == _MAX_RECORDS:
            self.confirm_next()
        self._records.append(record)
        if self._send is not None:
            self._send(record)

    def connect(self, send: Callable[[protocol.Record], object] | None) -> None:
        """Send everything to another controller from now on. None: there is none."""
        self._send, self._confirmed = send, 0
        if send is not None:
            for record in list(self._records):
                send(record)

    def confirm_next(self) -> None:
        self.confirm(self._confirmed + 1)

    def confirm(self, count: int) -> None:
        """The controller has this many of those that were sent since `connect`."""
        for _ in range(count - self._confirmed):
            self._records.popleft()
        self._confirmed = count


class NodeServices(ABC):
    """What the parts of a node, such as its controller and its `LeaderClient`, need from its agent, which implements the rest."""

    fork_client: ForkClient
    replica_process: ReplicaProcess

    def __init__(self, settings: protocol.AgentSettings):
        self.rundir = RunDir(Path(settings.run_dir))
        self.node, self.nodes, self.token = settings.node, settings.nodes, settings.token
        self.hosts, self.chaos = settings.hosts, settings.chaos
        self.sees_launch = self.rundir.launch_id == settings.launch
        """This host sees the run directory of the launcher."""
        if not self.sees_launch:
            self.rundir.create()
            for name, text in settings.files.items():
                replace_file(self.rundir.path / name, text)
        self.run, self.plan = load(self.rundir.run_file), Plan.from_json(self.rundir.plan_file.read_text())
        self.name = f"{self.node}-{secrets.token_hex(4)}"
        self.registry: Registry = (
            LauncherRegistry(tell_launcher, self.run.resilience.heartbeat)
            if settings.registry == "launcher"
            else FolderRegistry(self.rundir)
        )
        self.records = RecordQueue()
        self.address: Address = ("", 0)
        self.stores: dict[int, KeyValueStore] = {}
        """Rendezvous stores of the generations that this agent began as the controller."""
        self.workers: dict[str, Worker] = {}
        self.unreachable: dict[int, float] = {}
        """Nodes that an injected fault separates from this one, and until when."""
        self.stopping: str | None = None
        self.leaving: protocol.Leave | None = None
        self.handed_over: int | None = None
        """The node whose controller has handed over, and lives on."""
        self.outcome: protocol.Outcome | None = None
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Start a task whose failure ends this process instead of passing unseen."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler({"message": "a supervisor's task failed", "exception": error})
            os._exit(70)  # the others see a lost node

    def emit(self, event: Event) -> None:
        """Record an event of this node now."""
        self.records.add(protocol.Record(line=encode(replace(event, time=time.time()))))

    def finish(self, outcome: protocol.Outcome) -> None:
        """Report the outcome to the launcher and end the node."""
        self.outcome = outcome
        tell_launcher(outcome)
        self._over.set()

    def reachable(self, node: int) -> bool:
        return time.monotonic() >= self.unreachable.get(node, 0.0)

    @abstractmethod
    def join_report(self) -> protocol.Join: ...
    @abstractmethod
    def report(self, report: protocol.Report) -> None: ...
    @abstractmethod
    def flush(self) -> None:
        """Send what has been reported, now: this process may end."""

    @abstractmethod
    def drop_link(self, node: int) -> None: ...
    @abstractmethod
    def on_refused(self, address: str, reason: str) -> None: ...
    @abstractmethod
    async def obey(self, order: protocol.Order) -> None: ...


class LeaderClient:
    """Follows the author of the newest term; if that node is lost, the living nodes claim the next term in turn."""

    def __init__(self, agent: NodeServices, lead: Callable[[int], Awaitable[None]]):
        """`lead` runs a controller for a term."""
        self._agent, self._lead, self._heartbeat = agent, lead, agent.run.resilience.heartbeat
        self._registry = agent.registry
        self._channel: Channel | None = None
        self._refused: Channel | None = None
        """The last connection, if a message on it was changed on the way. Open until there is another one: its end would look like this
        node's end."""
        self._signs_of_life: dict[str, tuple[float, float]] = {}
        """Controller name to (touched time of its file, when that was first seen)."""
        self._unsent: list[protocol.Report] = []

    def send(self, report: protocol.Report) -> None:
        """Send a report to the controller, if there is a connection. What comes together is one message: the fewer of them a controller of
        thousands of nodes receives, the sooner it decides."""
        if self._channel is None:
            return
        self._unsent.append(report)
        if len(self._unsent) == 1:
            asyncio.get_running_loop().call_later(_REPORT_DELAY * self._agent.nodes, self.flush)

    def flush(self) -> None:
        """Send what is waiting, now."""
        reports, self._unsent = self._unsent, []
        if self._channel is not None and reports:
            self._channel.post(codec.encode(reports[0] if len(reports) == 1 else protocol.Reports(reports=reports)))

    def drop_link(self, node: int) -> None:
        """Injected fault: the connection to that node breaks."""
        if self._channel is not None and self._agent.registry.newest()[1].startswith(f"{node}-"):
            self._channel.close()

    async def follow(self) -> None:
        """Obey the newest controller, or become it, until the run is over."""
        lost: set[str] = set()
        while self._agent.outcome is None:
            term, author = self._registry.newest()
            if author != self._agent.name:  # if it is, but does not hold its term now, it may lead its generation again
                for store in self._agent.stores.values():
                    store.end("this generation is over: another node decides now")
            if author == self._agent.name:
                if self._registry.holds(term, author):
                    await self._lead(term)
                else:
                    await asyncio.sleep(_RETRY)
            elif author and author not in lost and not self._registry.offered(term):
                if not await self._follow_author(term, author):
                    lost.add(author)
            elif await self._wait_for_turn(term, lost):
                if await self._registry.claim(term + 1, self._agent.name):
                    await self._lead(term + 1)
                else:  # the registry knows that it lives, or this node is the one that is cut off
                    lost.discard(author)

    async def _wait_for_turn(self, term: int, lost: set[str]) -> bool:
        """Let the living nodes with smaller numbers claim first; returns whether the term is still the newest then."""
        # Each looks at the few that are lost only: thousands of nodes do this at the same moment.
        before = {node for name in lost if (node := int(name.partition("-")[0])) < self._agent.node}
        gone = sum(1 for node in before if (info := self._registry.info(node)) is None or info.name in lost)
        position = self._agent.node - gone
        first_term = term == 0 and self._agent.node
        deadline = time.monotonic() + _TURN * position + (_FIRST_TERM if first_term else 0.0)
        while (still := self._registry.newest()[0] == term) and (left := deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _CLAIM_POLL))
        return still

    async def _follow_author(self, term: int, author: str) -> bool:
        """Obey the author of this term until it is deposed or unreachable (True) or lost (False)."""
        node = int(author.partition("-")[0])
        info = self._registry.info(node)
        if info is None or info.name != author:
            return False
        try:
            if not self._agent.reachable(node):
                raise ConnectionError("the link is down")
            host, port = info.address
            self._channel = await self._connect((host, port), term)
        except ConnectionRefusedError:
            return False  # its machine is up, its process is gone
        except Refused as error:
            self._agent.on_refused(format_address((host, port)), str(error))
            await asyncio.sleep(_RETRY)
            return self._shows_life(node, author)
        except (OSError, TimeoutError):
            await asyncio.sleep(_RETRY)
            return self._shows_life(node, author)
        self._channel.on_invalid = self._agent.on_refused
        if not await self._obey_author(self._channel, term, author):
            await asyncio.sleep(_RETRY)  # it does not lead yet, or does not want this node now
        return True

    async def _obey_author(self, channel: Channel, term: int, author: str) -> bool:
        """Join, and obey until the connection ends; returns whether the author has taken this node in."""
        heard, node = False, int(author.partition("-")[0])
        try:
            channel.post(codec.encode(self._agent.join_report()))
            while self._agent.outcome is None:
                order = codec.decode(await asyncio.wait_for(channel.receive(), self._heartbeat))
                if not heard:  # it leads, and has taken this node in
                    self._agent.records.connect(self.send)
                    heard = True
                    self._close_refused()
                if isinstance(order, protocol.ControllerAlive):
                    self._agent.records.confirm(order.recorded)
                    self._signs_of_life[author] = (self._registry.touched(node), time.monotonic())
                    continue
                if self._registry.newest() != (term, author):
                    break  # it was deposed, and may not know
                if isinstance(order, protocol.HandOver):
                    self._agent.handed_over = node
                    await asyncio.sleep(_RETRY)  # until this node knows of the offer
                    break
                await self._agent.obey(order)
        except Refused:
            self._close_refused()
            self._refused = channel
        except (ConnectionError, TimeoutError):
            pass
        finally:
            self._agent.records.connect(None)
            self.flush()
            if channel is not self._refused:
                channel.close()
            self._channel = None
        return heard

    def _close_refused(self) -> None:
        if self._refused is not None:
            self._refused.close()
            self._refused = None

    async def _connect(self, address: Address, term: int) -> Channel:
        """Connect to the author of a term. Raises TimeoutError if that takes too long, or as soon as the author offers its term."""
        connecting = asyncio.ensure_future(connect(address, self._agent.token, min(self._heartbeat, _CONNECT_TIMEOUT)))
        while not (await asyncio.wait({connecting}, timeout=_CLAIM_POLL))[0]:
            if self._registry.offered(term):
                connecting.add_done_callback(_close_late)
                raise TimeoutError("it has offered its term")
        return connecting.result()

    def _shows_life(self, node: int, author: str) -> bool:
        """Whether an unreachable controller still touches its file: then only the link is broken, and a takeover would split the run."""
        now, touched = time.monotonic(), self._registry.touched(node)
        known = self._signs_of_life.get(author)
        if known is None or known[0] != touched:
            self._signs_of_life[author] = known = (touched, now)
        return now - known[1] <= self._heartbeat


def _close_late(connecting: asyncio.Future[Channel]) -> None:
    """Close a connection that nobody waits for any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()
