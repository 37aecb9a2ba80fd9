"""Where the hosts of a run meet that an engine has started: how node 0 gives the others their settings, and what the agents share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Protocol

from phalanx.control.codec import Message, decode, encode
from phalanx.control.protocol import AgentSettings, Outcome
from phalanx.control.registry import FolderRegistry
from phalanx.events.log import EventLog
from phalanx.events.rundir import RunDir, replace_file, replace_private_file

_POLL = 0.1  # seconds between two looks for the settings


class Rendezvous(Protocol):
    """What `launch/node` needs from the place where the hosts meet."""

    registry: str
    """`AgentSettings.registry`."""
    launch: str
    """`AgentSettings.launch` of a run that is prepared now."""
    shared: bool
    """All hosts see one run directory."""

    def over(self) -> int | None:
        """The exit code of a run that is over already; None if it is not."""

    def settings(self) -> AgentSettings | None:
        """The settings of this launch; None before node 0 has prepared it."""

    def wait_for_settings(self, seconds: float) -> AgentSettings | None:
        """The settings, as soon as there are any; None if there are none in time, or the run is over."""

    def publish(self, settings: AgentSettings) -> None:
        """Give all hosts their settings."""

    def record(self, line: str) -> None:
        """Append a record of this launch to events.jsonl."""

    def stop_requested(self) -> bool:
        """Whether somebody has asked the run to save and end by other means than a signal."""

    def follow(self, settings: AgentSettings, heartbeat: float) -> None:
        """The agent of this host is about to start with these settings."""

    def handle(self, message: Message) -> None:
        """Handle a message of the agent."""

    def messages(self) -> list[Message]:
        """Messages for the agent."""

    def leads(self, node: int) -> bool:
        """Whether the agent of this host, whose number is given, is the controller."""

    def lose(self) -> None:
        """The agent of this host has ended, and is started again."""

    def finish(self, settings: AgentSettings, outcome: Outcome) -> None:
        """The run is over."""


class FolderRendezvous:
    """The run directory, which all hosts see. Implements `Rendezvous`; the agents share its control folder by themselves."""

    registry, shared = "folder", True

    def __init__(self, rundir: RunDir, launch: str):
        self.launch, self._rundir, self._path = launch, rundir, rundir.settings_file
        self._terms: FolderRegistry | None = None

    def over(self) -> int | None:
        return None

    def settings(self) -> AgentSettings | None:
        try:
            settings = decode(json.loads(self._path.read_text()))
        except (OSError, ValueError):
            return None
        return settings if isinstance(settings, AgentSettings) and settings.launch == self.launch else None

    def wait_for_settings(self, seconds: float) -> AgentSettings | None:
        return wait(self.settings, seconds, _POLL)

    def publish(self, settings: AgentSettings) -> None:
        """In a file that only this user can read."""
        replace_private_file(self._path, json.dumps(encode(settings)))

    def record(self, line: str) -> None:
        log = EventLog(self._rundir.events_file)
        log.write(line)
        log.close()

    def stop_requested(self) -> bool:
        return self._rundir.stop_file.exists()

    def follow(self, settings: AgentSettings, heartbeat: float) -> None: ...

    def handle(self, message: Message) -> None: ...

    def messages(self) -> list[Message]:
        return []

    def leads(self, node: int) -> bool:
        """The name of an agent begins with its node."""
        self._terms = self._terms or FolderRegistry(self._rundir)
        try:
            return self._terms.newest()[1].startswith(f"{node}-")
        except OSError:
            return False

    def lose(self) -> None: ...

    def finish(self, settings: AgentSettings, outcome: Outcome) -> None:
        self._path.unlink(missing_ok=True)  # nobody needs the token any more
        replace_file(self._rundir.exit_file, f"{outcome.code}\n")


def wait(ask: Callable[[], AgentSettings | None], seconds: float, poll: float) -> AgentSettings | None:
    """Ask until there is an answer; None if there is none in time."""
    deadline = time.monotonic() + seconds
    while (answer := ask()) is None and time.monotonic() < deadline:
        time.sleep(poll)
    return answer
