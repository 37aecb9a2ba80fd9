"""Seconds from a worker's death to the next step that is done, with Phalanx's supervisors and, in the same run, with torchrun.

    python benchmarks/recovery.py [--kills 20] [--torchrun 3] [--ranks 4] [--nodes 2] [--what rank|node|controller] [key=value …]

The same program trains both times: `phalanx train`, and `torchrun --max-restarts` around it, which starts all workers again from the
newest checkpoint. Ranks are killed with SIGKILL one after the other, rank 0 among them; `node` kills all processes of a node at once, its
supervisor and its copies in memory included, and the node returns 5 s later. Also told: complete steps that had to be taken again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import psutil

RUN = """
[model]
dim = 128
layers = 4
heads = 4
kv_heads = 2
[data]
eval_fraction = 0.0
[train]
batch = 24
micro_batch = 2
sequence_length = 64
steps = 1000000
[checkpoint]
every = 10
[cluster]
device = "cpu"
threads = 1
[resilience]
restarts = 100000
"""
BETWEEN = 12  # steps from one recovery to the next death
PROGRAM = "from phalanx.cli.main import main; main()"


class Job:
    """A run that is killed piece by piece."""

    def __init__(self, command: list[str], folder: Path):
        self.events_file = folder / "events.jsonl"
        self.output = (folder.parent / f"{folder.name}.txt").open("wb")
        # Without this torchrun hands restarted workers stale addresses, and waits for minutes.
        environment = dict(os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        self.process = subprocess.Popen(
            command, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )

    def events(self) -> list[dict[str, Any]]:
        if not self.events_file.exists():
            return []
        lines = self.events_file.read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def until(self, met: Callable[[list[dict[str, Any]]], bool], seconds: float = 180.0) -> list[dict[str, Any]]:
        deadline = time.time() + seconds
        while True:
            events = self.events()
            if met(events):
                return events
            assert self.process.poll() is None, f"the run has ended:\n{Path(self.output.name).read_text()[-3000:]}"
            assert time.time() < deadline, f"nothing for {seconds:.0f} s: see {self.output.name}"
            time.sleep(0.02)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.kill()
            self.process.kill()
        self.process.wait()


def steps_since(events: list[dict[str, Any]], moment: float) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == "step" and event["time"] > moment]


def newest_pid(events: list[dict[str, Any]], rank: int) -> int:
    return int([event["pid"] for event in events if event["event"] == "worker_started" and event["rank"] == rank][-1])


def one(job: Job, pids: Callable[[list[dict[str, Any]]], list[int]]) -> tuple[float, int]:
    """Kill; seconds to the next step that is done, and complete steps that were taken again."""
    begun = time.time()
    events = job.until(lambda events: len(steps_since(events, begun)) >= BETWEEN)
    for pid in pids(events):
        os.kill(pid, signal.SIGKILL)
    moment = time.time()
    before = max(event["step"] for event in job.events() if event["event"] == "step")
    # A step that was under way may still be told of: the first that a new generation, or a new process, has done.
    names = ("recovered", "restored", "run_started")
    events = job.until(lambda events: any(event["event"] in names and event["time"] > moment for event in events))
    back = next(event["time"] for event in events if event["event"] in names and event["time"] > moment)
    restored = next((event for event in events if event["event"] == "restored" and event["time"] > moment), None)
    since = restored["time"] if restored else back
    events = job.until(lambda events: bool(steps_since(events, since)))
    step = steps_since(events, since)[0]
    return step["time"] - moment, max(0, before + 1 - step["step"])


def node_pids(folder: Path, number: int) -> list[int]:
    agent = psutil.Process(json.loads((folder / "control" / f"node-{number:05d}.json").read_text())["pid"])
    return [process.pid for process in [*agent.children(recursive=True), agent]]


def _whole(events: list[dict[str, Any]], moment: float, ranks: int) -> bool:
    """Whether a node that was lost since then is back."""
    recovered = [event for event in events if event["event"] == "recovered" and event["time"] > moment]
    return bool(recovered) and recovered[-1]["ranks"] == ranks


def controller(folder: Path) -> int:
    return int(os.readlink(max((folder / "control").glob("term-*"))).partition("-")[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--torchrun", type=int, default=3, help="kills under torchrun")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--what", choices=("rank", "node", "controller"), default="rank")
    parser.add_argument("settings", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        (base / "run.toml").write_text(RUN)
        settings = given.settings or [f"layout.data={given.ranks}"]
        ours = base / "phalanx"
        command = [sys.executable, "-c", PROGRAM, "train", str(base / "run.toml"), "--run-dir", str(ours), *settings]
        command += [f"cluster.nodes={given.nodes}", *(["resilience.node_return=5"] if given.what != "rank" else [])]
        seconds, lost = [], []
        with Job(command, ours) as job:
            for turn in range(given.kills):
                if given.what == "rank":
                    took, again = one(job, lambda events, turn=turn: [newest_pid(events, turn % given.ranks)])  # type: ignore[misc]
                else:
                    which = (lambda: controller(ours)) if given.what == "controller" else (lambda turn=turn: turn % given.nodes)  # type: ignore[misc]
                    moment = time.time()
                    took, again = one(job, lambda events, which=which: node_pids(ours, which()))  # type: ignore[misc]
                    job.until(lambda events, moment=moment: _whole(events, moment, given.ranks))  # type: ignore[misc]
                seconds.append(took)
                lost.append(again)
        print(
            f"phalanx: median {median(seconds):.2f} s, worst {max(seconds):.2f} s of {len(seconds)}, steps lost at most {max(lost)}"
        )
        if not given.torchrun:
            return
        theirs, slow = base / "torchrun", []
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={given.ranks}"]
        command += ["--max-restarts=100", "-m", "phalanx", "train", str(base / "run.toml"), "--run-dir", str(theirs), *settings]
        with Job(command, theirs) as job:
            for turn in range(given.torchrun):
                slow.append(one(job, lambda events, turn=turn: [newest_pid(events, turn % given.ranks)])[0])  # type: ignore[misc]
        print(
            f"torchrun: median {median(slow):.2f} s of {len(slow)}; phalanx is {median(slow) / median(seconds):.1f} times as fast"
        )


if __name__ == "__main__":
    main()
