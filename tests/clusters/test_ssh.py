"""Hosts that share no folder, reached by ssh, with checkpoints in an object store."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hosts import available
from ssh_cluster import Cluster, compare, three_hosts

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


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with three_hosts(tmp_path, RUN.format(steps=80)) as made:
        yield made


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
