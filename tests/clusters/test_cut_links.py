"""Three hosts with a network between them, whose cables are pulled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hosts import Hosts, OnHosts, available, losses

from phalanx.control.protocol import RESUMABLE
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
steps = {steps}
[optimizer]
schedule = "constant"
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


def job(
    folder: Path, hosts: Hosts | None, registry: str = "folder", *, steps: int = 60, nodes: int = 1, spares: int = 0
) -> Job:
    text = RUN.format(steps=steps, nodes=nodes, spares=spares, saved=f"{folder}-saved")
    prepared = prepare(loads(text), "run", Request(directory=folder))
    if hosts is not None:
        prepared = replace(prepared, launcher=OnHosts(prepared.run, hosts, registry))
    return Job(prepared)


@pytest.mark.parametrize("registry", ["folder", "launcher"])
def test_controller_that_is_cut_off_leaves_the_run_to_the_others(tmp_path: Path, hosts: Hosts, registry: str) -> None:
    """Although it still has its disk, or its connection to the launcher, where it could show life."""
    undisturbed = list(job(tmp_path / "alone", None).events())
    running = job(tmp_path / "run", hosts, registry, nodes=3, spares=1)
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
    """However quick the machine is: the run goes on until the host is back."""
    running, cut = job(tmp_path / "run", hosts, registry, steps=100_000, nodes=2), 0.0
    last = 0
    for event in running.events():
        if isinstance(event, Recovered) and event.action == "grow":
            last = event.step + 10
        if isinstance(event, Step) and event.step == 10:
            hosts.cut(1)
            cut = time.monotonic()
        elif cut and time.monotonic() > cut + 5:
            hosts.mend(1)
            cut = 0.0
        elif isinstance(event, Step) and event.step == last:
            running.stop("the test has seen enough")
    assert running.exit_code == RESUMABLE
    events = read_events(tmp_path / "run/events.jsonl")
    done = losses(events)
    undisturbed = losses(list(job(tmp_path / "alone", None, steps=max(done)).events()))
    assert done == undisturbed
    recovered = [event for event in events if isinstance(event, Recovered)]
    print("; ".join(f"{event.action} at step {event.step} in {event.seconds:.1f} s" for event in recovered))
    assert [event.action for event in recovered][:2] == ["shrink", "grow"]
    assert recovered[0].steps_lost == 0
