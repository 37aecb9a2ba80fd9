"""torchrun on three hosts: ranks that torchrun starts itself, and agents that it starts once per host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hosts import Hosts, available

from phalanx.events.log import EventReader, read_events
from phalanx.events.records import Event, FailureNoticed, Finished, Recovered, Restored, Step

pytestmark = [pytest.mark.clusters, pytest.mark.skipif(not available(), reason="needs root and network namespaces")]

RUN = """
[model]
dim = 64
layers = 2
heads = 2
kv_heads = 2
[train]
batch = 12
micro_batch = 1
sequence_length = 64
steps = {steps}
[layout]
data = 3
[cluster]
threads = 1
device = "cpu"
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


def start(hosts: Hosts, folder: Path, port: int, *program: str) -> list[subprocess.Popen[bytes]]:
    """torchrun on every host, with a static rendezvous."""
    processes = []
    for host in range(hosts.count):
        where = [
            f"--node-rank={host}",
            f"--master-addr={hosts.address(0)}",
            f"--master-port={port}",
            f"--local-addr={hosts.address(host)}",
        ]
        torchrun = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nnodes=3",
            "--nproc-per-node=1",
            "--max-restarts=0",
            *where,
        ]
        with (folder / f"torchrun-{host}.log").open("ab") as log:
            processes.append(
                subprocess.Popen(
                    [*hosts.inside(host), *torchrun, "-m", "phalanx", *program],
                    cwd=folder,
                    env=os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
    return processes


def wait_for(folder: Path, processes: list[subprocess.Popen[bytes]], step: int) -> None:
    reader, deadline = EventReader(folder / "run/events.jsonl"), time.monotonic() + 200
    while not any([isinstance(event, Step) and event.step >= step for event in reader.new()]):
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes), output(folder)
        time.sleep(0.1)


def output(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("torchrun-*.log")))


def losses(events: list[Event]) -> dict[int, tuple[float, int | None]]:
    return {event.step: (event.loss, event.batch_digest) for event in events if isinstance(event, Step)}


def alone(folder: Path, steps: int) -> list[Event]:
    folder.mkdir()
    (folder / "run.toml").write_text(RUN.format(steps=steps))
    command = [sys.executable, "-m", "phalanx", "train", "run.toml", "--run-dir", "run"]
    subprocess.run(command, cwd=folder, env=os.environ, check=True, capture_output=True)
    return read_events(folder / "run/events.jsonl")


def test_ranks_of_torchrun_on_three_hosts_train_and_resume(tmp_path: Path, hosts: Hosts) -> None:
    undisturbed = alone(tmp_path / "alone", 60)
    (tmp_path / "run.toml").write_text(RUN.format(steps=60))
    train = ("train", "run.toml", "--run-dir", "run")
    first = start(hosts, tmp_path, 29511, *train)
    wait_for(tmp_path, first, 20)
    for process in first:
        os.killpg(process.pid, signal.SIGTERM)
    for process in first:
        process.wait(60)
    second = start(hosts, tmp_path, 29512, *train)
    assert [process.wait(200) for process in second] == [0, 0, 0], output(tmp_path)
    events = read_events(tmp_path / "run/events.jsonl")
    assert any(isinstance(event, Restored) for event in events) and isinstance(events[-1], Finished)
    assert losses(events) == losses(undisturbed)


def test_agents_of_torchrun_survive_a_lost_host(tmp_path: Path, hosts: Hosts) -> None:
    undisturbed = alone(tmp_path / "alone", 100)
    (tmp_path / "run.toml").write_text(RUN.format(steps=100))
    processes = start(hosts, tmp_path, 29513, "node", "run", "--run-file", "run.toml")
    wait_for(tmp_path, processes, 20)
    hosts.kill_all(2)
    reader, deadline = EventReader(tmp_path / "run/events.jsonl"), time.monotonic() + 200
    while not any([isinstance(event, Finished) for event in reader.new()]):
        assert time.monotonic() < deadline, output(tmp_path)
        time.sleep(0.1)
    for process in processes:  # torchrun itself waits for the lost host
        process.kill()
        process.wait()
    events = read_events(tmp_path / "run/events.jsonl")
    assert [event.node for event in events if isinstance(event, FailureNoticed)] == [2]
    (recovered,) = (event for event in events if isinstance(event, Recovered))
    print(f"{recovered.action} in {recovered.seconds:.1f} s, {recovered.steps_lost} steps lost")
    ours, others = losses(events), losses(undisturbed)
    assert ours.keys() == others.keys() and max(abs(ours[step][0] - others[step][0]) for step in ours) <= 1e-4
