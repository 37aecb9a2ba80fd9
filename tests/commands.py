"""Real commands for end-to-end tests: a folder with a tiny run, and processes that are followed, signaled and counted."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.events.log import EventReader, read_events
from phalanx.events.records import Event, Step

BIN = Path(sys.executable).parent
PATIENCE = 240.0
"""Seconds after which a test gives up; a launch takes about four on an idle machine."""
MARK = "PHALANX_TEST_MARK"

RUN = """\
[model]
dim = 32
layers = 1
heads = 2
kv_heads = 1

[data]
source = "text"
paths = ["text"]
eval_fraction = 0.1

[train]
batch = 8
sequence_length = 32
micro_batch = 2
steps = 8
eval_every = 4
eval_sequences = 8

[optimizer]
learning_rate = 3e-3
warmup_steps = 2

[cluster]
device = "cpu"
cpu_ranks = 1
threads = 1

[checkpoint]
every = 4

[resilience]
hang = 600.0  # on a busy machine, a rank may stand still for long
"""
WORDS = [
    "the",
    "a",
    "rank",
    "step",
    "shard",
    "batch",
    "token",
    "layer",
    "head",
    "norm",
    "loss",
    "learns",
    "sends",
    "waits",
    "adds",
    "saves",
    "and",
    "then",
    "while",
    "for",
    "in",
    "of",
]


@dataclass(frozen=True)
class Ended:
    """A finished command."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on standard output, which holds nothing else with --json."""
        (line,) = self.out.splitlines()
        value: dict[str, Any] = json.loads(line)
        return value

    @property
    def shown(self) -> str:
        """What a person reads: with --json it goes to standard error, otherwise most of it to standard output."""
        return self.err + self.out

    @property
    def complaints(self) -> list[str]:
        """Lines of standard error that are an error or a warning, ours or Python's, or begin a traceback."""
        return [line for line in self.err.splitlines() if re.search(r"^(error|warning|Traceback)\b|\w+Warning: ", line)]

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Started:
    """A running command; its output goes to files, so that it never waits for a reader."""

    def __init__(self, command: list[str], cwd: Path, env: Mapping[str, str]):
        name = cwd / f"output-{uuid.uuid4().hex[:8]}"
        self._out, self._err = name.with_suffix(".out"), name.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait(self, timeout: float = PATIENCE) -> Ended:
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._kill()
            pytest.fail(f"the command did not end within {timeout} s; {self.output()}")
        return self.output(code)

    def output(self, code: int = -1) -> Ended:
        return Ended(code, self._out.read_text(), self._err.read_text())

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition while the command runs; fails if it ends first."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.process.poll() is not None:
                pytest.fail(f"the command ended before {what}; {self.output(self.process.returncode)}")
            if time.monotonic() > deadline:
                self._kill()
                pytest.fail(f"waited {PATIENCE} s for {what}; {self.output()}")
            time.sleep(0.02)

    def _kill(self) -> None:
        self.process.kill()
        self.process.wait()  # a process that nobody has waited for would be a warning in some later test


def escaped(text: str) -> str:
    """Text as a terminal is given it: control characters and others that cannot be printed are escapes."""
    return "".join(repr(char)[1:-1] if unicodedata.category(char)[0] in "CZ" and char not in " \n\t" else char for char in text)


