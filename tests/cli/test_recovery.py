"""Runs that lose ranks and nodes go on by themselves, and end as if nothing had happened."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import killing
import pytest
from commands import Workshop

from phalanx.events.records import (
    ControllerChanged,
    Copied,
    Corrupted,
    Event,
    FailureNoticed,
    HostRejected,
    HostsChecked,
    Recovered,
    Restored,
    Step,
    Warned,
    WorkerFailed,
)

SIZES = (
    "model.kv_heads=2",
    "model.layers=2",
    "train.batch=4",
    "train.micro_batch=1",
    "train.steps=24",
    "train.eval_every=100",
    "resilience.heartbeat=30",
)
FOUR = (*SIZES, "layout.data=2", "layout.tensor=2")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, workshop_type: type[Workshop]) -> Iterator[Callable[..., Path]]:
    """The directory of such a run that nothing happened to; each is trained once, as one node."""
    shop = workshop_type(tmp_path_factory.mktemp("undisturbed") / "workshop")
    done: dict[tuple[str, ...], Path] = {}

    def of(*overrides: str) -> Path:
        if overrides not in done:
            name = f"run-{len(done)}"
            shop.train(*overrides, "--run-dir", name)
            done[overrides] = shop.path / name
        return done[overrides]

    yield of
    shop.close()


def disturbed(workshop: Workshop, *arguments: str, env: Mapping[str, str] | None = None) -> list[Event]:
    """Train to the end, whatever happens; nothing may be left of it afterwards."""
    workshop.train(*arguments, "--run-dir", "run", env=env)
    path = workshop.path / "run"
    assert list(path.rglob("*.partial")) == []
    known = hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:8]
    assert list(Path(f"/dev/shm/phalanx-{os.getuid()}").glob(f"{known}-*")) == [], "copies were left in memory"
    assert workshop.gone()
    return list(workshop.events("run"))


def last_steps(events: list[Event]) -> dict[int, tuple[float, str]]:
    return {event.step: (event.loss, event.batch_digest) for event in events if isinstance(event, Step)}


def of(events: list[Event], kind: type[Event]) -> list[Any]:
    return [event for event in events if isinstance(event, kind)]


def close(path: Path, events: list[Event], kind: Any) -> None:
    """The same tokens in every step, and the same loss but for the order in which sums are taken."""
    from phalanx.events.log import read_events

    expected, found = last_steps(read_events(path / "events.jsonl")), last_steps(events)
    assert {step: digest for step, (_, digest) in found.items()} == {step: digest for step, (_, digest) in expected.items()}
    assert {step: loss for step, (loss, _) in found.items()} == kind({step: loss for step, (loss, _) in expected.items()})


def exactly(value: Any) -> Any:
    return value


def nearly(value: Any) -> Any:
    return pytest.approx(value, abs=1e-5)


COUNT_TRAINERS = """
import weakref
from phalanx.training import trainer
made, init = [], trainer.Trainer.__init__
def counted(self, *args, **kwargs):
    print("earlier trainers:", sum(one() is not None for one in made))
    made.append(weakref.ref(self))
    init(self, *args, **kwargs)
