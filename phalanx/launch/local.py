"""The local launcher: nodes are groups of processes on this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from phalanx.control.protocol import AgentSettings
from phalanx.events.rundir import RunDir
from phalanx.host.probe import this_machine
from phalanx.launch.agent_process import AgentProcess
from phalanx.launch.launcher import StartedAgent
from phalanx.launch.run_checks import address_problems
from phalanx.spec.errors import refuse
from phalanx.spec.plan import Machine
from phalanx.spec.run import Run


class Local:
    """Implements `launch/launcher.Launcher`."""

    registry = "folder"
    hosts = 1

    def __init__(self, run: Run, name: str = ""):
        self._run = run
        self.nodes = run.cluster.nodes
        self.restart_after = run.resilience.node_return

    def machine(self) -> Machine:
        refuse(address_problems(self._run))
        return this_machine()

    def check(self, rundir: RunDir) -> None:
        """This machine sees everything."""

    def start(self, settings: AgentSettings, log: Path) -> StartedAgent:
        return AgentProcess(replace(settings, data_opened=True), log)


LAUNCHER = Local
