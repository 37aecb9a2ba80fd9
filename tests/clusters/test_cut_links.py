"""Three hosts with a network between them, whose cables are pulled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hosts import Hosts, OnHosts, available, losses

from phalanx.events.log import read_events
from phalanx.events.records import ControllerChanged, FailureNoticed, Recovered, Step
from phalanx.launch.job import Job
from phalanx.launch.prepare import Request, prepare
from phalanx.spec.load import loads

pytestmark = [pytest.mark.clusters, pytest.mark.skipif(not available(), reason="needs root and network namespaces")]

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
steps = 60
[layout]
data = 2
[cluster]
threads = 1
nodes = {nodes}
[checkpoint]
url = "{saved}"
[resilience]
spares = {spares}
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


def job(folder: Path, hosts: Hosts | None, nodes: int = 1, spares: int = 0, registry: str = "folder") -> Job:
    prepared = prepare(loads(RUN.format(nodes=nodes, spares=spares, saved=f"{folder}-saved")), "run", Request(directory=folder))
    if hosts is not None:
        prepared = replace(prepared, launcher=OnHosts(prepared.run, hosts, registry))
    return Job(prepared)


@pytest.mark.parametrize("registry", ["folder", "launcher"])
def test_controller_that_is_cut_off_leaves_the_run_to_the_others(tmp_path: Path, hosts: Hosts, registry: str) -> None:
    """Although it still has its disk, or its connection to the launcher, where it could show life."""
    undisturbed = list(job(tmp_path / "alone", None).events())
    running = job(tmp_path / "run", hosts, nodes=3, spares=1, registry=registry)
    for event in running.events():
        if isinstance(event, Step) and event.step == 10:
            hosts.cut(0)
    assert running.exit_code == 0
    events = read_events(tmp_path / "run/events.jsonl")
    assert losses(events) == losses(undisturbed)
    assert next((event.term, event.node) for event in events if isinstance(event, ControllerChanged)) == (2, 1)
    assert {(event.cause, event.node) for event in events if isinstance(event, FailureNoticed)} == {("node lost", 0)}
    (recovered,) = (event for event in events if isinstance(event, Recovered))
    print(f"noticed and recovered: {recovered.seconds:.1f} s")
    assert (recovered.action, recovered.steps_lost) == ("spare", 0)


@pytest.mark.parametrize("registry", ["folder", "launcher"])
def test_host_that_is_cut_off_for_a_while_comes_back(tmp_path: Path, hosts: Hosts, registry: str) -> None:
    undisturbed = list(job(tmp_path / "alone", None).events())
    running, cut = job(tmp_path / "run", hosts, nodes=2, registry=registry), 0.0
    for event in running.events():
        if isinstance(event, Step) and event.step == 10:
            hosts.cut(1)
            cut = time.monotonic()
        elif cut and time.monotonic() > cut + 5:
            hosts.mend(1)
            cut = 0.0
    assert running.exit_code == 0
    events = read_events(tmp_path / "run/events.jsonl")
    assert losses(events) == losses(undisturbed)
    recovered = [event for event in events if isinstance(event, Recovered)]
    print("; ".join(f"{event.action} at step {event.step} in {event.seconds:.1f} s" for event in recovered))
    assert [event.action for event in recovered][:2] == ["shrink", "grow"]
    assert recovered[0].steps_lost == 0
