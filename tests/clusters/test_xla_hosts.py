"""The XLA engine on several hosts, each with an address, a name and a process of its own. One of them is lost."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import slurm_cluster
from commands import Workshop, losses
from hosts import Hosts, OnHosts, available
from ssh_cluster import compare, three_hosts
from xla_engine import needs_xla

from phalanx.events.log import EventReader, read_events
from phalanx.events.records import Event, Finished, Recovered, Step, WorkerStarted
from phalanx.launch.job import Job
from phalanx.launch.prepare import Request, prepare
from phalanx.spec.load import load

pytestmark = [needs_xla, pytest.mark.clusters, pytest.mark.skipif(not available(), reason="needs root and network namespaces")]


def test_a_lost_host_leaves_a_replica_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of two devices each; that of the other host continues from its copy in memory."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    workshop = Workshop(tmp_path / "shop")
    workshop.train("train.steps=12", "--run-dir", "plain")
    monkeypatch.chdir(workshop.path)
    settings = ("layout.data=2", "layout.tensor=2", "cluster.nodes=2", "cluster.cpu_ranks=4", "resilience.heartbeat=5")
    run = load(Path("tiny.toml"), ["engine.name=xla", "train.steps=12", *settings])
    with Hosts(2) as hosts:
        killed = False

        def kill(event: Event) -> None:
            nonlocal killed
            if isinstance(event, Step) and event.step == 6 and not killed:
                killed = True
                hosts.kill_all(1)

        job = Job(prepare(run, "run", Request(directory=Path("broken")), started_by=OnHosts(run, hosts)), on_event=kill)
        job.wait()
    events = read_events(Path("broken") / "events.jsonl")
    (recovered,) = [event for event in events if isinstance(event, Recovered)]
    assert (recovered.action, recovered.source, recovered.ranks, recovered.layout["data"]) == ("shrink", "memory", 1, 1)
    assert recovered.steps_lost <= 1
    assert [event.host for event in events if isinstance(event, WorkerStarted)].count("h0") == 2
    expected = {step: (loss, digest) for step, loss, digest in losses(workshop.events("plain"))}
    for step, loss, digest in losses(events):
        assert (pytest.approx(loss, rel=1e-5), digest) == expected[step], step
    assert workshop.run("checkpoint", "verify", "broken/checkpoints/step-00000012").code == 0
    workshop.close()


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
steps = 12
[layout]
data = 2
tensor = 2
[cluster]
threads = 1
device = "cpu"
[checkpoint]
every = 4
[resilience]
heartbeat = 8
"""
"""The torch engine and the XLA engine compute it alike."""


@pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="needs the Debian package openssh-server")
def test_the_controllers_host_is_lost_by_ssh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three hosts train, which share no folder; the third takes the place of the lost one."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    with three_hosts(tmp_path, RUN) as cluster:
        undisturbed = cluster.follow(cluster.train("alone"), "alone", lambda event: None)

        def kill(event: Event) -> None:
            if isinstance(event, Step) and event.step == 6:
                cluster.hosts.kill_all(0)

        words = ("engine.name=xla", "--on", "ssh", "--hosts", "hosts.txt", "resilience.spares=1")
        events = cluster.follow(cluster.train("run", *words), "run", kill)
    compare(events, undisturbed)
    (recovered,) = [event for event in events if isinstance(event, Recovered)]
    print(f"{recovered.action} from {recovered.source} at step {recovered.step} in {recovered.seconds:.1f} s")
    assert recovered.steps_lost <= 1 and recovered.ranks == 2
    assert len({event.host for event in events if isinstance(event, WorkerStarted)}) == 3


@pytest.mark.skipif(not slurm_cluster.available(), reason="needs the Debian packages slurm-wlm and munge")
def test_a_node_of_slurm_is_lost(tmp_path: Path) -> None:
    """Four nodes with a device each; a replica less is left."""
    (tmp_path / "run.toml").write_text(RUN)
    command = [sys.executable, "-m", "phalanx", "train", "run.toml", "--run-dir"]
    subprocess.run([*command, "alone"], cwd=tmp_path, check=True, capture_output=True)
    with Hosts(4) as hosts, slurm_cluster.Slurm(tmp_path / "slurm", hosts) as slurm:
        words = ["run", "engine.name=xla", "cluster.nodes=4", "cluster.cpu_ranks=4", "--on", "slurm"]
        env = slurm.env | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
        with (
            (tmp_path / "out").open("wb") as out,
            subprocess.Popen([*command, *words], cwd=tmp_path, env=env, stdout=out) as job,
        ):
            reader, killed = EventReader(tmp_path / "run/events.jsonl"), False
            while job.poll() is None:
                time.sleep(0.1)
                if not killed and any(isinstance(event, Step) and event.step >= 6 for event in reader.new()):
                    hosts.kill_all(2)
                    killed = True
    events = read_events(tmp_path / "run/events.jsonl")
    assert isinstance(events[-1], Finished), (tmp_path / "out").read_text()
    compare(events, read_events(tmp_path / "alone/events.jsonl"))
    (recovered,) = [event for event in events if isinstance(event, Recovered)]
    print(f"{recovered.action} from {recovered.source} at step {recovered.step} in {recovered.seconds:.1f} s")
    assert recovered.steps_lost <= 1
