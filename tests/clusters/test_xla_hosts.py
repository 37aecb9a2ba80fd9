"""The XLA engine on two hosts, each with an address, a name and a process of its own. One of them is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Workshop, losses
from hosts import Hosts, OnHosts, available
from xla_engine import needs_xla

from phalanx.events.log import read_events
from phalanx.events.records import Event, Recovered, Step, WorkerStarted
from phalanx.launch.job import Job
from phalanx.launch.prepare import Request, prepare
from phalanx.spec.load import load

pytestmark = [needs_xla, pytest.mark.clusters, pytest.mark.skipif(not available(), reason="needs root and network namespaces")]


def test_a_lost_host_leaves_a_replica_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two replicas of two devices each; that of the other host continues from the checkpoint of step 4."""
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
    assert (recovered.action, recovered.step, recovered.ranks, recovered.layout["data"]) == ("shrink", 4, 1, 1)
    assert [event.host for event in events if isinstance(event, WorkerStarted)].count("h0") == 2
    expected = {step: (loss, digest) for step, loss, digest in losses(workshop.events("plain"))}
    for step, loss, digest in losses(events):
        assert (pytest.approx(loss, rel=1e-5), digest) == expected[step], step
    assert workshop.run("checkpoint", "verify", "broken/checkpoints/step-00000012").code == 0
    workshop.close()
