"""The cost of the page for a running job: its steps while nobody looks, and while a client polls the page.

    python benchmarks/page_overhead.py [--ranks 1] [--turns 40] [--seconds 4] [RUN.toml] [key=value …]

One job trains all the time, and `phalanx watch` serves it all the time. In short turns, in the order A B B A, a client asks for the overview and the
ranks as a browser does, every second with the ETag of the answer before, or nobody asks. Other load on the machine affects both. Prints the
ratio of the medians of step times with a 95 % interval (bootstrap over turns), the same ratio between turns in which nobody looked, which is the
noise, and the processor time of the server.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import psutil
from common import RUN, machine_load

from phalanx.events.log import read_events
from phalanx.events.records import Step

_WARM_UP = 20
"""Steps before the first turn."""
_SETTLE = 0.3
"""Seconds at the beginning of a turn that count for nothing: a step may have begun before it."""


class Client(threading.Thread):
    """Asks the server as the page does, while it is told to."""

    def __init__(self, address: str, name: str):
        super().__init__(daemon=True)
        self._host = address.removeprefix("http://").strip("/")
        self._paths = [
            f"/api/view?run={name}&view=overview&width=700&pack=1",
            f"/api/view?run={name}&view=ranks&width=700&pack=1",
        ]
        self.looks, self.answers, self.ended = threading.Event(), 0, False

    def run(self) -> None:
        connection = http.client.HTTPConnection(self._host, timeout=60)
        tags: dict[str, str] = {}
        while not self.ended:
            if not self.looks.wait(0.1):
                continue
            for path in self._paths:
                connection.request("GET", path, headers={"Accept-Encoding": "gzip", "If-None-Match": tags.get(path, "")})
                response = connection.getresponse()
                response.read()
                tags[path] = response.headers.get("ETag", "")
                self.answers += 1
            time.sleep(1.0)


def turns(client: Client, server: psutil.Process, count: int, seconds: float) -> tuple[list[tuple[bool, float, float]], float]:
    """Whether somebody looked, from when to when; and the processor seconds of the server while somebody looked."""
    taken, spent = [], 0.0
    for turn in range(count):
        looks = turn % 4 in (1, 2)
        client.looks.set() if looks else client.looks.clear()
        begin, before = time.time(), sum(server.cpu_times()[:2])
        time.sleep(seconds)
        spent += (sum(server.cpu_times()[:2]) - before) if looks else 0.0
        taken.append((looks, begin + _SETTLE, time.time()))
    return taken, spent


def ratio(ons: Sequence[Sequence[float]], offs: Sequence[Sequence[float]]) -> str:
    """The ratio of the medians, with an interval: turns are drawn, because steps of one turn have the same load beside them."""

    def middle(groups: Sequence[Sequence[float]]) -> float:
        return median(value for group in groups for value in group)

    dice = random.Random(0)
    drawn = sorted(middle(dice.choices(ons, k=len(ons))) / middle(dice.choices(offs, k=len(offs))) for _ in range(2000))
    return f"{100 * (middle(ons) / middle(offs) - 1):+.2f} % ({100 * (drawn[50] - 1):+.2f} to {100 * (drawn[-50] - 1):+.2f} %)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=4.0, help="of a turn")
    parser.add_argument("run", nargs="*", help="a run file and settings, or settings alone")
    options = parser.parse_args()
    settings = [word for word in options.run if "=" in word]
    with tempfile.TemporaryDirectory() as name:
        path = next((Path(word) for word in options.run if "=" not in word), None)
        if path is None:
            path = Path(name) / "run.toml"
            path.write_text(RUN.format(batch=4 * options.ranks, optimizer="", layout=f"data = {options.ranks}"))
            settings += [f"cluster.cpu_ranks={options.ranks}", "checkpoint.save=false"]
        folder = Path(name) / "runs"
        folder.mkdir()
        program = [sys.executable, "-m", "phalanx"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": dict(os.environ, OMP_NUM_THREADS="1")}
        job = subprocess.Popen([*program, "train", str(path), "--run-dir", str(folder / "job"), *settings], **quiet)  # type: ignore[call-overload]
        watch = subprocess.Popen([*program, "watch", str(folder), "--port", "0", "--json"], stdout=subprocess.PIPE, text=True)
        try:
            measure(options, job, watch, folder / "job")
        finally:
            for process in (watch, job):
                process.terminate()
            for process in (watch, job):
                process.wait()


def measure(options: argparse.Namespace, job: subprocess.Popen[bytes], watch: subprocess.Popen[str], run_dir: Path) -> None:
    assert watch.stdout is not None
    events = run_dir / "events.jsonl"

    def steps() -> list[Step]:
        return [event for event in read_events(events) if isinstance(event, Step)] if events.exists() else []

    while len(steps()) < _WARM_UP:
        assert job.poll() is None, "the job has ended"
        time.sleep(0.5)
    client = Client(json.loads(watch.stdout.readline())["address"], run_dir.name)
    client.start()
    client.looks.set()
    time.sleep(3)  # everything so far is read
    server = psutil.Process(watch.pid)
    taken, spent = turns(client, server, options.turns, options.seconds)
    client.ended = True
    ends = [(event.time, event.seconds) for event in steps()]
    groups = {
        looks: [[s for t, s in ends if begin < t <= end] for on, begin, end in taken if on is looks] for looks in (True, False)
    }
    on, off = ([group for group in groups[looks] if group] for looks in (True, False))
    looked = sum(end - begin + _SETTLE for is_on, begin, end in taken if is_on)
    counts = [sum(len(group) for group in kind) for kind in (on, off)]
    print(f"{options.ranks} ranks, {counts[0]} steps while a client polled, {counts[1]} while nobody looked ({machine_load()})")
    print(f"step time with a client: {ratio(on, off)}")
    print(f"noise, turns without one among themselves: {ratio(off[::2], off[1::2])}")
    print(f"processor time of the server: {100 * spent / looked:.2f} % of one core while looked at, {client.answers} answers")


if __name__ == "__main__":
    main()