trainer.Trainer.__init__ = counted
"""
"""A survivor frees its state before it allocates that of the next generation."""


def test_dead_and_failed_ranks_do_not_change_the_losses(workshop: Workshop, undisturbed: Callable[..., Path]) -> None:
    faults = (
        "kill rank=3 step=1; kill rank=1 step=5; raise rank=2 step=9 in=collective; kill rank=0 step=13 during=update; "
        "kill rank=0 step=17; kill rank=3 step=17; kill rank=1 step=24 during=evaluate"
    )
    events = disturbed(workshop, *FOUR, "cluster.nodes=2", "--chaos", faults, env=workshop.sabotage(COUNT_TRAINERS))
    close(undisturbed(*FOUR), events, exactly)
    killing.equal(undisturbed(*FOUR), workshop.path / "run")
    logs = "".join(path.read_text() for path in (workshop.path / "run/logs").glob("rank-?.log"))
    assert set(re.findall("earlier trainers: .*", logs)) == {"earlier trainers: 0"}, "a GPU has no room for two"
    failures, recoveries = of(events, FailureNoticed), of(events, Recovered)
    assert {(one.rank, one.cause) for one in failures} == {(0, "died"), (1, "died"), (2, "failed"), (3, "died")}
    assert sorted(number for one in recoveries for number in one.failures) == list(range(1, len(failures) + 1))
    assert {(one.action, one.ranks) for one in recoveries} == {("restart", 4)}
    assert {one.source for one in recoveries[1:]} == {"live"} and {one.steps_lost for one in recoveries} == {0}
    assert "Injected" in next(one.traceback for one in failures if one.cause == "failed")


@pytest.mark.slow
def test_recovery_without_replicas_restores_memory_copies(workshop: Workshop, undisturbed: Callable[..., Path]) -> None:
    settings = (*SIZES, "layout.shard=2", "layout.zero=2")
    faults = "kill rank=0 step=7; kill node=1 step=15"
    events = disturbed(workshop, *settings, "cluster.nodes=2", "--chaos", faults)
    close(undisturbed(*settings), events, nearly)
    first, second = of(events, Recovered)
    assert (first.action, first.source, first.ranks) == ("restart", "memory", 2)
    assert (second.action, second.source, second.ranks) == ("shrink", "memory", 1)
    assert first.steps_lost <= 1 and second.steps_lost <= 1
    assert all(one.path.startswith("memory") for one in of(events, Restored)), "the disk was read"


AS_ON_GPUS = """
import time
from phalanx.training import micro_batch, saving
copies, batches = saving._memory_copies, micro_batch.BatchFeed.next
def paced(run, plan, mesh):
    made = copies(run, plan, mesh)
    made.pace, made._patient = saving.CopyPace(saving._DEFAULT_COPY_SHARE), False
    return made
def slow(self, samples):
    time.sleep(0.2)
    return batches(self, samples)
saving._memory_copies, micro_batch.BatchFeed.next = paced, slow
"""
"""Copies take half a percent of the time, of steps of 0.2 s."""


def test_a_rank_lost_early_does_not_send_the_run_back_to_its_beginning(workshop: Workshop) -> None:
    words = (*SIZES, "train.steps=13", "layout.shard=2", "layout.zero=2", "--chaos", "kill rank=1 step=12")
    events = disturbed(workshop, *words, env=workshop.sabotage(AS_ON_GPUS))
    (recovery,) = of(events, Recovered)
    assert (recovery.action, recovery.source) == ("restart", "memory")
    assert recovery.step >= 1 and recovery.steps_lost == 11 - recovery.step < 10, recovery
    (failure,) = of(events, FailureNoticed)
    assert recovery.step == of(events[: events.index(failure)], Copied)[-1].step


def test_controller_loss_elects_another_node_and_a_spare_joins(workshop: Workshop, undisturbed: Callable[..., Path]) -> None:
    spare = ("cluster.nodes=3", "resilience.spares=1")
    events = disturbed(workshop, *FOUR, *spare, "--chaos", "kill node=0 step=8")
    close(undisturbed(*FOUR), events, exactly)
    killing.equal(undisturbed(*FOUR), workshop.path / "run")
    assert [(one.term, one.node) for one in of(events, ControllerChanged)] == [(2, 1)]
    assert {(one.cause, one.node) for one in of(events, FailureNoticed)} == {("node lost", 0)}
    (recovery,) = of(events, Recovered)
    assert (recovery.action, recovery.source, recovery.ranks, recovery.steps_lost) == ("spare", "live", 4, 0)
    assert all(one.path.startswith("memory") for one in of(events, Restored)), "the disk was read"


@pytest.mark.parametrize("source", [pytest.param("memory", marks=pytest.mark.slow), "disk"])
def test_corruption_between_two_checks_is_undone(workshop: Workshop, undisturbed: Callable[..., Path], source: str) -> None:
    """Found in step 10, before it is applied. Until then, gradients computed with the wrong weights have changed everybody's state."""
    copies = ("checkpoint.memory_every=1",) if source == "memory" else ()
    four, settings = (*SIZES, "layout.data=4"), ("resilience.check_every=5", "checkpoint.every=3", *copies)
    events = disturbed(workshop, *four, *settings, "--chaos", "corrupt rank=2 step=6")
    close(undisturbed(*four), events, exactly)
    killing.equal(undisturbed(*four), workshop.path / "run")
    assert [(one.step, one.rank, one.what) for one in of(events, Corrupted)] == [(10, 2, "weights")]
    (recovery,) = of(events, Recovered)
    assert (recovery.source, recovery.step) == (source, 4 if source == "memory" else 3)


