"""Several processes of the XLA engine: which samples each reads, what is refused, and that the supervisors replace them all after a failure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import Workshop, losses
from xla_engine import needs_xla, on_torch, plan_of, small_run

from phalanx.events.records import Copied, FailureNoticed, Recovered, Step, Stopped, WorkerStarted
from phalanx.faults.grammar import parse, program_problems
from phalanx.planning.planner import devices_per_process
from phalanx.spec.check import check
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout

pytestmark = needs_xla

ON_FOUR = ("engine.name=xla", "cluster.cpu_ranks=4", "layout.shard=2", "layout.tensor=2")
ON_TWO_PROCESSES = (*ON_FOUR, "engine.devices_per_process=2")
SAVED_LAST = "checkpoint.every=1000"


def test_each_process_reads_the_samples_of_its_devices() -> None:
    """Every sample is counted by one process, also where a replica is on several, and where processes lie across each other."""
    from phalanx.xla.global_feed import ReplicaBlock

    cases = {
        "a replica each": ([[0, 0], [1, 1]], [(0, 2, True), (1, 2, True)]),
        "two replicas each": ([[0], [0], [1], [1]], [(0, 2, True), (1, 2, True)]),
        "half a replica each": ([[0, 1], [2, 3]], [(0, 2, True), (0, 2, False), (1, 2, True), (1, 2, False)]),
        "across": ([[0], [1], [1], [0]], [(0, 1, True), (0, 1, False)]),
    }
    for name, (rows, expected) in cases.items():
        found = [ReplicaBlock.among(np.array(rows), own) for own in range(len(expected))]
        assert [(block.index, block.count, block.counts) for block in found] == expected, name


def test_processes_are_planned_by_host() -> None:
    """All devices of a host in one process, or as many as the run file says; what does not come out even is refused."""
    run = small_run(Layout(data=2, shard=2, tensor=2), 1)
    on_two_hosts = replace(run, cluster=replace(run.cluster, nodes=2))
    assert [devices_per_process(run, 8), devices_per_process(on_two_hosts, 8)] == [8, 4]
    with pytest.raises(RunError, match=r"cluster\.nodes = 2: 3 devices do not divide among 2 hosts"):
        devices_per_process(on_two_hosts, 3)
    of_three = small_run(Layout(data=2, shard=2, tensor=2), 1, each=3)
    with pytest.raises(RunError, match=r"engine\.devices_per_process = 3 does not divide the 8 devices of the host"):
        devices_per_process(of_three, 8)
    (problem,) = check(replace(on_torch(run), engine=replace(run.engine, name="torch", devices_per_process=2)))
    assert "the torch engine has a process for each device" in problem
    plan = plan_of(small_run(Layout(data=2, shard=2, tensor=2), 1, each=2))
    assert (plan.ranks, plan.processes, plan.process_layout) == (8, 4, Layout(data=4))


def test_faults_that_reach_into_a_compiled_step_are_refused() -> None:
    assert program_problems(parse("kill rank=0 step=3; hang rank=1 step=2; slow rank=0 x2; random rate=0.1 kinds=kill")) == []
    nan, drawn = program_problems(parse("nan rank=0 step=3; random rate=0.1"))
    assert "nan cannot reach into a compiled step" in nan and "kinds=" in drawn


@pytest.fixture
def workshop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workshop]:
    # What LLVM makes of a program for one CPU is not looked at, and takes a third of the time.
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=0")
    made = Workshop(tmp_path / "shop")
    yield made
    made.close()


def check_losses(workshop: Workshop, broken: str, unbroken: str) -> None:
    """Every step of the broken run, repeated ones too, has the loss and the samples of the unbroken one."""
    expected = {step: (loss, digest) for step, loss, digest in losses(workshop.events(unbroken))}
    found = losses(workshop.events(broken))
    assert {step for step, *_ in found} == expected.keys()
    for step, loss, digest in found:
        assert (pytest.approx(loss, rel=1e-5), digest) == expected[step], step


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill rank=0 step=6", "kill rank=1 step=6", "raise rank=1 step=7 in=data"])
def test_a_lost_process_leads_to_a_new_generation(workshop: Workshop, fault: str) -> None:
    """From the copies in memory, with other processes, and without anybody's help. Only what failed itself is called a failure."""
    workshop.train("--run-dir", "plain")
    workshop.train(*ON_TWO_PROCESSES, SAVED_LAST, "--chaos", fault, "--run-dir", "broken")
    events = workshop.events("broken")
    (recovered,) = [event for event in events if isinstance(event, Recovered)]
    assert (recovered.source, recovered.ranks, recovered.generation) == ("memory", 2, 1)
    assert recovered.steps_lost <= 1 and recovered.step + recovered.steps_lost == int(fault.split("step=")[1][0]) - 1
    (failure,) = [event for event in events if isinstance(event, FailureNoticed)]
    assert failure.rank == int(fault.split("rank=")[1][0])
    assert len({event.pid for event in events if isinstance(event, WorkerStarted)}) == 4
    check_losses(workshop, "broken", "plain")
    assert workshop.run("checkpoint", "verify", "broken/checkpoints/step-00000008").code == 0


