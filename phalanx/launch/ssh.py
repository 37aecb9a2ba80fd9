"""The ssh launcher: agents on the hosts of a file, each at the other end of an ssh connection. They end with it.

Settings, the token among them, go through the connection: nothing of a run is in the arguments of a process or in a file of the hosts.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from phalanx.control.protocol import AgentSettings
from phalanx.host.env import forwarded, python_path
from phalanx.host.host_report import HostQuestion, HostReport
from phalanx.host.process_tree import ask_python, python_command
from phalanx.launch.agent_process import AgentProcess
from phalanx.launch.host_group import HostGroup
from phalanx.launch.hosts import Host, read_hosts
from phalanx.launch.launcher import StartedAgent
from phalanx.spec.errors import RunError
from phalanx.spec.run import Run

# BatchMode: never ask for a password. A connection is given up after 15 s without a word, and its agent started again; the agents' own
# heartbeats notice a lost host much sooner.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=5", "ServerAliveInterval=3", "ServerAliveCountMax=5")
_ANSWER_SECONDS = 60.0  # in which a host reports: its file system may be cold
_RESTART = 5.0  # seconds between two attempts to start the agent of a lost host


class Ssh(HostGroup):
    """Hosts of a file."""

    def __init__(self, run: Run, name: str = ""):
        if run.cluster.hosts is None:
            raise RunError(
                'cluster.launcher = "ssh" needs hosts: set cluster.hosts, or --hosts, to a file with one host per line.'
            )
        self._hosts = sorted(read_hosts(Path(run.cluster.hosts)), key=lambda host: host.switch)
        super().__init__(run, [host.name for host in self._hosts])
        given = run.resilience.node_return
        self.restart_after = _RESTART if given is None else given

    def start(self, settings: AgentSettings, log: Path) -> StartedAgent:
        host, report = self._hosts[settings.node], self._reports[settings.node]
        bind = self._address(settings.node) or host.name
        slots = self._slots(settings.node, report) or settings.slots
        own = replace(settings, bind=bind, slots=slots, topology=host.switch, environment=forwarded(), parent=None)
        return AgentProcess(own, log, wrap=self._remote(host))

    def _address(self, node: int) -> str | None:
        return self._hosts[node].bind or super()._address(node)

    def _slots(self, node: int, report: HostReport) -> int:
        gpus, given = super()._slots(node, report), self._hosts[node].slots
        return min(given, gpus) if given and gpus else given or gpus

    def _report(self, node: int, question: HostQuestion) -> HostReport:
        host = self._hosts[node]
        command = self._remote(host)(python_command("phalanx.host.host_report"))
        try:
            return HostReport.from_json(ask_python(command, _ANSWER_SECONDS, json.dumps(asdict(question)) + "\n"))
        except (OSError, KeyError, TypeError) as error:
            raise OSError(f"{error}; `ssh {host.name}` must work without a password, and find Phalanx there") from None

    def _remote(self, host: Host) -> Callable[[list[str]], list[str]]:
        """Makes the ssh command that runs a Python command of this machine on a host."""

        def wrap(command: list[str]) -> list[str]:
            words = [host.python or sys.executable, *command[1:]]
            path = python_path()
            if path is not None:
                words = ["env", f"PYTHONPATH={path}", *words]
            options = [word for option in _OPTIONS for word in ("-o", option)]
            port = [] if host.port is None else ["-p", str(host.port)]
            target = host.name if host.user is None else f"{host.user}@{host.name}"
            # The working directory, if the host has it: paths of the run file may be relative to it.
            remote = f"cd {shlex.quote(os.getcwd())} 2>/dev/null; exec {shlex.join(words)}"
            return [*shlex.split(self._run.cluster.ssh), *options, *port, target, remote]

        return wrap


LAUNCHER = Ssh
