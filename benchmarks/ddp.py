"""Steps per second and start-up of `phalanx train` beside a hand-written DDP loop of the same model, on 2 and 4 CPU ranks.

    python benchmarks/ddp.py [--ranks 2 4] [--seconds 60] [--starts 5]

Both jobs are alive at once and take turns of a few seconds: one is frozen (SIGSTOP) while the other runs, so that whatever
else the machine does falls on both. Only intervals between two step ends that lie whole inside a turn count.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

HERE = Path(__file__).parent
TURN = 4.0  # seconds
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
[layout]
data = {ranks}
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


def contestants(folder: Path, ranks: int) -> tuple[Contestant, Contestant]:
    run_file = folder / "bench.toml"
    run_file.write_text(RUN.format(batch=4 * ranks, ranks=ranks))
    events, printed = folder / "run" / "events.jsonl", folder / "hand.txt"
    bin = Path(sys.executable).parent

    def ours() -> list[float]:
        lines = events.read_text().splitlines() if events.exists() else []
        return [record["time"] for line in lines if (record := json.loads(line))["event"] == "step"]

    def theirs() -> list[float]:
        return [float(line) for line in printed.read_text().split()] if printed.exists() else []

    torchrun = [str(bin / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", str(HERE / "handwritten_ddp.py")]
    return (
        Contestant("phalanx", [str(bin / "phalanx"), "train", str(run_file), "--run-dir", str(folder / "run")], ours),
        Contestant("hand-written", [*torchrun, str(run_file), "100000"], theirs),
    )


def race(ranks: int, seconds: float) -> dict[str, float]:
    """Median step time of both, in turns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        both = contestants(folder, ranks)
        try:
            for contestant, output in zip(both, ("phalanx.txt", "hand.txt"), strict=True):
                contestant.start(folder / output)
                contestant.wait_for_step(10)
                contestant.signal(signal.SIGSTOP)
            for _ in range(math.ceil(seconds / TURN)):
                for contestant in both:
                    contestant.turn(TURN)
            times = [median(contestant.step_seconds()) for contestant in both]
        finally:
            for contestant in both:
                contestant.end()
    return {"phalanx": 1 / times[0], "hand-written": 1 / times[1], "ratio": times[1] / times[0]}


def starts(ranks: int, count: int) -> dict[str, float]:
    """Seconds from the command to the end of step 1, alternating; the median of each."""
    seconds: dict[str, list[float]] = {"phalanx": [], "hand-written": []}
    for _ in range(count):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            for contestant, output in zip(contestants(folder, ranks), ("phalanx.txt", "hand.txt"), strict=True):
                contestant.start(folder / output)
                try:
                    seconds[contestant.name].append(contestant.wait_for_step(1) - contestant.started)
                finally:
                    contestant.end()
    middle = {name: median(values) for name, values in seconds.items()}
    return middle | {"ratio": middle["phalanx"] / middle["hand-written"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seconds", type=float, default=60.0, help="of turns for each contestant")
    parser.add_argument("--starts", type=int, default=5)
    chosen = parser.parse_args()
    for ranks in chosen.ranks:
        speed, begin = race(ranks, chosen.seconds), starts(ranks, chosen.starts)
        print(
            f"{ranks} ranks: {speed['phalanx']:.2f} steps/s, hand-written {speed['hand-written']:.2f}: "
            f"{speed['ratio']:.3f}×; start-up {begin['phalanx']:.1f} s, hand-written {begin['hand-written']:.1f} s: "
            f"{begin['ratio']:.2f}×",
            flush=True,
        )


if __name__ == "__main__":
    main()
