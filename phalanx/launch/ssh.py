"""The ssh launcher: agents on the hosts of a file, each at the other end of an ssh connection. They end with it.

Settings, the token among them, go through the connection: nothing of a run is in the arguments of a process or in a file of the hosts.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from phalanx.control.protocol import AgentSettings
from phalanx.events.rundir import RunDir
from phalanx.host.env import forwarded, python_path
from phalanx.host.process_tree import ask_python, python_command
from phalanx.launch.agent_process import AgentProcess
from phalanx.launch.host_report import HostQuestion, HostReport
from phalanx.launch.hosts import Host, disagreements, read_hosts
from phalanx.launch.launcher import StartedAgent
from phalanx.spec.errors import RunError
from phalanx.spec.plan import Machine
from phalanx.spec.run import Run

# BatchMode: never ask for a password. A connection is given up after 15 s without a word, and its agent started again; the agents' own
# heartbeats notice a lost host much sooner.
_OPTIONS = ("BatchMode=yes", "ConnectTimeout=5", "ServerAliveInterval=3", "ServerAliveCountMax=5")
_ANSWER_SECONDS = 60.0  # in which a host reports: its file system may be cold
_PARALLEL = 64  # hosts that are asked at a time
_RESTART = 5.0  # seconds between two attempts to start the agent of a lost host


class Ssh:
    """Implements `launch/launcher.Launcher`."""

    registry = "launcher"

    def __init__(self, run: Run):
        if run.cluster.hosts is None:
            raise RunError(
                'cluster.launcher = "ssh" needs hosts: set cluster.hosts, or --hosts, to a file with one host per line.'
            )
        self._run, self._hosts = run, read_hosts(Path(run.cluster.hosts))
        self.nodes = len(self._hosts)
        given = run.resilience.node_return
        self.restart_after = _RESTART if given is None else given
        self._reports: list[HostReport] = []

    def machine(self) -> Machine:
        """Ask every host what it is; those that train, as one machine."""
        self._reports = self._ask(HostQuestion(run_dir=os.getcwd(), launch=""))
        training = self._reports[: max(1, self.nodes - self._run.resilience.spares)]
        first, gpus = training[0].machine, min(self._slots(node, report) for node, report in enumerate(training))
        return replace(
            first,
            host=", ".join(report.machine.host for report in training),
            nodes=len(training),
            cores=len(training) * min(report.machine.cores for report in training),
            memory=len(training) * min(report.machine.memory for report in training),
            gpus=tuple(gpu for report in training for gpu in report.machine.gpus[:gpus]),
        )

    def check(self, rundir: RunDir) -> None:
        """Check what each host sees of the run's files."""
        source = self._run.data
        paths = tuple(
            os.path.abspath(os.path.expanduser(path)) for path in source.paths if "://" not in path and "*" not in path
        )
        reports = self._ask(HostQuestion(run_dir=str(rundir.path.absolute()), launch=rundir.launch_id or "", paths=paths))
        problems = [
            f"{path} is not on {host.name}: put the data at the same path on every host."
            for host, report in zip(self._hosts, reports, strict=True)
            for path in report.missing
        ]
        blind = [host.name for host, report in zip(self._hosts, reports, strict=True) if not report.sees_run_dir]
        if blind and self._run.checkpoint.url is None:
            problems.append(
                f"{', '.join(blind)} cannot see the run directory {rundir.path.absolute()}, where checkpoints are saved: set checkpoint.url "
                "to storage that every host reaches, such as s3://bucket/folder, or choose a --run-dir on a shared file system."
            )
        if problems:
            raise RunError(problems)

    def start(self, settings: AgentSettings, log: Path) -> StartedAgent:
        host, report = self._hosts[settings.node], self._reports[settings.node]
        bind = host.bind or report.reached_at or next(iter(report.addresses), host.name)
        slots = self._slots(settings.node, report) or settings.slots
        own = replace(settings, bind=bind, slots=slots, environment=forwarded(), parent=None)
        return AgentProcess(own, log, wrap=self._remote(host))

    def _slots(self, node: int, report: HostReport) -> int:
        """Ranks of a host, as far as that is given: 0 means its share."""
        gpus = 0 if self._run.cluster.device == "cpu" else len(report.machine.gpus)
        given = self._hosts[node].slots
        return min(given, gpus) if given and gpus else given or gpus

    def _ask(self, question: HostQuestion) -> list[HostReport]:
        """The reports of all hosts, in their order. RunError names those that do not answer, or do not fit the others."""
        names = [host.name for host in self._hosts]
        with ThreadPoolExecutor(_PARALLEL) as pool:
            answers = list(pool.map(lambda host: self._report(host, question), self._hosts))
        failures = [f"{name}: {answer}" for name, answer in zip(names, answers, strict=True) if isinstance(answer, str)]
        if failures:
            raise RunError(
                [f"{failure}: make `ssh {failure.partition(':')[0]}` work without a password." for failure in failures]
            )
        found = [answer for answer in answers if not isinstance(answer, str)]
        reports = [report for report, _ in found]
        if problems := list(disagreements(names, reports, [times for _, times in found])):
            raise RunError(problems)
        return reports

    def _report(self, host: Host, question: HostQuestion) -> tuple[HostReport, tuple[float, float]] | str:
        command = self._remote(host)(python_command("phalanx.launch.host_report"))
        begin = time.time()
        try:
            answer = ask_python(command, _ANSWER_SECONDS, json.dumps(asdict(question)) + "\n")
            return HostReport.from_json(answer), (begin, time.time())
        except (OSError, KeyError, TypeError) as error:
            return f"the host does not answer ({error})"

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
