"""`phalanx train` killed with SIGKILL in the middle of its saves, again and again: a program of its own, and what the slow suite calls.

    python tests/killing.py [--kills 200] [--jobs 2] [--seed 0]

Each victim saves after every step, behind training. When a save is seen to begin, and a random moment after that, one rank, several
ranks, what forks them, what keeps copies of them in memory, their supervisor or the launcher is killed. Every other launch recovers
from what it can, and goes on to the next kill; the others end (`resilience.restarts = 0`). Whenever one has ended, every folder that has
a checkpoint's name must hold one, to the last byte, and the same command goes on. When a victim has come to its end, each of its steps,
however often it was taken, must have had the loss and the tokens of a run that was never disturbed, and its last checkpoint must equal
that run's bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import torch
from commands import cmdline

from phalanx.checkpointing import directory
from phalanx.checkpointing.restore import CheckpointReader

RUN = """
[model]
dim = 128
layers = 4
heads = 4
[data]
eval_fraction = 0.0
[train]
batch = 4
micro_batch = 2
sequence_length = 32
steps = 24
[optimizer]
learning_rate = 1e-3
[checkpoint]
every = 1
keep_last = 2
[layout]
data = 2
[cluster]
device = "cpu"
threads = 1
"""
SURVIVED = ("a rank", "the other rank", "both ranks", "the fork server", "the replica server")
"""What a launch goes on without, if it may."""
TARGETS = (*SURVIVED, "the supervisor", "the launcher", "everything")


def command(folder: Path, restarts: int) -> list[str]:
    run_file = folder.parent / "run.toml"
    program = "from phalanx.cli.main import main; main()"
    return [sys.executable, "-c", program, "train", str(run_file), f"resilience.restarts={restarts}", "--run-dir", str(folder)]


def steps(folder: Path) -> list[tuple[int, float, str]]:
    """Every step that was told, in order."""
    found = []
    for line in (folder / "events.jsonl").read_text().splitlines():
        if line.endswith("}") and (record := json.loads(line))["event"] == "step":
            found.append((record["step"], record["loss"], record["batch_digest"]))
    return found


def victims(process: psutil.Process, target: str) -> list[psutil.Process]:
    """The launcher has one child, whose children are the replica server, the fork server and the ranks, which a fork server has forked."""
    (supervisor,) = process.children()
    children = supervisor.children()
    (server,) = (child for child in children if "phalanx.checkpointing.replicas.replica_server" in child.cmdline())
    forks = [child for child in children if "phalanx.worker.fork_server" in child.cmdline()]
    (fork_server,) = (child for child in forks if os.getsid(child.pid) == child.pid)
    ranks = [child for child in forks if child != fork_server]
    choice = {
        "a rank": ranks[:1],
        "the other rank": ranks[1:],
        "both ranks": ranks,
        "the fork server": [fork_server],
        "the replica server": [server],
        "the supervisor": [supervisor],
        "the launcher": [process],
        "everything": [*children, supervisor, process],
    }
    return choice[target]


def whole(checkpoints: Path) -> int:
    """Every folder with a checkpoint's name is one; returns how many there are."""
    listed = directory.list_checkpoints(checkpoints)
    for path in listed:
        directory.verify(path)
    return len(listed)


def once(folder: Path, dice: random.Random, killed: Counter[str]) -> bool:
    """Start the command and kill something in a save, again and again where it recovers; True if it came to its end all the same."""
    restarts = dice.choice((0, 100))
    with (folder.parent / f"{folder.name}.txt").open("ab") as output:
        job = subprocess.Popen(command(folder, restarts), stdout=output, stderr=output)
    seen, wanted = set[str](), dice.randint(1, 5)
    checkpoints, target = folder / "checkpoints", dice.choice(TARGETS)
    begun = time.monotonic()
    while job.poll() is None:
        assert time.monotonic() - begun < 600, f"{folder} makes no progress"
        names = os.listdir(checkpoints) if checkpoints.is_dir() else []
        seen |= {name for name in names if name.endswith(directory.PARTIAL)}
        if len(seen) >= wanted:
            time.sleep(dice.uniform(0, 0.06))
            try:
                for process in victims(psutil.Process(job.pid), target):
                    process.kill()
                killed[target] += 1
            except (psutil.NoSuchProcess, ProcessLookupError, ValueError):
                pass  # it ended by itself just then, or has not recovered yet
            if not restarts or target not in SURVIVED:
                break
            wanted, target = len(seen) + dice.randint(1, 5), dice.choice(TARGETS)
        time.sleep(0.001)
    code = job.wait(timeout=120)
    deadline = time.monotonic() + 60
    while any(str(folder) in " ".join(cmdline(process)) for process in psutil.process_iter()):
        assert time.monotonic() < deadline, "a process of the run is still there a minute after the launcher"
        time.sleep(0.01)
    return code == 0


def equal(one: Path, other: Path) -> None:
    """The last checkpoints of two runs, bit for bit."""
    (first, _), (second, _) = (
        directory.newest(one / "checkpoints", check=directory.verify),
        directory.newest(other / "checkpoints", check=directory.verify),
    )
    assert first is not None and second is not None and first.name == second.name
    a, b = CheckpointReader(first), CheckpointReader(second)
    assert a.names == b.names
    for name in a.names:
        assert torch.equal(a.read(name), b.read(name)), f"{name} differs between {one} and {other}"
    assert a.marker.run.progress == b.marker.run.progress


def campaign(folder: Path, kills: int, seed: int, reference: Path) -> Counter[str]:
    """One victim after the other, until so many were killed."""
    dice, killed, number = random.Random(seed), Counter[str](), 0
    expected = {step: (loss, digest) for step, loss, digest in steps(reference)}
    while killed.total() < kills:
        number += 1
        victim = folder / f"victim-{seed}-{number}"
        ended = False
        while not ended:
            ended = once(victim, dice, killed)
            whole(victim / "checkpoints")
        taken = steps(victim)
        assert {step for step, _, _ in taken} == set(expected)
        assert [one for one in taken if expected[one[0]] != one[1:]] == [], "a step's result differs"
        equal(victim, reference)
        print(
            f"victim {victim.name}: {killed.total()} kills so far, {len(taken)} steps taken, each as in the undisturbed run",
            flush=True,
        )
    return killed


def run(kills: int, jobs: int, seed: int) -> Counter[str]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.toml").write_text(RUN)
        reference = folder / "reference"
        subprocess.run(command(reference, 0), check=True, stdout=subprocess.DEVNULL)
        share = -(-kills // jobs)
        with ThreadPoolExecutor(jobs) as pool:
            parts = pool.map(lambda job: campaign(folder, share, seed * 1000 + job, reference), range(jobs))
            return sum(parts, Counter[str]())


def main() -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    started = time.monotonic()
    killed = run(given.kills, given.jobs, given.seed)
    print(f"{killed.total()} kills, nothing lost and no step different, in {time.monotonic() - started:.0f} s: {dict(killed)}")


if __name__ == "__main__":
    main()
