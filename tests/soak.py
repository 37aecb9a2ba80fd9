"""A run on three hosts that share nothing, through random faults of every kind, until its end.

    python tests/soak.py [--steps 2000] [--every 20] [--seed 0]

The hosts are network namespaces, reached by ssh; checkpoints go to an S3 server. After a random time, `--every` seconds on average, a host
loses its power and boots some seconds later, its link is cut for a while, one of its processes (a rank, the agent, what forks ranks, what keeps copies
in memory) is killed or a rank frozen, or a disk is full for some seconds: that of a host, or that of the run directory. Faults overlap as they
come. Nobody helps the run: it must come to its end by itself, with the batches and the losses of a run that nothing disturbed. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from hosts import losses
from ssh_cluster import Cluster, three_hosts

from phalanx.events.records import ControllerChanged, Event, FailureNoticed, Recovered, Step

RUN = """
[model]
dim = 64
layers = 2
heads = 2
kv_heads = 2
[train]
batch = 4
micro_batch = 1
sequence_length = 64
steps = {steps}
[layout]
tensor = 2
pipeline = 2
data = 1
[cluster]
threads = 1
device = "cpu"
[checkpoint]
every = 50
memory_copies = 2
[resilience]
restarts = 1000
"""
_PROCESSES = {
    "agent": "phalanx.control.agent",
    "fork server": "phalanx.worker.fork_server",
    "replica server": "phalanx.checkpointing.replicas.replica_server",
}


class Faults:
    """Draws faults and injects them, each with its repair, until told to stop."""

    def __init__(self, cluster: Cluster, run_dir: Path, seed: int, every: float):
        self._cluster, self._run_dir, self._random, self._every = cluster, run_dir, random.Random(seed), every
        self.injected: list[tuple[float, str]] = []
        self._broken: set[tuple[str, int]] = set()
        """What is not repaired yet: kind and host."""
        self._over = threading.Event()
        self._repairs: list[tuple[float, Callable[[], None]]] = []
        self._thread = threading.Thread(target=self._work, name="faults")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """No more faults, and everything is repaired."""
        self._over.set()
        self._thread.join()
        for _, repair in self._repairs:
            repair()

    def _work(self) -> None:
        due = time.monotonic() + self._random.expovariate(1 / self._every)
        while not self._over.wait(0.05):
            now = time.monotonic()
            for repair in [repair for when, repair in self._repairs if when <= now]:
                repair()
            self._repairs = [(when, repair) for when, repair in self._repairs if when > now]
            if now >= due:
                due = now + self._random.expovariate(1 / self._every)
                self._inject()

    def _inject(self) -> None:
        host, seconds = self._random.randrange(3), self._random.uniform(1.0, 12.0)
        kind = self._random.choice([*["host", "link", "rank"] * 2, "frozen rank", *_PROCESSES, "host's disk", "disk"])
        ranks = {host: found for host in range(3) if (found := self._ranks(host))}
        if kind in ("rank", "frozen rank") and ranks:
            host = self._random.choice(list(ranks))
        host = 0 if kind == "disk" else host
        # A second fault of one kind at a host that has it already would be repaired by the first one's repair.
        if (kind, host) in self._broken:
            return
        print(f"{time.strftime('%H:%M:%S')} {kind} {host}, {seconds:.0f} s", flush=True)
        self.injected.append((time.time(), kind))
        match kind:
            case "host":
                self._break(kind, host, seconds, lambda: self._cluster.hosts.kill_all(host), lambda: self._boot(host))
            case "link":
                self._break(kind, host, seconds, lambda: self._cluster.hosts.cut(host), lambda: self._cluster.hosts.mend(host))
            case "host's disk":
                if (folder := self._private_folder(host)) is not None:
                    self._break(kind, host, seconds, lambda: _fill(folder), lambda: _empty(folder))
            case "disk":
                self._break(kind, host, seconds, lambda: _fill(self._run_dir), lambda: _empty(self._run_dir))
            case "rank" | "frozen rank":
                if host in ranks:
                    with contextlib.suppress(psutil.Error):
                        self._random.choice(ranks[host]).send_signal(signal.SIGKILL if kind == "rank" else signal.SIGSTOP)
            case _:
                for process in self._named(host, _PROCESSES[kind]):
                    if process not in ranks.get(host, ()):
                        with contextlib.suppress(psutil.Error):
                            process.kill()

    def _break(self, kind: str, host: int, seconds: float, damage: Callable[[], None], repair: Callable[[], None]) -> None:
        def mend() -> None:
            repair()
            self._broken.discard((kind, host))

        damage()
        self._broken.add((kind, host))
        self._repairs.append((time.monotonic() + seconds, mend))

    def _boot(self, host: int) -> None:
        self._cluster.hosts.boot(host, self._cluster.folder / "ssh", self._cluster.folder / "private")

    def _processes(self, host: int) -> list[psutil.Process]:
        found = []
        for pid in self._cluster.hosts.pids(host):
            with contextlib.suppress(psutil.Error):
                found.append(psutil.Process(pid))
        return found

    def _named(self, host: int, module: str) -> list[psutil.Process]:
        named = []
        for process in self._processes(host):
            with contextlib.suppress(psutil.Error):
                if module in process.cmdline() and "sh" not in process.name():
                    named.append(process)
        return named

    def _ranks(self, host: int) -> list[psutil.Process]:
        """Forked by the fork server, whose command line they have, but not its session."""
        return [process for process in self._named(host, _PROCESSES["fork server"]) if os.getsid(process.pid) != process.pid]

    def _private_folder(self, host: int) -> Path | None:
        """What the host sees at the private folder; None if it is down."""
        servers = [process for process in self._processes(host) if process.name() == "sshd"]
        return Path(f"/proc/{servers[0].pid}/root{self._cluster.folder / 'private'}") if servers else None


def _fill(folder: Path) -> None:
    with contextlib.suppress(OSError), (folder / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    with contextlib.suppress(OSError), (folder / "filler").open("ab", buffering=0) as file:
        while True:
            file.write(b"0")


def _empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        (folder / "filler").unlink(missing_ok=True)


def soak(folder: Path, steps: int, every: float, seed: int) -> dict[str, Any]:
    """Run, and compare with an undisturbed run; returns what happened."""
    with three_hosts(folder, RUN.format(steps=steps)) as cluster:
        private = folder / "private"
        # The disk of the run directory: small, so that it can be full. The hosts have mounts of their own there.
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "tmpfs", str(private)], check=True)
        try:
            undisturbed = cluster.follow(cluster.train("alone"), "alone", lambda event: None)
            print(f"{time.strftime('%H:%M:%S')} {len(losses(undisturbed))} steps undisturbed", flush=True)
            faults = Faults(cluster, private, seed, every)
            begin = time.monotonic()

            def on_event(event: Event) -> None:
                if isinstance(event, Step) and event.step == 1:
                    faults.start()
                elif isinstance(event, Recovered):
                    print(
                        f"{time.strftime('%H:%M:%S')} recovered: {event.action} from {event.source}, step {event.step}, "
                        f"{event.steps_lost} lost, {event.seconds:.1f} s, {event.ranks} ranks",
                        flush=True,
                    )

            process = cluster.train("run", "--on", "ssh", "--hosts", "hosts.txt")
            try:
                events = cluster.follow(process, "run", on_event)
            finally:
                faults.stop()
                process.kill()
                shutil.copytree(private / "run", folder / "run")  # its disk goes away
            return report(events, undisturbed, faults, time.monotonic() - begin)
        finally:
            subprocess.run(["umount", "--lazy", str(private)], check=False)


def report(events: list[Event], undisturbed: list[Event], faults: Faults, seconds: float) -> dict[str, Any]:
    ours, others = losses(events), losses(undisturbed)
    missing = sorted(others.keys() - ours.keys())
    recovered = [event for event in events if isinstance(event, Recovered)]
    times = sorted(event.seconds for event in recovered)
    return {
        "seconds": seconds,
        "faults": dict(Counter(kind for _, kind in faults.injected)),
        "failures noticed": dict(Counter(event.cause for event in events if isinstance(event, FailureNoticed))),
        "recoveries": dict(Counter(f"{event.action} from {event.source}" for event in recovered)),
        "controllers": 1 + sum(isinstance(event, ControllerChanged) for event in events),
        "median seconds of a recovery": times[len(times) // 2] if times else None,
        "longest": times[-1] if times else None,
        "steps lost": sum(event.steps_lost for event in recovered),
        "steps without a record": missing,
        "other batches": [step for step in ours if ours[step][1] != others[step][1]],
        "largest difference of a loss": max(abs(ours[step][0] - others[step][0]) for step in ours),
        "last losses": [ours[max(ours)][0], others[max(others)][0]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two faults, on average")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    print(f"in {folder}", flush=True)
    for name, value in soak(folder, options.steps, options.every, options.seed).items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    assert os.geteuid() == 0, "needs root"
    sys.exit(main())
