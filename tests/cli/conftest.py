"""Real commands for end-to-end tests: a folder with a tiny run, processes that are followed, signalled and counted."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from phalanx.events.log import read_events
from phalanx.events.records import Event, Step

BIN = Path(sys.executable).parent
PATIENCE = 240.0
"""Seconds after which a test gives up; a launch takes about four on a quiet machine."""
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
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on the last line of standard output."""
        value: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return value

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"


class Started:
    """A command that runs; its output goes to files, so that it never waits for a reader."""

    def __init__(self, command: list[str], cwd: Path, env: Mapping[str, str]):
        self.begin = time.monotonic()
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
            self.process.kill()
            pytest.fail(f"the command did not end within {timeout} s; {self.said()}")
        return self.said(code)

    def said(self, code: int = -1) -> Ended:
        return Ended(code, self._out.read_text(), self._err.read_text())

    def until(self, condition: Callable[[], Any], what: str) -> None:
        """Wait for a condition while the command runs; fails where it ends first."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if self.process.poll() is not None:
                pytest.fail(f"the command ended before {what}; {self.said(self.process.returncode)}")
            if time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"waited {PATIENCE} s for {what}; {self.said()}")
            time.sleep(0.005)


class Workshop:
    """A folder with a run file and some text. Every process of the commands run in it carries its mark."""

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
        return inherited | {MARK: self.mark} | dict(extra or {})

    def start(self, *arguments: object, program: list[str] | None = None, env: Mapping[str, str] | None = None) -> Started:
        return Started(self.command(*arguments, program=program), self.path, self.env(env))

    def run(self, *arguments: object, program: list[str] | None = None, env: Mapping[str, str] | None = None) -> Ended:
        return self.start(*arguments, program=program, env=env).wait()

    def train(self, *arguments: object, env: Mapping[str, str] | None = None) -> Ended:
        """Train to the end; what a healthy run never does is checked here for all tests."""
        ended = self.run("train", self.run_file.name, *arguments, "--json", env=env)
        assert ended.code == 0, ended
        assert ended.err == "", ended
        return ended

    def events(self, run_dir: str | Path = "runs/tiny") -> list[Event]:
        return read_events(self.path / run_dir / "events.jsonl")

    def reached(self, run_dir: str | Path, step: int) -> Callable[[], bool]:
        """Whether a run has taken a step."""
        return lambda: any(isinstance(event, Step) and event.step >= step for event in self.events(run_dir))

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
        """Every process alive that a command in this folder has started, whoever its parent is by now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
                continue
        return found

    def gone(self, within: float = 2.0) -> bool:
        """Whether all of them end by themselves."""
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
            process.kill()
        assert not left, "a command left processes behind"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The command in this process, in a folder of its own: quicker than a process, for what starts none."""
    from phalanx.cli.main import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Ended:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["phalanx", *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            main()
        code = leaving.value.code
        ended = Ended(code if isinstance(code, int) else 1 if code else 0, *capfd.readouterr())
        assert "Traceback" not in ended.err, ended.err
        return ended

    return run


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    made = Workshop(tmp_path / "workshop")
    yield made
    made.close()


@pytest.fixture(scope="session")
def workshop_type() -> type[Workshop]:
    """For folders that several tests share."""
    return Workshop


@dataclass(frozen=True)
class Finished:
    """A run of eight steps that is over, for tests that only look at it."""

    workshop: Workshop
    ended: Ended
    path: Path


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Finished]]:
    """The run on so many ranks; each is trained once for all tests, in one folder."""
    shop = Workshop(tmp_path_factory.mktemp("finished") / "workshop")
    runs: dict[int, Finished] = {}

    def on(ranks: int) -> Finished:
        if ranks not in runs:
            ended = shop.train(f"layout.data={ranks}", "--run-dir", f"ranks-{ranks}")
            runs[ranks] = Finished(shop, ended, shop.path / f"ranks-{ranks}")
        return runs[ranks]

    yield on
    shop.close()


def losses(events: list[Event]) -> list[tuple[int, float, str]]:
    """(step, loss, digest of the batch) of every step that was taken, in order."""
    return [(event.step, event.loss, event.batch_digest) for event in events if isinstance(event, Step)]


@pytest.fixture(scope="session", name="losses")
def losses_fixture() -> Callable[[list[Event]], list[tuple[int, float, str]]]:
    return losses
