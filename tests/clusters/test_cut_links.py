"""Three hosts with a network between them, whose cables are pulled."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hosts import Hosts, available

from phalanx.control.protocol import AgentSettings
from phalanx.events.log import read_events
from phalanx.events.records import ControllerChanged, Event, FailureNoticed, Recovered, Step
from phalanx.launch.launcher import Job
from phalanx.launch.local import LocalAgent
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
[resilience]
spares = {spares}
"""


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Hosts(3) as made:
        yield made


def job(folder: Path, hosts: Hosts | None, nodes: int = 1, spares: int = 0) -> Job:
    prepared = prepare(loads(RUN.format(nodes=nodes, spares=spares)), "run", Request(directory=folder))

    def start(settings: AgentSettings, log: Path) -> LocalAgent:
        if hosts is None:
            return LocalAgent(settings, log)
        return LocalAgent(replace(settings, bind=hosts.address(settings.node)), log, hosts.prefix(settings.node))

    return Job(prepared, start=start)


def losses(events: list[Event]) -> dict[int, tuple[float, int | None]]:
    return {event.step: (event.loss, event.batch_digest) for event in events if isinstance(event, Step)}


def test_controller_that_is_cut_off_leaves_the_run_to_the_others(tmp_path: Path, hosts: Hosts) -> None:
    """Although it still has its disk, where it could show life."""
    undisturbed = list(job(tmp_path / "alone", None).events())
    running = job(tmp_path / "run", hosts, nodes=3, spares=1)
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


def test_host_that_is_cut_off_for_a_while_comes_back(tmp_path: Path, hosts: Hosts) -> None:
    undisturbed = list(job(tmp_path / "alone", None).events())
    running, cut = job(tmp_path / "run", hosts, nodes=2), 0.0
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
