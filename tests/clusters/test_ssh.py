"""Hosts that share no folder, reached by ssh, with checkpoints in an object store."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hosts import Hosts, available
from object_store import Store, serve

from phalanx.events.log import EventReader, read_events
from phalanx.events.records import ControllerChanged, Event, FailureNoticed, Recovered, Step, WorkerStarted

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
steps = {steps}
[layout]
tensor = 2
pipeline = 2
data = 1
[cluster]
threads = 1
device = "cpu"
[checkpoint]
every = 20
"""


class Cluster(NamedTuple):
    hosts: Hosts
    folder: Path
    store: Store
    client: Path

    def train(self, run_dir: str, *words: str) -> subprocess.Popen[str]:
        settings = [f"checkpoint.url=s3://{self.store.bucket()}/run", f"cluster.ssh=ssh -F {self.client}"]
        command = [sys.executable, "-m", "phalanx", "train", "run.toml", *settings, "--run-dir", f"private/{run_dir}", *words]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=os.environ | self.store.env(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def follow(self, process: subprocess.Popen[str], run_dir: str, on_event: Callable[[Event], None]) -> list[Event]:
        """Call back for every event until the run has ended; returns its events."""
        reader = EventReader(self.folder / "private" / run_dir / "events.jsonl")
        while process.poll() is None:
            for event in reader.new():
                on_event(event)
            time.sleep(0.05)
        output, _ = process.communicate()
        assert process.returncode == 0, output
        return read_events(self.folder / "private" / run_dir / "events.jsonl")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "private").mkdir()
    with Hosts(3) as hosts, serve(hosts.outside) as store:
        client = hosts.start_sshd(tmp_path / "ssh", tmp_path / "private")
        (tmp_path / "hosts.txt").write_text("".join(f"{hosts.address(host)}\n" for host in range(3)))
        (tmp_path / "run.toml").write_text(RUN.format(steps=80))
        yield Cluster(hosts, tmp_path, store, client)


def losses(events: list[Event]) -> dict[int, tuple[float, int | None]]:
    return {event.step: (event.loss, event.batch_digest) for event in events if isinstance(event, Step)}


def compare(events: list[Event], undisturbed: list[Event]) -> None:
    ours, others = losses(events), losses(undisturbed)
    assert ours.keys() == others.keys()
    assert {step: digest for step, (_, digest) in ours.items()} == {step: digest for step, (_, digest) in others.items()}
    assert max(abs(ours[step][0] - others[step][0]) for step in ours) <= 1e-5


def test_everything_on_the_controllers_host_is_killed(cluster: Cluster) -> None:
    undisturbed = cluster.follow(cluster.train("alone"), "alone", lambda event: None)

    def kill(event: Event) -> None:
        if isinstance(event, Step) and event.step == 10:
            cluster.hosts.kill_all(0)

    events = cluster.follow(cluster.train("run", "--on", "ssh", "--hosts", "hosts.txt"), "run", kill)
    compare(events, undisturbed)
    assert any(isinstance(event, ControllerChanged) for event in events)
    assert {(event.cause, event.node) for event in events if isinstance(event, FailureNoticed)} == {("node lost", 0)}
    recovered = [event for event in events if isinstance(event, Recovered)]
    print("; ".join(f"{event.action} at step {event.step} in {event.seconds:.1f} s" for event in recovered))
    assert all(event.steps_lost <= 1 for event in recovered)


def test_two_hosts_are_lost_at_once(cluster: Cluster) -> None:
    """Each state is in the memory of three hosts, the one without ranks included."""
    undisturbed = cluster.follow(cluster.train("alone"), "alone", lambda event: None)

    def kill(event: Event) -> None:
        if isinstance(event, Step) and event.step == 10:
            cluster.hosts.kill_all(0)
            cluster.hosts.kill_all(1)

    words = ("--on", "ssh", "--hosts", "hosts.txt", "checkpoint.memory_copies=2")
    events = cluster.follow(cluster.train("run", *words), "run", kill)
    compare(events, undisturbed)
    assert {event.node for event in events if isinstance(event, FailureNoticed)} == {0, 1}
    recovered = [event for event in events if isinstance(event, Recovered)]
    print("; ".join(f"{event.action} from {event.source} at step {event.step} in {event.seconds:.1f} s" for event in recovered))
    assert all(event.steps_lost <= 1 for event in recovered)


def test_links_are_cut_and_mended(cluster: Cluster) -> None:
    """Host 1 for 5 s. Then host 2, which had taken its place, until ssh has given it up: it is reached anew when its link is back."""
    (cluster.folder / "run.toml").write_text(RUN.format(steps=400))
    undisturbed = cluster.follow(cluster.train("alone"), "alone", lambda event: None)
    hosts = cluster.hosts
    done: list[str] = []
    due: dict[str, float] = {}

    def once(name: str, act: Callable[[int], None], host: int) -> None:
        if name not in done:
            done.append(name)
            due[name] = time.monotonic()
            act(host)

    def disturb(event: Event) -> None:
        since = {name: time.monotonic() - when for name, when in due.items()}
        if isinstance(event, Step) and event.step >= 10:
            once("cut 1", hosts.cut, 1)
        if since.get("cut 1", 0) > 5:
            once("mend 1", hosts.mend, 1)
        if since.get("mend 1", 0) > 5:
            once("cut 2", hosts.cut, 2)
        if since.get("cut 2", 0) > 20:
            once("mend 2", hosts.mend, 2)

    events = cluster.follow(cluster.train("run", "--on", "ssh", "--hosts", "hosts.txt"), "run", disturb)
    assert done == ["cut 1", "mend 1", "cut 2", "mend 2"]
    compare(events, undisturbed)
    recovered = [event for event in events if isinstance(event, Recovered)]
    print("; ".join(f"{event.action} at step {event.step} in {event.seconds:.1f} s" for event in recovered))
    assert [event.node for event in events if isinstance(event, FailureNoticed)] == [1, 2]
    assert all(event.steps_lost <= 1 for event in recovered)
    assert {event.host for event in events if isinstance(event, WorkerStarted)} == {"h0", "h1", "h2"}