def cmdline(process: psutil.Process) -> list[str]:
    """Empty if the process has ended meanwhile."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):  # a zombie is a NoSuchProcess
        return []


def has_mapped(process: psutil.Process, library: str) -> bool:
    try:
        return any(library in file.path for file in process.memory_maps())
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def signal_to(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
        process.send_signal(number)


class Workshop:
    """A folder with a run file and some text. Every process of its commands has its mark in the environment."""

    def __init__(self, path: Path):
        self.path = path
        self.run_file = path / "tiny.toml"
        self.mark = uuid.uuid4().hex
        path.mkdir(exist_ok=True)
        self.run_file.write_text(RUN)
        (path / "text").mkdir()
        dice = random.Random(0)
        for number in range(3):
            lines = (" ".join(dice.choices(WORDS, k=9)) for _ in range(200))
            (path / "text" / f"{number}.txt").write_text("\n".join(lines))

    def command(self, *arguments: object, program: list[str] | None = None) -> list[str]:
        return [*(program or [str(BIN / "phalanx")]), *map(str, arguments)]

    def env(self, extra: Mapping[str, str] | None = None) -> dict[str, str]:
        inherited = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "FORCE_COLOR")}
        # One thread per process: two processes of pytest and what they start share the cores.
        return inherited | {"OMP_NUM_THREADS": "1", MARK: self.mark} | dict(extra or {})

    def start(self, *arguments: object, program: list[str] | None = None, env: Mapping[str, str] | None = None) -> Started:
        return Started(self.command(*arguments, program=program), self.path, self.env(env))

    def run(self, *arguments: object, program: list[str] | None = None, env: Mapping[str, str] | None = None) -> Ended:
        return self.start(*arguments, program=program, env=env).wait()

    def train(self, *arguments: object, env: Mapping[str, str] | None = None) -> Ended:
        """Train to the end, without errors and without warnings of Python. What the run warns of itself is among its events."""
        ended = self.run("train", self.run_file.name, *arguments, "--json", env=env)
        assert ended.code == 0, ended
        assert all(line.startswith("warning: ") for line in ended.complaints), ended
        return ended

    def events(self, run_dir: str | Path = "runs/tiny") -> list[Event]:
        return read_events(self.path / run_dir / "events.jsonl")

    def reached(self, run_dir: str | Path, step: int) -> Callable[[], bool]:
        """A condition: the run has taken a step. Only what was written since it was last asked is read."""
        reader, seen = EventReader(self.path / run_dir / "events.jsonl"), 0

        def condition() -> bool:
            nonlocal seen
            seen = max([seen, *(event.step for event in reader.new() if isinstance(event, Step))])
            return seen >= step

        return condition

    def sabotage(self, code: str) -> dict[str, str]:
        """The environment in which workers run `code` before anything else, so that it can replace parts of the package."""
        folder = self.path / "sabotage"
        folder.mkdir(exist_ok=True)
        body = "".join(f"    {line}\n" for line in code.strip().splitlines())
        (folder / "sitecustomize.py").write_text(f"import sys\nif 'phalanx.worker.fork_server' in sys.orig_argv:\n{body}")
        return {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))}

    def copy(self, run_dir: str, name: str) -> str:
        shutil.copytree(self.path / run_dir, self.path / name)
        return name

    def processes(self) -> list[psutil.Process]:
        """Every live process that a command in this folder has started, whatever its parent is now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
        return found

    def gone(self, within: float = PATIENCE / 4) -> bool:
        """Whether all of them end by themselves, however long a busy machine takes to let them."""
        deadline = time.monotonic() + within
        while alive := self.processes():
            if time.monotonic() > deadline:
                print("still alive:", alive)
                return False
            time.sleep(0.02)
        return True

    def close(self) -> None:
        left = not self.gone()
        for process in self.processes():
            signal_to(process, signal.SIGKILL)
        assert not left, "a command left processes behind"


@dataclass(frozen=True)
class FinishedRun:
    """A finished run of eight steps, for tests that only read it."""

    workshop: Workshop
    ended: Ended
    path: Path


def losses(events: list[Event]) -> list[tuple[int, float, str]]:
    """(step, loss, batch digest) of every step, in order."""
    return [(event.step, event.loss, event.batch_digest) for event in events if isinstance(event, Step)]


FinishedRuns = Callable[[int], FinishedRun]
"""The finished run on this many ranks."""
StepLosses = Callable[[list[Event]], list[tuple[int, float, str]]]
InProcess = Callable[..., Ended]
"""The command line in the test's own process."""
