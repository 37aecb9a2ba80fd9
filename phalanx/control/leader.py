"""Whom a node obeys: the author of the newest term, which every node reads off the run's directory. Where that one is lost, the living
become it in turn. Part of `control/agent`; never loads torch."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from phalanx.control.channel import Link, dial
from phalanx.control.controller import Controller

if TYPE_CHECKING:
    from phalanx.control.agent import Agent

_AGAIN = 0.2  # seconds until one that could not be reached is tried again
_GREETING = 1.0  # seconds in which one that lives takes a connection, or is asked again
_TURN = 0.3  # seconds by which the next in line lets the one before it go first
_FIRST = 20.0  # seconds that all wait for node 0 at the very beginning: it may still be loading


class Follower:
    """Of one node."""

    def __init__(self, agent: Agent):
        self._agent = agent
        self._link: Link | None = None
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
            self._link = await dial((host, port), self._agent.token, min(silence, _GREETING))
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
