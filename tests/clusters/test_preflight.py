"""Hosts that must not train: each is named before the first step, whether ssh or `phalanx node` has started its agent."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from hosts import Hosts, available

import phalanx
from phalanx.events.log import read_events
from phalanx.events.records import Event, Finished, HostRejected, HostsChecked, Step, WorkerStarted

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(not available(), reason="needs root and network namespaces"),
    pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="needs the Debian package openssh-server"),
]

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
steps = 3
[layout]
data = 2
[cluster]
threads = 1
device = "cpu"
nodes = 3
[checkpoint]
url = "{saved}"
[resilience]
spares = 1
"""
# On Python's path of one host: its clock is five minutes ahead.
LATE = "import time\n_now = time.time\ntime.time = lambda: _now() + 300\n"


class Result(NamedTuple):
    code: int
    output: str
    events: list[Event]

    @property
    def rejected(self) -> dict[int, str]:
        return {event.node: event.message for event in self.events if isinstance(event, HostRejected)}

    @property
    def checked(self) -> HostsChecked:
        (event,) = (event for event in self.events if isinstance(event, HostsChecked))
        return event

    def trained_on(self, *hosts: str) -> None:
        """Everything that was rejected was rejected before the first step, and these hosts have trained to the end."""
        assert self.code == 0 and isinstance(self.events[-1], Finished), self.output
        kinds = [type(event) for event in self.events]
        assert all(kinds.index(kind) < kinds.index(Step) for kind in (HostRejected, HostsChecked) if kind in kinds)
        assert {event.host for event in self.events if isinstance(event, WorkerStarted)} == set(hosts)


class Cluster(NamedTuple):
    hosts: Hosts
    folder: Path

    def by_ssh(self, *words: str, pythons: dict[int, Path] | None = None) -> Result:
        """`phalanx train --on ssh`. `pythons`: interpreters of some hosts."""
        self._forget()
        lines = [self.hosts.address(host) for host in range(self.hosts.count)]
        for host, python in (pythons or {}).items():
            lines[host] += f" python={python}"
        (self.folder / "hosts.txt").write_text("\n".join(lines) + "\n")
        ssh = f"cluster.ssh=ssh -F {self.folder}/ssh/config"
        command = [sys.executable, "-m", "phalanx", "train", "run.toml", ssh, "--on", "ssh", "--hosts", "hosts.txt"]
        done = subprocess.run(
            [*command, "--run-dir", "private/run", *words], cwd=self.folder, capture_output=True, text=True, timeout=200
        )
        return Result(done.returncode, done.stdout + done.stderr, _events(self.folder / "private/run"))

    def by_hand(self, *words: str, pythons: dict[int, Path] | None = None) -> Result:
        """`phalanx node` on every host, in a folder that all see."""
        self._forget()
        processes = []
        for host in range(self.hosts.count):
            python = (pythons or {}).get(host, Path(sys.executable))
            place = ["--node", str(host), "--nodes", str(self.hosts.count), "--launch", "one", "--bind", "eth0"]
            command = [str(python), "-m", "phalanx", "node", "run", "--run-file", "run.toml", *place, *words]
            processes.append(
                subprocess.Popen(
                    [*self.hosts.inside(host), *command],
                    cwd=self.folder,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=200)[0] for process in processes]
        codes = {process.returncode for process in processes}
        return Result(max(codes), "\n".join(outputs), _events(self.folder / "run"))

    def _forget(self) -> None:
        """Remove what an earlier run has left."""
        for path in ("run", "private/run", "saved"):
            shutil.rmtree(self.folder / path, ignore_errors=True)

    def python(self, setup: str) -> Path:
        """An interpreter for one host: this one, after some shell commands."""
        path = self.folder / "python"
        path.write_text(f'#!/bin/sh\n{setup}\nexec {sys.executable} "$@"\n')
        path.chmod(0o755)
        return path


def _events(run: Path) -> list[Event]:
    return read_events(run / "events.jsonl") if (run / "events.jsonl").exists() else []


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "private").mkdir()
    (tmp_path / "run.toml").write_text(RUN.format(saved=tmp_path / "saved"))
    with Hosts(3) as hosts:
        hosts.start_sshd(tmp_path / "ssh", tmp_path / "private")
        yield Cluster(hosts, tmp_path)


