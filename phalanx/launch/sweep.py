"""Starts the runs of a small grid of settings on this machine, one after the other or side by side, each as a process of its own with its own
run directory. Called by `phalanx train --sweep` and `px.sweep`."""

from __future__ import annotations

import itertools
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TextIO

from phalanx.dashboard.run_list import RunInfo, best_loss, run_info
from phalanx.events.rundir import RunDir, replace_file
from phalanx.host.env import environment_with_gpus
from phalanx.host.probe import this_machine
from phalanx.launch.changed_settings import is_finished
from phalanx.spec.dump import changed, dump, written_secrets
from phalanx.spec.errors import RunError
from phalanx.spec.json_value import JsonObject
from phalanx.spec.load import load
from phalanx.spec.plan import Machine
from phalanx.spec.run import Run
from phalanx.watch.page_process import PageProcess

_POLL = 0.1  # seconds between two looks at the processes
_PROGRAM = (
    "import sys; from phalanx.host.process_tree import die_with; die_with(int(sys.argv.pop(1))); "
    "from phalanx.__main__ import main; main()"
)
"""`phalanx`, which ends with the process whose id is its first argument."""
_UNSAFE = re.compile(r"[^\w.+=,-]+")


_BRACKETS = "[]\"' "


@dataclass(frozen=True, slots=True)
class Member:
    """One run of a sweep."""

    name: str
    """Its values, such as "learning_rate=1e-4,batch=8": the name of its run directory."""
    values: dict[str, str]
    """The value of each swept key, as written."""
    run: Run
    directory: Path

    def file(self, ending: str) -> Path:
        """Its run file or log, next to its directory."""
        return self.directory.with_name(self.name + ending)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberResult:
    """How a run of a sweep has ended."""

    name: str
    values: dict[str, str]
    run_dir: str
    info: RunInfo | None = None
    """What its directory says; None: it was refused before it started."""
    error: str | None = None
    """Why it failed."""

    @property
    def state(self) -> str:
        """As in `RunInfo`; "refused" if it could not start, "not started" if the sweep was stopped before."""
        if self.error is not None:
            return "refused" if self.info is None else "failed"
        return "not started" if self.info is None else self.info.state

    def to_json(self) -> JsonObject:
        """For programs."""
        table = {} if self.info is None else self.info.to_json()
        own: JsonObject = {
            "name": self.name,
            "values": self.values,
            "run_dir": self.run_dir,
            "state": self.state,
            "error": self.error,
        }
        return own | {key: value for key, value in table.items() if key not in ("path", "state", "reason")}


