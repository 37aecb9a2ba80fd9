"""What launchers for other hosts have in common: every host is asked what it is before the run is planned, and must fit the others. The hosts
need not share a folder: their agents meet through the launcher."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from phalanx.control.protocol import AgentSettings
from phalanx.events.rundir import RunDir
from phalanx.host.host_check import HostProblem, disagreements, gpu_differences, shortages
from phalanx.host.host_report import HostQuestion, HostReport
from phalanx.launch.launcher import StartedAgent
from phalanx.spec.errors import RunError, refuse, toml
from phalanx.spec.hub import remote_name
from phalanx.spec.plan import Machine
from phalanx.spec.run import Cluster, Run

_PARALLEL = 64  # hosts that are asked at a time


class HostGroup(ABC):
    """Implements `launch/launcher.Launcher`, but for how a host is asked and its agent started."""

    registry = "launcher"
    restart_after: float | None

    def __init__(self, run: Run, names: list[str]):
        """`names`: of the hosts, for messages."""
        self._run, self._names, self.nodes = run, names, len(names)
        self.hosts, spares, fewest = self.nodes - run.resilience.spares, run.resilience.spares, run.command.min_nodes
        if self.hosts < 1:
            remedy = f"set it to at most {self.nodes - 1}, or add hosts"
            raise RunError(f"resilience.spares = {spares} of {self.nodes} hosts leaves none to train on: {remedy}.")
        if fewest is not None and fewest > self.hosts:
            raise RunError(
                f"command.min_nodes = {fewest} is more than the {self.hosts} hosts that run the program: set it to at most {self.hosts}."
            )
        self._reports: list[HostReport] = []

    def machine(self) -> Machine:
        """The hosts that train, as one machine."""
        self._reports = self._ask(HostQuestion(run_dir=os.getcwd(), launch=""))
        refuse([problem for node in range(self.nodes) for problem in self._address_problems(node)])
        training = self._reports[: self.hosts]
        gpus = min(self._slots(node, report) for node, report in enumerate(training))
        return replace(
            training[0].machine,
            host=", ".join(report.machine.host for report in training),
            nodes=len(training),
            cores=len(training) * min(report.machine.cores for report in training),
            memory=len(training) * min(report.machine.memory for report in training),
            gpus=tuple(gpu for report in training for gpu in report.machine.gpus[:gpus]),
        )

    def check(self, rundir: RunDir) -> None:
        """Check what each host sees of the run's files."""
        data = self._run.data
        local = (path for path in data.paths if "://" not in path and "*" not in path)
        if data.source == "hf":  # a name of the hub is no path
            local = (path for path in local if remote_name(path) is None)
        paths = tuple(os.path.abspath(os.path.expanduser(path)) for path in local)
        question = HostQuestion(run_dir=str(rundir.path.absolute()), launch=rundir.launch_id or "", paths=paths)
        reports = self._ask(question)
        problems = [
            f"{path} is not on {name}: put the data at the same path on every host."
            for name, report in zip(self._names, reports, strict=True)
            for path in report.missing
        ]
        problems += _messages(shortages(self._names, reports, str(rundir.path.absolute())))
        blind = [name for name, report in zip(self._names, reports, strict=True) if not report.sees_run_dir]
        if blind and self._run.checkpoint.save and self._run.checkpoint.url is None:
            problems.append(
                f"{', '.join(blind)} cannot see the run directory {rundir.path.absolute()}, where checkpoints are saved: set checkpoint.url "
                "to storage that every host reaches, such as s3://bucket/folder, choose a --run-dir on a shared file system, or save none with "
                "checkpoint.save = false."
            )
        refuse(problems)

    @abstractmethod
    def start(self, settings: AgentSettings, log: Path) -> StartedAgent: ...

    @abstractmethod
    def _report(self, node: int, question: HostQuestion) -> HostReport:
        """The answer of a host. Raises OSError that says why there is none, and what to do."""

    def _address(self, node: int) -> str | None:
        """The address at which a host listens: of the interface that cluster.bind names, else the one by which it was reached."""
        report, interface = self._reports[node], self._run.cluster.bind
        named = (address for address, name in report.addresses.items() if name == interface)
        reached = report.reached_at or next(iter(report.addresses), None)
        return reached if interface == Cluster().bind else next(named, None)

    def _address_problems(self, node: int) -> Iterator[str]:
        if self._address(node) is None and self._run.cluster.bind != Cluster().bind:
            interfaces = ", ".join(dict.fromkeys(self._reports[node].addresses.values())) or "none"
            yield (
                f"cluster.bind = {toml(self._run.cluster.bind)} is not an interface of {self._names[node]} that has an address (these are: "
                f"{interfaces}): name one that every host has, or remove the key."
            )

    def _slots(self, node: int, report: HostReport) -> int:
        """Ranks of a host; 0: its share of all ranks."""
        return 0 if self._run.cluster.device == "cpu" else len(report.machine.gpus)

    def _ask(self, question: HostQuestion) -> list[HostReport]:
        """The reports of all hosts, in their order. RunError names those that do not answer, or do not fit the others."""
        with ThreadPoolExecutor(_PARALLEL) as pool:
            answers = list(pool.map(lambda node: self._timed_report(node, question), range(self.nodes)))
        found = [answer for answer in answers if not isinstance(answer, str)]
        if len(found) < self.nodes:
            raise RunError([answer for answer in answers if isinstance(answer, str)])
        reports = [report for report, _ in found]
        gpus = [min(self._slots(node, report), len(report.machine.gpus)) for node, report in enumerate(reports)]
        refuse(
            [
                *_messages(disagreements(self._names, reports, [times for _, times in found])),
                *_messages(gpu_differences(self._names, gpus)),
            ]
        )
        return reports

    def _timed_report(self, node: int, question: HostQuestion) -> tuple[HostReport, tuple[float, float]] | str:
        begin = time.time()
        try:
            return self._report(node, question), (begin, time.time())
        except OSError as error:
            return f"{self._names[node]} does not answer: {error}"


def _messages(problems: Iterable[HostProblem]) -> list[str]:
    return [problem.message for problem in problems]
