"""The registry of a run whose nodes share no folder, kept by the launcher. `control/launcher_registry` is the agents' side."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from pathlib import Path

from phalanx.control import codec, protocol
from phalanx.control.registry import HISTORY
from phalanx.control.run_requests import LiveBeats
from phalanx.events.log import RecordWriter, launch_events
from phalanx.events.records import Step, encode
from phalanx.events.run_logs import note_size
from phalanx.events.rundir import RunDir, replace_file


class RegistryServer:
    """Terms, addresses, records and logs of one launch."""

    def __init__(self, rundir: RunDir, heartbeat: float, clock: Callable[[], float] = time.monotonic):
        """`heartbeat`: seconds without a sign of life after which the author of a term counts as lost."""
        self._rundir, self._heartbeat, self._clock = rundir, heartbeat, clock
        self._writer = RecordWriter(rundir.events_file)
        self._term, self._author, self._offered = 0, "", 0
        self._nodes: dict[int, protocol.NodeInfo] = {}
        self._changes: list[int] = []
        """Nodes that have announced themselves or were lost, in this order."""
        self._told: dict[int, int] = {}
        """How many of these changes each agent knows."""
        self._touches, self._touched = 0, -math.inf
        self.changed = False
        """The agents do not know the newest state yet."""

    def tell(self, node: int, send: Callable[[codec.Message], bool]) -> None:
        """Tell the agent of a node the newest state: of the nodes what it does not know, because thousands may come at the same time."""
        known = self._told.get(node)
        state = protocol.RegistryState(
            term=self._term,
            author=self._author,
            offered=self._offered,
            nodes={str(changed): self._nodes.get(changed) for changed in self._changes[known or 0 :]},
            all_nodes=known is None,
            touches=self._touches,
        )
        if send(state):
            self._told[node] = len(self._changes)

    def handle(self, node: int, message: codec.Message, answer: Callable[[codec.Message], object]) -> None:
        """Handle a message of a node's agent."""
        match message:
            case protocol.Announce():
                self._nodes[node] = message.info
                self._changes.append(node)
                self.changed = True
            case protocol.ClaimTerm():
                answer(protocol.TermClaimed(term=message.term, granted=self._claim(message.term, message.author)))
            case protocol.OfferTerm():
                self._offered = max(self._offered, message.term)
                self.changed = True
            case protocol.Touch():
                self._touches, self._touched = self._touches + 1, self._clock()
            case protocol.Record():
                self._writer.write(message.line, if_new=message.if_new)
            case protocol.AskHistory():
                answer(protocol.History(lines=self._history()))
            case LiveBeats():
                with contextlib.suppress(OSError):
                    replace_file(self._rundir.beats_file, message.text)
            case protocol.LogText():
                path = self._rundir.logs / Path(message.name).name
                with path.open("a") as file:
                    file.write(message.text)
                note_size(path, path.stat().st_size, message.time)

    def lose(self, node: int) -> None:
        """The agent of a node is gone."""
        info = self._nodes.pop(node, None)
        self._changes.append(node)
        self._told.pop(node, None)
        if info is not None and info.name == self._author:
            self._touched = -math.inf
        self.changed = True

    def _claim(self, term: int, author: str) -> bool:
        if (term, author) == (self._term, self._author):
            return True
        leads = self._author and self._offered < self._term and self._clock() - self._touched <= self._heartbeat
        if term != self._term + 1 or leads:
            return False
        self._term, self._author, self.changed = term, author, True
        self._touched = self._clock()
        return True

    def _history(self) -> list[str]:
        """What a new controller must know, and no more: a long run has millions of records."""
        events = launch_events(self._rundir.events_file)
        last = next((event for event in reversed(events) if isinstance(event, Step)), None)
        wanted = [event for event in events if event is last or isinstance(event, HISTORY)]
        return [encode(event) for event in wanted]

    def close(self) -> None:
        self._writer.close()
