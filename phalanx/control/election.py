"""Which node is the controller: terms and node addresses as small files in the run directory, which all nodes see, and the client that
follows the author of the newest term. Used by `control/agent` and `control/controller`.

A term is a symbolic link `term-00003` whose target is the name of its author. Creating a link is exclusive and atomic on every file
system, network ones included, and needs no data block, so a full disk stops no election. The author of a term may offer it to the others
with a link `offer-00003`: then they need not wait until it counts as lost. A node's address is in `node-00001.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from phalanx.control import protocol
from phalanx.control.channel import Channel, connect
from phalanx.control.processes import ForkClient, ReplicaProcess, Worker
from phalanx.control.store_server import KeyValueStore
from phalanx.events.frames import Address
from phalanx.events.log import EventLog
from phalanx.events.records import Event
from phalanx.events.rundir import RunDir
from phalanx.spec.load import load
from phalanx.spec.plan import Plan

_NUMBER = r"([0-9]{5}|[1-9][0-9]{5,8})"  # one spelling for each number
_TERM, _NODE = re.compile(f"term-{_NUMBER}"), re.compile(rf"node-{_NUMBER}\.json")
_AUTHOR = re.compile(r"[A-Za-z0-9-]{1,50}")  # short enough to be stored inside the link's inode
_MAX_NODE_FILE = 64 << 10  # bytes

_RETRY = 0.2  # seconds until an unreachable controller is tried again
_CONNECT_TIMEOUT = 1.0  # seconds
_TURN = 0.3  # seconds by which each node lets the one before it claim the next term first
_CLAIM_POLL = 0.1  # seconds between two looks whether another node has claimed
_FIRST_TERM = 20.0  # seconds that all nodes wait for node 0 to claim the first term: it may still be loading


class Terms:
    """The control folder of a run."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def newest(self) -> tuple[int, str]:
        """The newest term and its author; (0, "") before the first.

        If the name of a term is taken by something that is not a valid link, its author is "": nobody is obeyed in that term, and the
        next number is still free.
        """
        terms = [int(match[1]) for name in os.listdir(self.folder) if (match := _TERM.fullmatch(name))]
        return (max(terms), self._author(max(terms))) if terms else (0, "")

    def claim(self, term: int, author: str) -> bool:
        """Become the author of a term; False if another node is. Raises OSError if the folder cannot be written."""
        assert _AUTHOR.fullmatch(author), f"{author!r} is no author's name"
        try:
            os.symlink(author, self._term(term))
        except OSError:
            # A lost race is a FileExistsError, on some network file systems a PermissionError. Others lose the answer to a link that
            # they have made. The link decides.
            if not os.path.lexists(self._term(term)):
                raise
            return self._author(term) == author
        return True

    def offer(self, term: int) -> None:
        """The author lets others claim the next term at once. It may claim that itself, too."""
        with contextlib.suppress(FileExistsError):
            os.symlink("offer", self._offer(term))

    def offered(self, term: int) -> bool:
        return os.path.lexists(self._offer(term))

    def announce(self, node: int, info: dict[str, Any]) -> None:
        """Publish the name and address of a node, readable by this user only. Never contains the token."""
        assert "token" not in info, "a token is given to those who need it, and never written down for all"
        path, part = self._node(node), self.folder / f".node-{node:05d}.{os.getpid()}"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
                json.dump(info, file)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def announced(self) -> dict[int, dict[str, Any]]:
        """What each node has published, by node number. Invalid files are ignored."""
        matches = filter(None, map(_NODE.fullmatch, sorted(os.listdir(self.folder))))
        nodes = {int(match[1]): _read(self.folder / match[0]) for match in matches}
        return {node: info for node, info in nodes.items() if info is not None}

    def touch(self, node: int) -> None:
        """Show a sign of life that does not depend on connections."""
        with contextlib.suppress(OSError):
            os.utime(self._node(node))

    def touched(self, node: int) -> float:
        """Time of the node's last sign of life, on the file system's clock: only good for comparison with an earlier value."""
        try:
            return self._node(node).stat().st_mtime
        except OSError:
            return 0.0

    def _term(self, term: int) -> Path:
        return self.folder / f"term-{term:05d}"

    def _offer(self, term: int) -> Path:
        return self.folder / f"offer-{term:05d}"

    def _node(self, node: int) -> Path:
        return self.folder / f"node-{node:05d}.json"

    def _author(self, term: int) -> str:
        try:
            author = os.readlink(self._term(term))
        except OSError:  # not a link
            return ""
        return author if _AUTHOR.fullmatch(author) else ""


def _read(path: Path) -> dict[str, Any] | None:
    """Read a JSON table from a regular file of reasonable size, else None."""
    try:
        # Follow no link to elsewhere, and do not block on a pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            content = file.read(_MAX_NODE_FILE + 1)
            table = json.loads(content) if len(content) <= _MAX_NODE_FILE else None
    except (OSError, ValueError, RecursionError):
        return None
    return table if isinstance(table, dict) else None