@pytest.mark.slow
def test_a_process_for_all_devices_is_started_again(workshop: Workshop) -> None:
    workshop.train("--run-dir", "plain")
    workshop.train(*ON_FOUR, SAVED_LAST, "--chaos", "kill rank=0 step=6", "--run-dir", "broken")
    (recovered,) = [event for event in workshop.events("broken") if isinstance(event, Recovered)]
    assert recovered.source == "memory" and recovered.steps_lost <= 1
    check_losses(workshop, "broken", "plain")


@pytest.mark.slow
def test_a_checkpoint_that_is_newer_than_the_copies_is_restored(workshop: Workshop) -> None:
    workshop.train("--run-dir", "plain")
    workshop.train(*ON_FOUR, "checkpoint.memory_every=3", "--chaos", "kill rank=0 step=6", "--run-dir", "broken")
    events = workshop.events("broken")
    assert next(event.step for event in events if isinstance(event, Copied)) == 3
    (recovered,) = [event for event in events if isinstance(event, Recovered)]
    assert (recovered.source, recovered.step, recovered.steps_lost) == ("disk", 4, 1)
    check_losses(workshop, "broken", "plain")


@pytest.mark.slow
def test_fewer_hosts_continue_from_the_copies_of_the_lost_one(workshop: Workshop) -> None:
    """The first process has written all of the state, as the second one holds the same; only its neighbor's copy of it is left."""
    layout = ("engine.name=xla", "cluster.nodes=2", "cluster.cpu_ranks=4", "layout.data=2", "layout.tensor=2")
    workshop.train("--run-dir", "plain")
    workshop.train(*layout, SAVED_LAST, "--chaos", "kill node=0 step=6", "--run-dir", "broken")
    events = workshop.events("broken")
    (recovered,) = [event for event in events if isinstance(event, Recovered)]
    assert (recovered.action, recovered.source, recovered.ranks) == ("shrink", "memory", 1) and recovered.steps_lost <= 1
    check_losses(workshop, "broken", "plain")


@pytest.mark.slow
def test_a_hanging_process_is_replaced(workshop: Workshop) -> None:
    workshop.train("--run-dir", "plain")
    workshop.train(*ON_TWO_PROCESSES, "resilience.hang=10", "--chaos", "hang rank=1 step=6", "--run-dir", "broken")
    failures = [event for event in workshop.events("broken") if isinstance(event, FailureNoticed)]
    assert [failure.cause for failure in failures] == ["hung"]
    check_losses(workshop, "broken", "plain")


@pytest.mark.slow
def test_a_run_on_two_nodes_stops_on_request(workshop: Workshop) -> None:
    """Commands of a running job reach processes of the XLA engine as they reach ranks."""
    started = workshop.start("train", "tiny.toml", *ON_FOUR, "cluster.nodes=2", "train.steps=2000", "--run-dir", "run")
    started.until(workshop.reached("run", 6), "step 6")
    assert "2,000" in workshop.run("top", "run", "--once").out
    assert workshop.run("stop", "run").code == 0
    assert "Stopped and saved" in started.wait().out
    (stopped,) = [event for event in workshop.events("run") if isinstance(event, Stopped)]
    assert stopped.saved and stopped.step >= 6


ENGINES = {
    "torch": ("cluster.cpu_ranks=2", "layout.shard=2"),
    "one": ("engine.name=xla", "cluster.cpu_ranks=2", "layout.tensor=2"),
    "two": ON_TWO_PROCESSES,
}


@pytest.mark.slow
def test_every_order_of_engines_and_processes(workshop: Workshop) -> None:
    """Each engine follows each other one. Everything is killed in between, in the middle of a step, or of a save."""
    short = ("checkpoint.every=2", "checkpoint.keep_last=20", "train.steps=21", "train.eval_every=21")
    workshop.train(*short, "--run-dir", "plain")
    for number, name in enumerate(("torch", "one", "two", "torch", "two", "one", "torch")):
        until, arguments = 3 * (number + 1), ("train", "tiny.toml", *short, *ENGINES[name], "--run-dir", "broken")
        started = workshop.start(*arguments)
        if until < 21:
            started.until(workshop.reached("broken", until), f"step {until} with {name}")
            started.process.kill()
            started.process.wait()
            assert workshop.gone()
        else:
            assert started.wait().code == 0
    check_losses(workshop, "broken", "plain")
    assert max(event.step for event in workshop.events("broken") if isinstance(event, Step)) == 21
    for checkpoint in sorted((workshop.path / "broken" / "checkpoints").glob("step-????????")):
        assert workshop.run("checkpoint", "verify", str(checkpoint)).code == 0, checkpoint
