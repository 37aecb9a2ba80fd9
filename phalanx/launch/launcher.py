"""What a launcher is: it starts the agents of a run's nodes (`control/agent`), which do the rest. The launcher NAME is the class `LAUNCHER` of the
module `phalanx.launch.NAME`. `launch/job` follows the run, whatever its launcher."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from phalanx.control.codec import Message
from phalanx.control.protocol import AgentSettings
from phalanx.events.rundir import RunDir
from phalanx.spec.plan import Machine
from phalanx.spec.run import Run


class StartedAgent(Protocol):
    """An agent as its launcher sees it."""

    def fileno(self) -> int:
        """Becomes readable when a message arrives or the agent ends."""

    def send(self, message: Message) -> bool:
        """Send a message; False if the agent is gone, or has not read anything for long."""

    def receive(self) -> list[Message]:
        """The messages that have arrived, without waiting."""

    def poll(self) -> int | None:
        """The exit code; None while the agent lives."""

    def kill(self) -> None:
        """Kill the agent, and with it everything it has started."""

    def close(self) -> None:
        """Kill the agent and release what the launcher holds for it."""


class Launcher(Protocol):
    """Starts the agents of a run's nodes. One object per launch."""

    registry: str
    """Where the agents meet: `AgentSettings.registry`."""
    nodes: int
    """Number of nodes."""
    hosts: int
    """Computers that the nodes are on, without those of spare nodes."""
    restart_after: float | None
    """Seconds after which the agent of a lost node is started again; None: never."""

    def machine(self) -> Machine:
        """The computers that the run will train on, as one. Raises RunError if one of them cannot be used."""

    def check(self, rundir: RunDir) -> None:
        """Raise RunError if a computer lacks files of the run, whose directory is this."""

    def start(self, settings: AgentSettings, log: Path) -> StartedAgent:
        """Start the agent of a node. Its errors go to the file."""


class SubmittedJob(Protocol):
    """A run that a batch system runs without this process."""

    @property
    def title(self) -> str: ...

    @property
    def remarks(self) -> str:
        """How to stop and see it, for a user who no longer follows it."""

    def ended(self) -> str | None:
        """How the job has ended, in the batch system's words; None while it waits or runs."""

    def news(self) -> list[str]:
        """What the user should know and the records do not say."""

    def exit_code(self, state: str) -> int:
        """The exit code of a command that has followed the job to this end."""

    def close(self) -> None:
        """The job has ended, or is not followed any more."""


def launcher(run: Run, name: str) -> Launcher:
    """The launcher that the run file names. `name`: of the run, for people who look at the cluster."""
    return cast(Launcher, import_module(f"phalanx.launch.{run.cluster.launcher}").LAUNCHER(run, name))