class NodeServices(ABC):
    """What the parts of a node, such as its controller and its `LeaderClient`, need from its agent, which implements the rest."""

    fork_client: ForkClient
    replica_process: ReplicaProcess

    def __init__(self, settings: protocol.AgentSettings):
        self.rundir = RunDir(Path(settings.run_dir))
        self.node, self.nodes, self.token = settings.node, settings.nodes, settings.token
        self.run, self.plan = load(self.rundir.run_file), Plan.from_json(self.rundir.plan_file.read_text())
        self.name = f"{self.node}-{secrets.token_hex(4)}"
        self.terms = Terms(self.rundir.control)
        self.address: Address = ("", 0)
        self.stores: dict[int, KeyValueStore] = {}
        """Rendezvous stores of the generations that this agent began as the controller."""
        self.workers: dict[str, Worker] = {}
        self.unreachable: dict[int, float] = {}
        """Nodes that an injected fault separates from this one, and until when."""
        self.stopping: str | None = None
        self.outcome: protocol.Outcome | None = None
        self._log = EventLog(self.rundir.events_file)
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
        with contextlib.suppress(OSError):
            self._log.emit(event)

    def finish(self, outcome: protocol.Outcome) -> None:
        """Report the outcome to the launcher and end the node."""
        self.outcome = outcome
        print(json.dumps(protocol.encode(outcome)), flush=True)
        self._over.set()

    def reachable(self, node: int) -> bool:
        return time.monotonic() >= self.unreachable.get(node, 0.0)

    @abstractmethod
    def join_report(self) -> protocol.Join: ...
    @abstractmethod
    def drop_link(self, node: int) -> None: ...
    @abstractmethod
    async def obey(self, order: protocol.Order) -> None: ...


class LeaderClient:
    """Follows the author of the newest term; if that node is lost, the living nodes claim the next term in turn."""

    def __init__(self, agent: NodeServices, lead: Callable[[int], Awaitable[None]]):
        """`lead` runs a controller for a term."""
        self._agent, self._lead, self._heartbeat = agent, lead, agent.run.resilience.heartbeat
        self._channel: Channel | None = None
        self._signs_of_life: dict[str, tuple[float, float]] = {}
        """Controller name to (touched time of its file, when that was first seen)."""

    def send(self, report: protocol.Report) -> None:
        """Send a report to the controller, if there is a connection."""
        if self._channel is not None:
            self._channel.post(protocol.encode(report))

    def drop_link(self, node: int) -> None:
        """Injected fault: the connection to that node breaks."""
        if self._channel is not None and self._agent.terms.newest()[1].startswith(f"{node}-"):
            self._channel.close()

    async def follow(self) -> None:
        """Obey the newest controller, or become it, until the run is over."""
        lost: set[str] = set()
        while self._agent.outcome is None:
            term, author = self._agent.terms.newest()
            if author == self._agent.name:
                await self._lead(term)
            elif author and author not in lost and not self._agent.terms.offered(term):
                if not await self._follow_author(term, author):
                    lost.add(author)
            elif await self._wait_for_turn(term, lost) and self._agent.terms.claim(term + 1, self._agent.name):
                await self._lead(term + 1)

    async def _wait_for_turn(self, term: int, lost: set[str]) -> bool:
        """Let the living nodes with smaller numbers claim first; returns whether the term is still the newest then."""
        announced = self._agent.terms.announced()
        living = sorted(node for node, info in announced.items() if info.get("name") not in lost)
        position = living.index(self._agent.node) if self._agent.node in living else len(living)
        first_term = term == 0 and self._agent.node
        deadline = time.monotonic() + _TURN * position + (_FIRST_TERM if first_term else 0.0)
        while (still := self._agent.terms.newest()[0] == term) and (left := deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _CLAIM_POLL))
        return still

    async def _follow_author(self, term: int, author: str) -> bool:
        """Obey the author of this term until it is deposed or unreachable (True) or lost (False)."""
        node = int(author.partition("-")[0])
        info = self._agent.terms.announced().get(node, {})
        if info.get("name") != author:
            return False
        try:
            if not self._agent.reachable(node):
                raise ConnectionError("the link is down")
            host, port = info["address"]
            self._channel = await self._connect((host, port), term)
        except ConnectionRefusedError:
            return False  # its machine is up, its process is gone
        except (OSError, TimeoutError):
            await asyncio.sleep(_RETRY)
            return self._shows_life(node, author)
        heard = False
        try:
            self._channel.post(protocol.encode(self._agent.join_report()))
            while self._agent.outcome is None:
                order = protocol.decode(await asyncio.wait_for(self._channel.receive(), self._heartbeat))
                heard = True
                if isinstance(order, protocol.ControllerAlive):
                    self._signs_of_life[author] = (self._agent.terms.touched(node), time.monotonic())
                    continue
                if self._agent.terms.newest() != (term, author):
                    break  # it was deposed, and may not know
                await self._agent.obey(order)
        except (ConnectionError, TimeoutError):
            pass
        finally:
            self._channel.close()
            self._channel = None
        if not heard:
            await asyncio.sleep(_RETRY)  # it does not lead yet, or does not want this node now
        return True

    async def _connect(self, address: Address, term: int) -> Channel:
        """Connect to the author of a term. Raises TimeoutError if that takes too long, or as soon as the author offers its term."""
        connecting = asyncio.ensure_future(connect(address, self._agent.token, min(self._heartbeat, _CONNECT_TIMEOUT)))
        while not (await asyncio.wait({connecting}, timeout=_CLAIM_POLL))[0]:
            if self._agent.terms.offered(term):
                connecting.add_done_callback(_close_late)
                raise TimeoutError("it has offered its term")
        return connecting.result()

    def _shows_life(self, node: int, author: str) -> bool:
        """Whether an unreachable controller still touches its file: then only the link is broken, and a takeover would split the run."""
        now, touched = time.monotonic(), self._agent.terms.touched(node)
        known = self._signs_of_life.get(author)
        if known is None or known[0] != touched:
            self._signs_of_life[author] = known = (touched, now)
        return now - known[1] <= self._heartbeat


def _close_late(connecting: asyncio.Future[Channel]) -> None:
    """Close a connection that nobody waits for any more."""
    if not connecting.cancelled() and connecting.exception() is None:
        connecting.result().close()
