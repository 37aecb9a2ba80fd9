"""Who decides: terms, and where each node can be reached, as small files in the run's directory that all nodes see. Used by
`control/agent` and `control/controller`.

A term is a symbolic link `term-00003` whose text is its author. Creating one is exclusive and atomic on every file system, network
ones included, and needs no room for data, so a full disk stops no election. A node's address is `node-00001.json`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phalanx.control.channel import Channel, connect
from phalanx.control.controller import Controller

if TYPE_CHECKING:
    from phalanx.control.agent import Agent


_NUMBER = r"([0-9]{5}|[1-9][0-9]{5,8})"  # one spelling for each number
_TERM, _NODE = re.compile(f"term-{_NUMBER}"), re.compile(rf"node-{_NUMBER}\.json")
_AUTHOR = re.compile(r"[A-Za-z0-9-]{1,50}")  # short enough to lie inside the link's own entry
_MOST = 64 << 10  # bytes of a node's file


class Terms:
    """The control folder of a run."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def newest(self) -> tuple[int, str] | None:
        """The newest term and its author; None before the first. Where something else has taken the name of a term, its author is
        nobody, "": no one is obeyed in that term, and the next number is still free."""
        terms = [int(match[1]) for name in os.listdir(self.folder) if (match := _TERM.fullmatch(name))]
        return (max(terms), self._author(max(terms))) if terms else None

    def claim(self, term: int, author: str) -> bool:
        """Become the author of a term; False where somebody else is. OSError where the folder cannot be written at all."""
        assert _AUTHOR.fullmatch(author), f"{author!r} is no author's name"
        try:
            os.symlink(author, self._term(term))
        except FileExistsError:
            return self._author(term) == author  # on a network file system an answer can be lost after the link was made
        return True

    def announce(self, node: int, text: dict[str, Any]) -> None:
        """Leave word of a node, in place of what it said before. For this user's eyes only, and no secret all the same."""
        assert "token" not in text, "a token is given to those who need it, and never written down for all"
        path, part = self._node(node), self.folder / f".node-{node:05d}.{os.getpid()}"
        try:
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w") as file:
                json.dump(text, file)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def announced(self) -> dict[int, dict[str, Any]]:
        """What every node has left, by number. What is no node's word is passed over."""
        found = {}
        for name in sorted(os.listdir(self.folder)):
            match = _NODE.fullmatch(name)
            text = _read(self.folder / name) if match else None
            if match and text is not None:
                found[int(match[1])] = text
        return found

    def touch(self, node: int) -> None:
        """A sign of life of a node, where links may fail."""
        with contextlib.suppress(OSError):
            os.utime(self._node(node))

    def touched(self, node: int) -> float:
        """When it gave its last one, by the clock of the file system: for comparing with what was seen before."""
        try:
            return self._node(node).stat().st_mtime
        except OSError:
            return 0.0

    def _term(self, term: int) -> Path:
        return self.folder / f"term-{term:05d}"

    def _node(self, node: int) -> Path:
        return self.folder / f"node-{node:05d}.json"

    def _author(self, term: int) -> str:
        try:
            author = os.readlink(self._term(term))
        except OSError:  # no link
            return ""
        return author if _AUTHOR.fullmatch(author) else ""


def _read(path: Path) -> dict[str, Any] | None:
    """A table in a plain file of reasonable size, or None."""
    try:
        # Neither through a link to somewhere else, nor waiting for a pipe's other end.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            found = file.read(_MOST + 1)
            text = json.loads(found) if len(found) <= _MOST else None
    except (OSError, ValueError, RecursionError):
        return None
    return text if isinstance(text, dict) else None


_AGAIN = 0.2  # seconds until one that could not be reached is tried again
_GREETING = 1.0  # seconds in which one that lives takes a connection, or is asked again
_TURN = 0.3  # seconds by which the next in line lets the one before it go first
_FIRST = 20.0  # seconds that all wait for node 0 at the very beginning: it may still be loading


class LeaderClient:
    """Of one node."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._link: Channel | None = None
        self._silent: dict[str, tuple[float, float]] = {}

    def post(self, message: dict[str, Any]) -> None:
        """To whoever decides, if that one can be reached."""
        if self._link is not None:
            self._link.post(message)

    def part_from(self, node: int) -> None:
        """A planted fault: that node is not heard any more."""
        newest = self._agent.claims.newest()
        if self._link is not None and newest is not None and newest[1].startswith(f"{node}-"):
            self._link.close()

    async def follow(self) -> None:
        """Follow the author of the newest term; where that one is lost, become it in turn."""
        await self._agent.nursery.ready()
        lost: set[str] = set()
        while self._agent.outcome is None:
            newest = self._agent.claims.newest()
            term, author = newest or (0, "")
            if author == self._agent.name:
                await self._lead(term)
            elif author and author not in lost:
                if not await self._serve(term, author):
                    lost.add(author)
            elif await self._in_turn(term, lost) and self._agent.claims.claim(term + 1, self._agent.name):
                await self._lead(term + 1)

    async def _in_turn(self, term: int, lost: set[str]) -> bool:
        """Wait for those before this node; whether the term is still the newest then."""
        announced = self._agent.claims.announced()
        living = sorted(node for node, said in announced.items() if said.get("name") not in lost)
        place = living.index(self._agent.node) if self._agent.node in living else len(living)
        first = term == 0 and self._agent.node
        await asyncio.sleep(_TURN * place + (_FIRST if first else 0.0))
        newest = self._agent.claims.newest()
        return (newest[0] if newest else 0) == term

    async def _lead(self, term: int) -> None:
        self._agent.controller = Controller(self._agent, term)
        try:
            self._agent.controller.hear(self._agent.node, self._agent.joining())
            await self._agent.controller.lead()
        finally:
            self._agent.controller = None

    async def _serve(self, term: int, author: str) -> bool:
        """Do what the author of this term says until it is deposed or not to be reached (True), or lost (False)."""
        node, silence = int(author.partition("-")[0]), self._agent.run.resilience.heartbeat
        said = self._agent.claims.announced().get(node, {})
        if said.get("name") != author:
            return False
        try:
            if not self._agent.reached(node):
                raise ConnectionError("the link is down")
            host, port = said["address"]
            self._link = await connect((host, port), self._agent.token, min(silence, _GREETING))
        except ConnectionRefusedError:
            return False  # its machine lives, its process does not
        except (OSError, TimeoutError):
            await asyncio.sleep(_AGAIN)
            return self._shows_life(node, author)
        try:
            self._link.post(self._agent.joining())
            while self._agent.outcome is None:
                message = await asyncio.wait_for(self._link.receive(), silence)
                if message.get("order") == "alive":
                    self._silent[author] = (self._agent.claims.touched(node), time.monotonic())
                    continue
                if self._agent.claims.newest() != (term, author):
                    break  # it was deposed, and may not know
                await self._agent.obey(message)
        except (ConnectionError, TimeoutError):
            pass
        finally:
            self._link.close()
            self._link = None
        return True

    def _shows_life(self, node: int, author: str) -> bool:
        """Whether a controller that cannot be reached still touches its file in the run's directory: then it is the link that is
        broken, and taking over would only part the run in two."""
        now, touched = time.monotonic(), self._agent.claims.touched(node)
        known = self._silent.get(author)
        if known is None or known[0] != touched:
            self._silent[author] = known = (touched, now)
        return now - known[1] <= self._agent.run.resilience.heartbeat
