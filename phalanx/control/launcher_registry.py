"""The registry of a run whose nodes share no folder, as an agent sees it: the launcher keeps it (`launch/registry_server`). Messages go through
the standard input and output of the agent.

Whoever leads must hear from the launcher: without it, nobody can know whether another node has claimed the next term.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from phalanx.control import codec, protocol
from phalanx.control.run_requests import LiveBeats, RunRequest
from phalanx.events.records import Event, decode

_EMPTY = protocol.RegistryState(term=0, author="", offered=0, nodes={}, touches=0)


class LauncherRegistry:
    """Implements `control/registry.Registry`."""

    def __init__(self, send: Callable[[codec.Message], None], lease: float, clock: Callable[[], float] = time.monotonic):
        """`lease`: seconds without a word from the launcher after which this node must not lead."""
        self._send, self._lease, self._clock = send, lease, clock
        self._state, self._heard = _EMPTY, -float("inf")
        self._nodes: dict[int, protocol.NodeInfo] = {}
        self._answer: asyncio.Future[protocol.TermClaimed] | None = None
        self._history: asyncio.Future[protocol.History] | None = None

    def receive(self, message: codec.Message) -> None:
        """Handle a message of the launcher."""
        self._heard = self._clock()
        match message:
            case protocol.RegistryState():
                self._state = message
                if message.all_nodes:
                    self._nodes.clear()
                for node, info in message.nodes.items():
                    if info is not None:
                        self._nodes[int(node)] = info
                    else:
                        self._nodes.pop(int(node), None)
            case protocol.TermClaimed() if self._answer is not None and not self._answer.done():
                self._answer.set_result(message)
            case protocol.History() if self._history is not None and not self._history.done():
                self._history.set_result(message)

    def newest(self) -> tuple[int, str]:
        return self._state.term, self._state.author

    def holds(self, term: int, author: str) -> bool:
        return self.newest() == (term, author) and self._clock() - self._heard <= self._lease

    async def claim(self, term: int, author: str) -> bool:
        self._answer = asyncio.get_running_loop().create_future()
        self._send(protocol.ClaimTerm(term=term, author=author))
        try:
            answer = await asyncio.wait_for(self._answer, self._lease)
        except TimeoutError:
            return False
        return answer.granted and answer.term == term

    def offer(self, term: int) -> None:
        self._send(protocol.OfferTerm(term=term))

    def offered(self, term: int) -> bool:
        return self._state.offered >= term

    def announce(self, node: int, info: protocol.NodeInfo) -> None:
        self._send(protocol.Announce(info=info))

    def info(self, node: int) -> protocol.NodeInfo | None:
        return self._nodes.get(node)

    def announced(self) -> dict[int, protocol.NodeInfo]:
        return dict(self._nodes)

    def touch(self, node: int) -> None:
        self._send(protocol.Touch())

    def touched(self, node: int) -> float:
        return float(self._state.touches)

    def record(self, line: str, *, if_new: bool = False) -> None:
        self._send(protocol.Record(line=line, if_new=if_new))

    async def history(self) -> list[Event]:
        """Waits for the launcher, without which nobody leads."""
        self._history = asyncio.get_running_loop().create_future()
        self._send(protocol.AskHistory())
        return [event for line in (await self._history).lines if (event := decode(line)) is not None]

    def take_requests(self) -> list[RunRequest]:
        return []

    def publish_beats(self, text: str) -> None:
        self._send(LiveBeats(text=text))