def parse_sweep(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Key to values, from texts such as "optimizer.learning_rate=1e-4,3e-4"."""
    grid: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, equals, values = text.partition("=")
        found = tuple(_split(values))
        if not equals or not key or not all(found):
            raise RunError(f"--sweep {text}: write a key and its values, such as optimizer.learning_rate=1e-4,3e-4.")
        if key in grid:
            raise RunError(f"--sweep {text}: {key} is swept already: write all its values after one --sweep.")
        if len(set(found)) < len(found):
            raise RunError(f"--sweep {text} has a value twice: remove one.")
        grid[key] = found
    return grid


def _split(text: str) -> Iterator[str]:
    """The parts between commas that are not within brackets or quotes."""
    part, depth, quoted = "", 0, ""
    for char in text:
        if quoted:
            quoted = "" if char == quoted else quoted
        elif char in "\"'":
            quoted = char
        else:
            depth += (char in "[{") - (char in "]}")
        if char == "," and not depth and not quoted:
            yield part.strip()
            part = ""
        else:
            part += char
    yield part.strip()


def members(grid: Mapping[str, Sequence[str]], folder: Path, make: Callable[[list[str]], Run]) -> list[Member]:
    """Every run of a grid. `make`: the run with these settings. Raises RunError with the problems of all of them."""
    last = Counter(key.rpartition(".")[2] for key in grid)
    found: list[Member] = []
    problems: list[str] = []
    for chosen in itertools.product(*grid.values()):
        values = dict(zip(grid, chosen, strict=True))
        short = {key if last[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2]: value for key, value in values.items()}
        name = _UNSAFE.sub("_", ",".join(f"{key}={value.strip(_BRACKETS)}" for key, value in short.items()))
        try:
            run = make([f"{key}={value}" for key, value in values.items()])
        except RunError as error:
            problems += error.problems
        else:
            found.append(Member(name, values, run, folder / name))
    names = Counter(member.name for member in found)
    problems += [
        f"{times} runs of the sweep have the name {name}: sweep values that differ in letters or digits."
        for name, times in names.items()
        if times > 1
    ]
    problems += dict.fromkeys(problem for member in found for problem in written_secrets(member.run, "--sweep"))
    problems += [
        f'--sweep starts runs on this machine, but cluster.launcher = "{launcher}": remove the key.'
        for launcher in {member.run.cluster.launcher for member in found} - {"local"}
    ]
    if problems:
        raise RunError(list(dict.fromkeys(problems)))
    return found


def shared_out(member: Run, machine: Machine, parallel: int) -> Run:
    """The run with its part of the machine, if so many run side by side. Raises RunError if the machine has too few cores or GPUs."""
    from phalanx.planning.planner import plan_run  # imports numpy

    if parallel == 1:
        return member
    on_gpus = bool(machine.gpus) and member.cluster.device != "cpu"
    have, what = (len(machine.gpus), "GPUs") if on_gpus else (machine.cores, "cores")
    share = have // parallel
    if not share:
        raise RunError(
            f"--parallel {parallel}: this machine has {have} {what}, fewer than one for each run: lower --parallel to at most {have}."
        )
    part = (
        replace(machine, gpus=machine.gpus[:share])
        if on_gpus
        else replace(machine, cores=share, memory=machine.memory // parallel)
    )
    plan = plan_run(member, part).plan
    if plan.ranks > share:
        raise RunError(
            f"--parallel {parallel}: each run has {plan.ranks} ranks, but there are {share} of {have} {what} for it: lower --parallel to "
            f"at most {max(1, have // plan.ranks)}, or give a run fewer ranks with [layout] or cluster.cpu_ranks."
        )
    if on_gpus:
        return member
    given = member.cluster
    cluster = replace(given, cpu_ranks=given.cpu_ranks or plan.ranks, threads=given.threads or max(1, share // plan.ranks))
    return replace(member, cluster=cluster)


class Sweep:
    """The runs of a grid. Call `results()`; `stop` and `kill` may be called by a signal handler meanwhile."""

    def __init__(
        self, members: Sequence[Member], parallel: int = 1, options: Sequence[str] = (), machine: Machine | None = None
    ):
        """`options`: of `phalanx train`, for every run. Raises RunError if the machine is too small for so many side by side."""
        machine = machine or this_machine()
        self._members, self._parallel, self._options = list(members), parallel, list(options)
        self._runs = {member.name: shared_out(member.run, machine, parallel) for member in members}
        self._gpus = len(machine.gpus) // parallel if parallel > 1 else None
        """GPUs of each run; None: all."""
        self._live: dict[int, _Live] = {}
        self.stopped = False
        """It was asked to stop: no further run is started."""

    def results(self, show: Callable[[str], None]) -> list[MemberResult]:
        """Trains all runs that are not finished; returns the results, best first. `show` gets a line when a run begins and ends, and what
        it prints if it is alone."""
        waiting = list(self._members)
        results: dict[str, MemberResult] = {}
        page = self._start_page()
        if page is not None:
            show(f"page {page.wait()}")
        try:
            while (waiting and not self.stopped) or self._live:
                while waiting and not self.stopped and len(self._live) < self._parallel:
                    self._begin(waiting.pop(0), show, results)
                self._look(show, results)
                time.sleep(_POLL)
        finally:
            self.kill()
            if page is not None:
                page.close()
        left = [_result(member, None) for member in self._members if member.name not in results]
        return sorted([*results.values(), *left], key=lambda result: (result.error is not None, _loss(result)))

    def _start_page(self) -> PageProcess | None:
        """One page of all runs, if their run files ask for one each."""
        if not any(member.run.watch.page for member in self._members):
            return None
        folder = self._members[0].directory.parent
        folder.mkdir(parents=True, exist_ok=True)
        return PageProcess(folder, folder / "page.log")

    def _begin(self, member: Member, show: Callable[[str], None], results: dict[str, MemberResult]) -> None:
        """Start a run, unless its directory holds it finished."""
        if _is_done(member):
            show(f"{member.name}: finished before")
            results[member.name] = _result(member, 0)
            return
        member.directory.parent.mkdir(parents=True, exist_ok=True)
        file = member.file(".toml")
        own = self._runs[member.name]
        replace_file(file, dump(replace(own, watch=replace(own.watch, page=False))))
        slot = next(number for number in range(self._parallel) if number not in self._live)
        words = ["train", str(file), "--run-dir", str(member.directory), *self._options]
        show(f"{member.name}: training ({self._members.index(member) + 1} of {len(self._members)})")
        with member.file(".log").open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(os.getpid()), *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=None if self._gpus is None else environment_with_gpus(slot * self._gpus, self._gpus),
                start_new_session=True,  # Ctrl-C reaches it through `stop` alone, once
            )
        self._live[slot] = _Live(member, process, member.file(".log").open(errors="replace"))

    def _look(self, show: Callable[[str], None], results: dict[str, MemberResult]) -> None:
        """Notice what has ended."""
        for slot, live in list(self._live.items()):
            code = live.process.poll()
            if self._parallel == 1:
                for line in live.log:
                    show(f"  {line.rstrip()}")
            if code is not None:
                live.log.close()
                del self._live[slot]
                results[live.member.name] = result = _result(live.member, code)
                show(f"{live.member.name}: {result.state}{f': {result.error}' if result.error else ''}")

    def stop(self, reason: str = "SIGTERM") -> None:
        """Ask all live runs to save and end, and start no other."""
        self.stopped = True
        for live in list(self._live.values()):
            live.process.terminate()

    def kill(self) -> None:
        """End all live runs without saving."""
        self.stopped = self.stopped or bool(self._live)
        for live in list(self._live.values()):
            live.process.kill()  # its workers end with it


@dataclass(frozen=True, slots=True)
class _Live:
    member: Member
    process: subprocess.Popen[bytes]
    log: TextIO


def _loss(result: MemberResult) -> float:
    return math.inf if result.info is None else best_loss(result.info)


def _is_done(member: Member) -> bool:
    rundir = RunDir(member.directory)
    if not rundir.exists or not is_finished(rundir):
        return False
    try:
        before = load(rundir.run_file)
    except RunError:  # `phalanx train` reports what is wrong
        return False
    return not changed(before, member.run) and before.steps == member.run.steps


def _result(member: Member, code: int | None) -> MemberResult:
    """The result of a run whose process has ended with this code; None: it was not started."""
    rundir = RunDir(member.directory)
    info = run_info(rundir) if rundir.events_file.is_file() else None
    error = None
    if code is not None and code not in (0, 75):
        error = info.reason if info is not None and info.state == "failed" else _last_error(member, code)
    return MemberResult(name=member.name, values=member.values, run_dir=str(member.directory), info=info, error=error)


def _last_error(member: Member, code: int) -> str:
    """What a run that was refused has said last."""
    log = member.file(".log")
    lines = (
        [line for line in log.read_text(errors="replace").splitlines() if line.startswith("error: ")] if log.is_file() else []
    )
    return lines[-1].removeprefix("error: ") if lines else f"it ended with exit code {code}"
