"""How fast runs go on after the loss of ranks and nodes, in which layouts, and how hangs are named: the whole of what is promised."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import killing
import psutil
import pytest
from commands import Workshop

from phalanx.events.log import read_events
from phalanx.events.records import ControllerChanged, Event, FailureNoticed, Recovered, Restored, Step, WorkerStarted

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SIZES = (
    "model.kv_heads=2",
    "model.layers=4",
    "model.heads=4",
    "train.batch=24",
    "train.micro_batch=1",
    "train.eval_every=1000",
)
LONG = 1200.0
"""Seconds that a whole run may take: on two slow cores, a step of four ranks takes one."""


def of(events: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def taken(events: list[Event]) -> dict[int, tuple[float, str]]:
    return {event.step: (event.loss, event.batch_digest) for event in events if isinstance(event, Step)}


def from_memory(events: list[Event]) -> bool:
    return all(one.path.startswith("memory") for one in of(events, Restored))


class Victim:
    """A run whose processes are killed and stopped from outside, at steps that it has come to."""

    def __init__(self, workshop: Workshop, name: str, *arguments: str):
        self.workshop, self.path = workshop, workshop.path / name
        self.started = workshop.start("train", "tiny.toml", *SIZES, *arguments, "--run-dir", name)

    @property
    def events(self) -> list[Event]:
        return list(read_events(self.path / "events.jsonl")) if (self.path / "events.jsonl").is_file() else []

    def reach(self, step: int) -> None:
        self.until(lambda: any(one.step >= step for one in of(self.events, Step)), f"step {step}")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        self.started.until(condition, what)

    def rank(self, number: int) -> int:
        return [one.pid for one in of(self.events, WorkerStarted) if one.rank == number][-1]

    def agent(self, node: int) -> psutil.Process:
        said = json.loads((self.path / "control" / f"node-{node:05d}.json").read_text())
        return psutil.Process(said["pid"])

    def kill(self, *ranks: int) -> None:
        for rank in ranks:
            os.kill(self.rank(rank), signal.SIGKILL)

    def kill_node(self, node: int) -> None:
        agent = self.agent(node)
        for process in [agent, *agent.children(recursive=True)]:
            process.kill()

    def recovered(self, count: int) -> list[Recovered]:
        self.until(lambda: len(of(self.events, Recovered)) >= count, f"recovery {count}")
        return of(self.events, Recovered)

    def end(self) -> list[Event]:
        ended = self.started.wait(LONG)
        assert ended.code == 0, ended
        assert self.workshop.gone()
        assert list(self.path.rglob("*.partial")) == []
        return self.events


def undisturbed(workshop: Workshop, *arguments: str) -> Path:
    ended = workshop.start("train", "tiny.toml", *SIZES, *arguments, "--run-dir", "undisturbed").wait(LONG)
    assert ended.code == 0, ended
    path: Path = workshop.path / "undisturbed"
    return path


def same(one: Path, other: Path) -> None:
    expected, found = taken(read_events(one / "events.jsonl")), taken(read_events(other / "events.jsonl"))
    assert found == expected
    killing.equal(one, other)


# --- a worker dies ---


@pytest.mark.parametrize(
    ("layout", "typical", "worst"),
    [(("layout.data=2", "layout.tensor=2"), 1.5, 3.0), (("layout.shard=4", "layout.zero=3"), 4.0, 4.0)],
)
def test_any_worker_is_replaced_and_costs_at_most_one_step(
    workshop: Workshop, layout: tuple[str, ...], typical: float, worst: float
) -> None:
    settings = (*layout, "cluster.nodes=2", "train.steps=260")
    reference = undisturbed(workshop, *settings)
    victim = Victim(workshop, "disturbed", *settings)
    for number in range(20):
        victim.reach(12 * number + 8)
        victim.kill(number % 4)
        victim.recovered(number + 1)
    events = victim.end()
    recoveries = of(events, Recovered)
    seconds = [one.seconds for one in recoveries]
    print(f"median {median(seconds):.2f} s, worst {max(seconds):.2f} s")
    assert len(seconds) == 20 and {one.action for one in recoveries} == {"restart"}
    assert max(one.steps_lost for one in recoveries) <= 1
    assert from_memory(events)
    same(reference, victim.path)
    assert median(seconds) <= typical and max(seconds) <= worst


def test_five_times_as_fast_as_torchrun() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "recovery.py"), "--kills", "5", "--torchrun", "3"]
    said = subprocess.run(command, capture_output=True, text=True, timeout=900, check=True).stdout
    print(said)
    medians = [float(number) for number in re.findall(r"median ([0-9.]+)", said)]
    assert len(medians) >= 2 and medians[1] >= 5 * medians[0], said


# --- a node dies ---


@pytest.mark.parametrize("node", [1, 0])
@pytest.mark.parametrize("layout", [("layout.data=2", "layout.tensor=2"), ("layout.pipeline=2", "layout.tensor=2")])
def test_loss_of_a_node_is_recovered(workshop: Workshop, layout: tuple[str, ...], node: int) -> None:
    """A spare steps in, so that the layout is the same again. Node 0 is the one that decides."""
    settings = (*layout, "train.steps=40")
    reference = undisturbed(workshop, *settings, "cluster.nodes=2")
    victim = Victim(workshop, "disturbed", *settings, "cluster.nodes=3", "resilience.spares=1")
    victim.reach(15)
    victim.kill_node(node)
    killed = time.time()
    (recovery,) = victim.recovered(1)
    events = victim.end()
    print(f"next step {recovery.first_step - killed:.2f} s after the node was killed")
    assert recovery.action == "spare" and recovery.steps_lost <= 1
    assert [one.node for one in of(events, ControllerChanged)] == ([1] if node == 0 else [])
    assert from_memory(events)
    same(reference, victim.path)
    assert recovery.first_step - killed <= 5.0


def test_frozen_controller_is_ignored_when_it_wakes(workshop: Workshop) -> None:
    settings = ("layout.data=2", "layout.tensor=2", "cluster.nodes=2", "train.steps=400")
    victim = Victim(workshop, "disturbed", *settings)
    victim.reach(10)
    frozen = victim.agent(0)
    frozen.suspend()
    try:
        victim.until(lambda: bool(of(victim.events, ControllerChanged)), "another controller")
        victim.recovered(1)
        time.sleep(5.0)
    finally:
        frozen.resume()
    # It gives up what it had, joins, and the run grows back.
    victim.until(lambda: of(victim.events, Recovered)[-1].ranks == 4, "the run to grow back")
    assert frozen.is_running()
    assert sorted(path.name for path in (victim.path / "control").glob("term-*")) == ["term-00001", "term-00002"]
    events = victim.end()
    assert [(one.term, one.node) for one in of(events, ControllerChanged)] == [(2, 1)]
    assert [(one.action, one.ranks) for one in of(events, Recovered)] == [("shrink", 2), ("grow", 4)]
    generations = [one.generation for one in of(events, Recovered)]
    assert generations == sorted(set(generations))
    steps = [one.step for one in of(events, Step)]
    assert steps == sorted(set(steps)), "a step was taken twice: two generations went on"


# --- fewer, and more again ---


def test_run_shrinks_to_six_and_four_ranks_and_grows_again(workshop: Workshop) -> None:
    settings = ("layout.pipeline=2", "layout.data=2", "layout.tensor=2", "cluster.nodes=4", "train.steps=140")
    reference = taken(read_events(undisturbed(workshop, *settings) / "events.jsonl"))
    faults = "kill node=3 step=10 for=15s; kill node=2 step=25 for=15s"
    victim = Victim(workshop, "disturbed", *settings, "--chaos", faults)
    events = victim.end()
    ranks = [one.ranks for one in of(events, Recovered)]
    assert ranks[:2] == [6, 4] and ranks[-1] == 8, ranks
    assert from_memory(events), "the disk was read"
    assert max(one.steps_lost for one in of(events, Recovered)) <= 1
    found = taken(events)
    assert {step: digest for step, (_, digest) in found.items()} == {step: digest for step, (_, digest) in reference.items()}
    assert max(abs(found[step][0] - reference[step][0]) for step in reference) <= 1e-5


# --- hangs ---


@pytest.mark.parametrize(
    ("where", "words"),
    [("data", "data"), ("compute", ""), ("collective", ""), ("update", "optimizer")],
)
def test_hang_is_named_and_recovered(workshop: Workshop, where: str, words: str) -> None:
    settings = ("layout.data=4", "cluster.nodes=2", "train.steps=30", "resilience.hang=5")
    reference = undisturbed(workshop, *settings)
    victim = Victim(workshop, "disturbed", *settings, "--chaos", f"hang rank=2 step=12 in={where}")
    events = victim.end()
    struck = next(event.time for event in events if type(event).__name__ == "FaultInjected")
    (failure,), (recovery,) = of(events, FailureNoticed), of(events, Recovered)
    print(failure.message)
    assert (failure.cause, failure.rank) == ("hung", 2)
    assert failure.time - struck <= 15.0
    assert "rank 2" in failure.message and words in failure.message
    assert "faults.py" in failure.traceback, "the stack of the culprit, down to where it sleeps"
    assert recovery.action == "restart" and recovery.steps_lost <= 1
    same(reference, victim.path)