@contextmanager
def busy(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.mark.parametrize("attempt", range(3))
def test_equal_hosts_pass_on_a_busy_machine(cluster: Cluster, attempt: int) -> None:
    with busy(4):
        result = cluster.by_ssh()
    result.trained_on("h0", "h1")
    assert not result.rejected and result.checked.rejected == 0, result.output
    assert result.checked.links.keys() == {"0-1", "0-2", "1-2"} and min(result.checked.links.values()) > 0
    assert result.checked.hosts == {"0": "h0", "1": "h1", "2": "h2"}
    assert re.search(
        r"checked 3 hosts in .* s: links up to .*/s \(slowest: h\d–h\d, .*/s\), devices from .*, none rejected", result.output
    )
    print(result.checked)


def other_code(cluster: Cluster) -> Path:
    """Another version of the package for one host."""
    shutil.copytree(
        Path(phalanx.__file__).parent, cluster.folder / "other/phalanx", ignore=shutil.ignore_patterns("__pycache__")
    )
    with (cluster.folder / "other/phalanx/training/step.py").open("a") as file:
        file.write("# changed\n")
    return cluster.python(f"export PYTHONPATH={cluster.folder}/other:$PYTHONPATH")


def late_clock(cluster: Cluster) -> Path:
    (cluster.folder / "late").mkdir()
    (cluster.folder / "late/sitecustomize.py").write_text(LATE)
    return cluster.python(f"export PYTHONPATH={cluster.folder}/late:$PYTHONPATH")


CODE = r"Phalanx's source code of {} is [0-9a-f]{{12}}, but [0-9a-f]{{12}} on most hosts: install the same on all hosts, or remove the host"
CLOCK = r"The clock of {} is (299|300|301) s ahead of the others, and 2 s are allowed: synchronize it"


@pytest.mark.parametrize(("prepare", "words"), [(other_code, CODE), (late_clock, CLOCK)])
def test_a_host_that_differs_is_named(cluster: Cluster, prepare: object, words: str) -> None:
    python = prepare(cluster)  # type: ignore[operator]
    result = cluster.by_ssh(pythons={1: python})
    assert result.code == 2 and not result.events, "refused before anything was started"
    assert re.search(words.format(re.escape(cluster.hosts.address(1))), result.output), result.output
    result = cluster.by_hand(pythons={1: python})
    result.trained_on("h0", "h2")
    assert list(result.rejected) == [1]
    assert re.search(words.format(r"h1 \(node 1\)"), result.rejected[1])


def test_a_host_whose_link_is_shaped_to_a_tenth_is_named(cluster: Cluster) -> None:
    fast = max(cluster.by_hand().checked.links.values())
    tenth = min(fast, 1.25e9) / 10  # of what the link delivers, or of what the plan assumes
    cluster.hosts.shape(1, int(8 * tenth))
    for train in (cluster.by_hand, cluster.by_ssh):
        result = train()
        print(result.checked)
        result.trained_on("h0", "h2")
        assert list(result.rejected) == [1]
        assert re.search(
            r"The link of h1 \(node 1\) delivers \d+ MB/s at most \(to h\d \(node \d\)\), but \d+ MB/s are needed, "
            r"cluster.min_speed = 0.5 of",
            result.rejected[1],
        )


def test_a_host_with_a_full_disk_is_named(cluster: Cluster) -> None:
    full = cluster.folder / "private"
    result = cluster.by_ssh(pythons={1: cluster.python(f"mount -t tmpfs -o size=16m tmpfs {full}")})
    assert result.code == 2 and not result.events
    words = rf"{re.escape(cluster.hosts.address(1))} has \d+ MiB free for {full}/run, and logs alone need 64 MiB"
    assert re.search(words, result.output), result.output


@pytest.mark.parametrize("how", ["by_ssh", "by_hand"])
def test_a_host_that_computes_wrongly_is_named(cluster: Cluster, how: str) -> None:
    result: Result = getattr(cluster, how)("--chaos", "miscompute node=0")
    result.trained_on("h1", "h2")
    assert list(result.rejected) == [0]
    assert re.search(r"CPU of h0 \(node 0\) \(.*\) computes wrongly: 1 of the numbers", result.rejected[0])


def test_a_run_that_cannot_do_without_the_host_is_refused(cluster: Cluster) -> None:
    result = cluster.by_ssh(
        "resilience.spares=0", "layout.data=3", "train.batch=6", "resilience.shrink=false", "--chaos", "miscompute node=2"
    )
    assert result.code == 1 and not any(isinstance(event, Step) for event in result.events)
    assert "The run cannot start without hosts that failed the check" in result.output and "h2 (node 2)" in result.output