@pytest.mark.slow  # tests/clusters/test_cut_links.py does it with cables
def test_controller_that_is_cut_off_leaves_the_run_to_the_others(workshop: Workshop, undisturbed: Callable[..., Path]) -> None:
    faults = "drop-link 0-1 step=8 for=600s; drop-link 0-2 step=8 for=600s"
    events = disturbed(workshop, *FOUR, "cluster.nodes=3", "resilience.spares=1", "--chaos", faults)
    close(undisturbed(*FOUR), events, exactly)
    assert [(one.term, one.node) for one in of(events, ControllerChanged)] == [(2, 1)]
    assert {(one.cause, one.node) for one in of(events, FailureNoticed)} == {("node lost", 0)}
    (recovery,) = of(events, Recovered)
    assert (recovery.action, recovery.source, recovery.ranks, recovery.steps_lost) == ("spare", "live", 4, 0)


@pytest.mark.slow
def test_a_node_that_computes_wrongly_gets_no_ranks(workshop: Workshop) -> None:
    words = (*SIZES, "train.steps=3", "layout.data=2")
    shop = ("cluster.nodes=3", "resilience.spares=1", "--chaos", "miscompute node=0")
    events = disturbed(workshop, *words, *shop)
    kinds = [type(event) for event in events]
    assert kinds.index(HostsChecked) < kinds.index(HostRejected) < kinds.index(Step)
    (rejected,) = (event for event in events if isinstance(event, HostRejected))
    assert rejected.node == 0 and "computes wrongly: 1 of the numbers" in rejected.message
    assert not any(isinstance(event, FailureNoticed | Warned) for event in events)
    shown = workshop.run("status", "run")
    assert "checked 3 hosts in" in shown.shown and "1 rejected" in shown.shown and "host rejected: CPU of " in shown.shown
    assert list(workshop.run("status", "run", "--json").json["rejected"].values()) == [rejected.message]
    refused = workshop.run(
        "train", "tiny.toml", *words, "resilience.shrink=false", "cluster.nodes=2", "--run-dir", "other", *shop[2:]
    )
    assert refused.code == 1 and "The run cannot start without hosts that failed the check" in refused.err
    assert not any(isinstance(event, Step) for event in workshop.events("other"))


def test_recovery_gives_up_on_repeated_failures(workshop: Workshop) -> None:
    """The same exception at the same step, from the program itself, in each attempt."""
    code = """
from phalanx.training.micro_batch import BatchFeed
kept = BatchFeed.next
def fail(self, samples):
    if samples >= 20:
        raise ValueError("no such sample")
    return kept(self, samples)
BatchFeed.next = fail
"""
    env = workshop.sabotage(code)
    one = (*SIZES, "cluster.cpu_ranks=1", "layout.data=1")
    ended = workshop.run("train", "tiny.toml", *one, "--run-dir", "thrice", env=env)
    events = workshop.events("thrice")
    assert ended.code == 1, ended
    assert [(one.cause, one.step) for one in of(events, FailureNoticed)] == [("failed", 5)] * 3
    (failed,) = of(events, WorkerFailed)
    assert "The same failure came 3 times after step 5" in failed.reason and "ValueError: no such sample" in failed.reason
    ended = workshop.run("train", "tiny.toml", *one, "resilience.restarts=0", "--run-dir", "once", env=env)
    events = workshop.events("once")
    assert ended.code == 1 and "ValueError: no such sample" in ended.err, ended
    assert len(of(events, FailureNoticed)) == 1 and not of(events, Recovered)
    assert not of(events, Warned)
