"""Seconds from the death of a worker to the next completed step: with Phalanx's supervisors and, in the same run, with torchrun.

    python benchmarks/recovery.py [--kills 20] [--torchrun 3] [--ranks 4] [--nodes 2] [--what rank|node|controller] [key=value …]

The same program trains both times: `phalanx train`, and `torchrun --max-restarts` around it, which restarts all workers from the newest
checkpoint. Ranks are killed with SIGKILL one after the other, including rank 0. `node` kills all processes of a node at once, including
its supervisor and its in-memory replicas, and the node returns 5 s later. Also reports how many complete steps were repeated.
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
from common import machine_load, train_command

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
STEPS_BETWEEN = 12
"""Steps from a recovery to the next kill."""
Events = list[dict[str, Any]]


class Victim:
    """A run whose processes are killed one after the other."""

    def __init__(self, command: list[str], run_dir: Path):
        self.events_file = run_dir / "events.jsonl"
        self.output = (run_dir.parent / f"{run_dir.name}.txt").open("wb")
        # Without this, torchrun gives restarted workers stale addresses and waits for minutes.
        environment = dict(os.environ, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        self.process = subprocess.Popen(
            command, stdout=self.output, stderr=subprocess.STDOUT, start_new_session=True, env=environment
        )

    def events(self) -> Events:
        lines = self.events_file.read_text().splitlines(keepends=True) if self.events_file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def wait_until(self, condition: Callable[[Events], bool], seconds: float = 180.0) -> Events:
        """Waits until the events of the run satisfy a condition, and returns them."""
        deadline = time.time() + seconds
        while not condition(events := self.events()):
            if self.process.poll() is not None:
                raise SystemExit(f"The run ended:\n{Path(self.output.name).read_text()[-3000:]}")
            if time.time() > deadline:
                raise SystemExit(f"No figure: the run did not continue within {seconds:.0f} s ({machine_load()}).")
            time.sleep(0.02)
        return events

    def kill(self, pids: Callable[[Events], list[int]]) -> tuple[float, int]:
        """Kills processes; returns the seconds to the next completed step, and the number of complete steps that were repeated."""
        start = time.time()
        events = self.wait_until(lambda events: len(steps_after(events, start)) >= STEPS_BETWEEN)
        for pid in pids(events):
            os.kill(pid, signal.SIGKILL)
        killed = time.time()
        last_step = max(event["step"] for event in self.events() if event["event"] == "step")
        # The event of a step that was in progress may still arrive: only steps of a new generation, or of a new process, count.
        kinds = ("recovered", "restored", "run_started")
        events = self.wait_until(lambda events: any(event["event"] in kinds and event["time"] > killed for event in events))
        recovered = next(event["time"] for event in events if event["event"] in kinds and event["time"] > killed)
        restored = [event["time"] for event in events if event["event"] == "restored" and event["time"] > killed]
        since = restored[0] if restored else recovered
        step = steps_after(self.wait_until(lambda events: bool(steps_after(events, since))), since)[0]
        return step["time"] - killed, max(0, last_step + 1 - step["step"])

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            for process in psutil.Process(self.process.pid).children(recursive=True):
                process.kill()
            self.process.kill()
        self.process.wait()


def steps_after(events: Events, moment: float) -> Events:
    return [event for event in events if event["event"] == "step" and event["time"] > moment]


def newest_pid(events: Events, rank: int) -> int:
    return int([event["pid"] for event in events if event["event"] == "worker_started" and event["rank"] == rank][-1])


def node_pids(run_dir: Path, node: int) -> list[int]:
    agent = psutil.Process(json.loads((run_dir / "control" / f"node-{node:05d}.json").read_text())["pid"])
    return [process.pid for process in [*agent.children(recursive=True), agent]]


def controller_node(run_dir: Path) -> int:
    return int(os.readlink(max((run_dir / "control").glob("term-*"))).partition("-")[0])


def uses_all_ranks(events: Events, since: float, ranks: int) -> bool:
    """Whether a node that was lost after `since` is in use again."""
    recovered = [event for event in events if event["event"] == "recovered" and event["time"] > since]
    return bool(recovered) and recovered[-1]["ranks"] == ranks


def kill_ranks(victim: Victim, kills: int, ranks: int) -> list[tuple[float, int]]:
    """Kills one rank after the other."""
    return [victim.kill(lambda events, rank=number % ranks: [newest_pid(events, rank)]) for number in range(kills)]  # type: ignore[misc]


def kill_nodes(victim: Victim, run_dir: Path, args: argparse.Namespace) -> list[tuple[float, int]]:
    """Kills one node after the other, or always the node of the controller, and waits for its return."""
    results = []
    for number in range(args.kills):
        start = time.time()

        def pids(events: Events, number: int = number) -> list[int]:
            return node_pids(run_dir, controller_node(run_dir) if args.what == "controller" else number % args.nodes)

        results.append(victim.kill(pids))
        victim.wait_until(lambda events, start=start: uses_all_ranks(events, start, args.ranks))  # type: ignore[misc]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--torchrun", type=int, default=3, help="kills under torchrun; 0: none")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--what", choices=("rank", "node", "controller"), default="rank")
    parser.add_argument("settings", nargs="*")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_file, run_dir = folder / "run.toml", folder / "phalanx"
        run_file.write_text(RUN)
        settings = args.settings or [f"layout.data={args.ranks}"]
        command = train_command(run_file, run_dir, [*settings, f"cluster.nodes={args.nodes}"])
        command += ["resilience.node_return=5"] if args.what != "rank" else []
        with Victim(command, run_dir) as victim:
            by_rank = args.what == "rank"
            results = kill_ranks(victim, args.kills, args.ranks) if by_rank else kill_nodes(victim, run_dir, args)
        seconds, repeated = zip(*results, strict=True)
        print(
            f"phalanx: median {median(seconds):.2f} s, worst {max(seconds):.2f} s of {len(seconds)}, "
            f"steps lost at most {max(repeated)} ({machine_load()})",
            flush=True,
        )
        if not args.torchrun:
            return
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={args.ranks}"]
        command += ["--max-restarts=100", *train_command(run_file, folder / "torchrun", settings)[1:]]
        with Victim(command, folder / "torchrun") as victim:
            slow = median(result[0] for result in kill_ranks(victim, args.torchrun, args.ranks))
        print(f"torchrun: median {slow:.2f} s of {args.torchrun}; phalanx is {slow / median(seconds):.1f} times as fast")


if __name__ == "__main__":
    main()
