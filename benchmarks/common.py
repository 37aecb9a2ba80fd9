"""Shared by the benchmarks that compare jobs: jobs that can be started, paused and watched, run in turns, and timed until their first step.

A ratio is measured side by side in one run, so that other load on the machine affects both jobs.
"""

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


LEAST_STEPS = 5
"""A median of fewer steps is not reported."""
LONGEST_TURN = 60.0
"""Seconds of a turn at most, on a machine so busy that steps do not fit into shorter turns."""


# SIGTERM ends a benchmark like an exception, so that it ends its jobs.
signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))


@dataclass
class Job:
    """A job that can be paused, and the times at which its steps ended."""

    name: str
    command: list[str]
    step_ends: Callable[[], list[float]]
    started: float = 0.0
    process: subprocess.Popen[bytes] | None = None
    turns: list[tuple[float, float]] = field(default_factory=list)

    def start(self, output: Path) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        self.started = time.time()
        with output.open("wb") as file:
            self.process = subprocess.Popen(self.command, stdout=file, stderr=subprocess.DEVNULL, env=environment)

    def signal(self, number: int) -> None:
        """Sends a signal to the process and all of its children."""
        assert self.process is not None
        parent = psutil.Process(self.process.pid)
        for process in [parent, *parent.children(recursive=True)]:
            process.send_signal(number)

    def run_for(self, seconds: float) -> None:
        """Takes one turn: continues the job, and pauses it after `seconds`."""
        self.signal(signal.SIGCONT)
        begin = time.time()
        time.sleep(seconds)
        self.signal(signal.SIGSTOP)
        self.turns.append((begin, time.time()))

    def end(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGKILL)
            self.process.wait()

    def wait_for_step(self, number: int, limit: float = 180.0) -> float:
        """Waits until step `number` is done, and returns the time at which it ended."""
        assert self.process is not None
        deadline = time.time() + limit
        while len(self.step_ends()) < number:
            if self.process.poll() is not None:
                raise SystemExit(f"{self.name} ended with exit code {self.process.returncode} before step {number}.")
            if time.time() > deadline:
                raise SystemExit(f"{self.name} did not reach step {number} within {limit:.0f} s ({machine_load()}).")
            time.sleep(0.02)
        return self.step_ends()[number - 1]

    def step_seconds(self) -> list[float]:
        """Times of the steps that lie completely inside a turn."""
        steps = list(pairwise(self.step_ends()))
        return [end - start for begin, stop in self.turns for start, end in steps if begin <= start and end <= stop]


def train_job(name: str, run_file: Path, run_dir: Path, settings: Sequence[str] = ()) -> Job:
    """`phalanx train` of a run file."""
    events = run_dir / "events.jsonl"

    def step_ends() -> list[float]:
        lines = events.read_text().splitlines(keepends=True) if events.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record["time"] for record in records if record["event"] == "step"]

    return Job(name, train_command(run_file, run_dir, settings), step_ends)


def train_command(run_file: Path | str, run_dir: Path, settings: Sequence[str] = ()) -> list[str]:
    return [sys.executable, "-m", "phalanx", "train", str(run_file), "--run-dir", str(run_dir), *settings]


def job_pair(folder: Path, run: str, ranks: int, script: Sequence[str]) -> tuple[Job, Job]:
    """`phalanx train` of a run file's text, and a script of this folder under torchrun, which gets the run file as its last argument."""
    run_file = folder / "bench.toml"
    run_file.write_text(run)
    printed = folder / "hand-written.txt"

    def printed_times() -> list[float]:
        lines = printed.read_text().splitlines(keepends=True) if printed.exists() else []
        return [float(line) for line in lines if line.endswith("\n")]

    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return (
        train_job("phalanx", run_file, folder / "run"),
        Job("hand-written", [*torchrun, str(HERE / script[0]), *script[1:], str(run_file)], printed_times),
    )


def median_steps(folder: Path, jobs: Sequence[Job], seconds: float, turn: float, warm_up: int) -> dict[str, float]:
    """Starts jobs, lets them take turns, and returns the median step time of each.

    All jobs are alive at once, and one is paused while the other runs. Turns grow, and continue beyond `seconds`, while a busy machine
    lets a job complete fewer than LEAST_STEPS inside its turns. Ends the program with a sentence if that does not help.
    """
    try:
        for job in jobs:
            job.start(folder / f"{job.name}.txt")
            job.wait_for_step(warm_up)
            job.signal(signal.SIGSTOP)
        elapsed = 0.0
        while True:
            for job in jobs:
                job.run_for(turn)
            elapsed += turn
            counts = {job.name: len(job.step_seconds()) for job in jobs}
            if elapsed >= seconds and min(counts.values()) >= LEAST_STEPS:
                return {job.name: median(job.step_seconds()) for job in jobs}
            if elapsed >= 4 * max(seconds, LONGEST_TURN):
                raise SystemExit(
                    f"No figure: {', '.join(f'{name} completed {count}' for name, count in counts.items())} steps in {elapsed:.0f} s "
                    f"of turns, and a median needs {LEAST_STEPS} ({machine_load()}). Stop other programs, or give more --seconds."
                )
            if min(counts.values()) * turn < LEAST_STEPS * elapsed:  # fewer than LEAST_STEPS per turn
                turn = min(2 * turn, LONGEST_TURN)
    finally:
        for job in jobs:
            job.end()


def start_seconds(make: Callable[[Path], tuple[Job, Job]], count: int) -> dict[str, float]:
    """Median seconds from the command to the end of step 1; `make` returns both jobs for a folder, and they start alternately."""
    seconds: dict[str, list[float]] = {}
    for _ in range(count):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for job in make(folder):
                job.start(folder / f"{job.name}.txt")
                try:
                    seconds.setdefault(job.name, []).append(job.wait_for_step(1) - job.started)
                finally:
                    job.end()
    return {name: median(values) for name, values in seconds.items()}


def machine_load() -> str:
    return f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
