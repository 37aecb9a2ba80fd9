"""What the benchmarks beside hand-written loops share: jobs that can be started, frozen and watched, and how long they take to start.
Used by `ddp.py` and `parallel.py`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

HERE = Path(__file__).parent
RUN = """
[model]
dim = 256
layers = 4
heads = 4
vocab = 4096
[data]
document_mask = false
eval_fraction = 0.0
[train]
batch = {batch}
micro_batch = 4
sequence_length = 256
steps = 100000
[optimizer]
learning_rate = 1e-3
{optimizer}
[layout]
{layout}
[cluster]
device = "cpu"
threads = 1
"""


@dataclass
class Contestant:
    """A job that can be frozen, and the times at which its steps ended."""

    name: str
    command: list[str]
    ends: Callable[[], list[float]]
    started: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    turns: list[tuple[float, float]] = field(default_factory=list)

    def start(self, output: Path) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        self.started = time.time()
        with output.open("wb") as file:
            self.process = subprocess.Popen(self.command, stdout=file, stderr=subprocess.DEVNULL, env=environment)

    def family(self) -> list[psutil.Process]:
        assert self.process is not None
        me = psutil.Process(self.process.pid)
        return [me, *me.children(recursive=True)]

    def signal(self, number: int) -> None:
        for process in self.family():
            process.send_signal(number)

    def turn(self, seconds: float) -> None:
        self.signal(signal.SIGCONT)
        begin = time.time()
        time.sleep(seconds)
        self.signal(signal.SIGSTOP)
        self.turns.append((begin, time.time()))

    def end(self) -> None:
        for process in self.family():
            process.kill()
        assert self.process is not None
        self.process.wait()

    def wait_for_step(self, number: int, limit: float = 180.0) -> float:
        deadline = time.time() + limit
        while len(self.ends()) < number:
            assert self.process is not None
            if self.process.poll() is not None or time.time() > deadline:
                raise SystemExit(f"{self.name} did not reach step {number}")
            time.sleep(0.02)
        return self.ends()[number - 1]

    def step_seconds(self) -> list[float]:
        ends = self.ends()
        pairs = list(pairwise(ends))
        return [b - a for begin, stop in self.turns for a, b in pairs if begin <= a and b <= stop]


def contestants(folder: Path, run: str, ranks: int, script: Sequence[str]) -> tuple[Contestant, Contestant]:
    """`phalanx train` of the run file's text, and a script of this folder under torchrun, with the run file behind its arguments."""
    run_file = folder / "bench.toml"
    run_file.write_text(run)
    events, printed = folder / "run" / "events.jsonl", folder / "hand.txt"
    bin = Path(sys.executable).parent

    def ours() -> list[float]:
        lines = events.read_text().splitlines() if events.exists() else []
        return [record["time"] for line in lines if (record := json.loads(line))["event"] == "step"]

    def theirs() -> list[float]:
        return [float(line) for line in printed.read_text().split()] if printed.exists() else []

    torchrun = [str(bin / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", str(HERE / script[0]), *script[1:]]
    return (
        Contestant("phalanx", [str(bin / "phalanx"), "train", str(run_file), "--run-dir", str(folder / "run")], ours),
        Contestant("hand-written", [*torchrun, str(run_file)], theirs),
    )


def starts(make: Callable[[Path], tuple[Contestant, Contestant]], count: int) -> dict[str, float]:
    """Seconds from the command to the end of step 1, alternating; the median of each. `make`: both jobs, in a folder."""
    seconds: dict[str, list[float]] = {"phalanx": [], "hand-written": []}
    for _ in range(count):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for contestant, output in zip(make(folder), ("phalanx.txt", "hand.txt"), strict=True):
                contestant.start(folder / output)
                try:
                    seconds[contestant.name].append(contestant.wait_for_step(1) - contestant.started)
                finally:
                    contestant.end()
    middle = {name: median(values) for name, values in seconds.items()}
    return middle | {"ratio": middle["phalanx"] / middle["hand-written"]}
