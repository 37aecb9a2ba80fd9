"""Which state a run continues from after a failure: the survivors' own, replicas in memory, or a checkpoint on disk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, cast

import pytest
from controllers import OrdersKept, plan_on
from happenings import disconnected, node_lost, worker_died
from ranks import tiny_run

from phalanx.checkpointing.format import RankFile, RunMetadata
from phalanx.checkpointing.replicas import replica_index
from phalanx.checkpointing.replicas.replica_index import Replica, ReplicaState
from phalanx.checkpointing.replicas.shm_slots import RankCopy, slots_for
from phalanx.control.controller_state import Generation, Member, copy_every, no_room_for_replicas
from phalanx.control.protocol import HandedOff, HandOff, Join, Order, ReplicasDiffer, StateSource, SurvivorReport
from phalanx.control.recover import Recovery, Replanner, failure_noticed
from phalanx.planning.planner import choose
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine, Plan, Size
from phalanx.spec.run import Run

PLAN = plan_on(Layout(data=2))


class Ranks(OrdersKept):
    """A controller whose ranks carry out orders at once."""

    def __init__(self, current: Generation, covered: bool | None = True):
        """`covered`: what the survivors report about the state that they hand off; None: one dies instead."""
        super().__init__(current, token="secret", spawn=self._discard)
        self.current, self.covered = current, covered
        self.discarded = 0
        for node in (0, 1):
            self.state.members[node] = Member(cast(Join, None), ("127.0.0.1", 1000 + node), None, 0.0)

    def _discard(self, work: Coroutine[Any, Any, Any]) -> None:
        work.close()
        self.discarded += 1

    def order(self, order: Order) -> None:
        super().order(order)
        assert isinstance(order, HandOff)
        for rank in order.contributors:
            if self.covered is None:
                self.state.events.append(worker_died(rank, 8, "died", "it was killed"))
            else:
                self.current.update(HandedOff(generation=4, rank=rank, covered=self.covered))

    @property
    def hand_off(self) -> HandOff:
        """The only order."""
        (order,) = self.orders
        assert isinstance(order, HandOff)
        return order


def generation(*steps: int | None, prepared: tuple[int, ...] = ()) -> Generation:
    """The first ranks survive with the state of these steps, the rest are dead."""
    current = Generation(4, PLAN, (0, 1))
    for rank in range(2):
        if rank >= len(steps):
            current.dead.add(rank)
        else:
            ready = rank in prepared
            current.update(SurvivorReport(generation=4, rank=rank, step=steps[rank], prepared=ready, divisor=1.5, bad=0.0))
    return current


def copy_of(step: int, generation: int = 3, left_out: int = 0) -> ReplicaState:
    metadata = RunMetadata(progress={"left_out": [[0, 1]] * left_out})
    sidecar = RankFile(0, 1, []).sidecar()
    copy = RankCopy(node=0, generation=generation, rank=0, ranks=1, slot="a", step=step, sidecar=sidecar, metadata=metadata)
    return ReplicaState(generation, step, 1, ((Replica(copy, 0, ("127.0.0.1", 1000), "folder", "machine"),),))


Choose = Callable[..., tuple[str, StateSource]]


@pytest.fixture
def choose_source(monkeypatch: pytest.MonkeyPatch) -> Choose:
    """The name of the source and the source, given the replicas that the servers have."""

    def chosen(ranks: Ranks, *replicas: ReplicaState) -> tuple[str, StateSource]:
        monkeypatch.setattr(replica_index, "complete_states", lambda addresses, token: list(replicas))
        recovery = Recovery(ranks, cast(Replanner, None))
        source = asyncio.run(recovery._choose_source(ranks.current))
        return recovery._record.source, source

    return chosen


def test_survivors_that_have_everything_are_the_source(choose_source: Choose) -> None:
    ranks = Ranks(generation(8))
    name, source = choose_source(ranks, copy_of(7))
    assert (name, source.in_memory, source.generation, source.step, source.ranks) == ("live", True, 4, 8, 1)
    assert source.servers == [["127.0.0.1", 1000], ["127.0.0.1", 1001]]
    order = ranks.hand_off
    assert (order.contributors, order.newest.step) == ([0], 8)
    assert ranks.discarded == 1, "earlier hand-offs are freed"


def test_survivors_that_are_behind_get_the_values_of_the_applied_step(choose_source: Choose) -> None:
    ranks = Ranks(generation(7, 8, prepared=(0,)))
    _, source = choose_source(ranks)
    order = ranks.hand_off
    newest = order.newest
    assert (order.contributors, newest.step, newest.divisor, newest.bad, newest.rank) == ([0, 1], 8, 1.5, 0.0, 1)
    assert (source.step, source.ranks) == (8, 2)


def test_newest_replicas_are_the_source_if_survivors_lack_something(choose_source: Choose) -> None:
    ranks = Ranks(generation(8), covered=False)
    name, source = choose_source(ranks, copy_of(6), copy_of(7), copy_of(5, generation=4))
    assert (name, source.generation, source.step, source.ranks) == ("memory", 3, 7, 1)
    assert ranks.discarded == 0


def test_replicas_ahead_of_the_survivors_are_preferred(choose_source: Choose) -> None:
    """As after a death during a restore: ranks that had begun from the beginning have an older state."""
    assert choose_source(Ranks(generation(3)), copy_of(7))[1].step == 7


def test_states_abandoned_by_a_rollback_are_not_used(choose_source: Choose) -> None:
    assert choose_source(Ranks(generation(8), covered=False), copy_of(9), copy_of(5, left_out=1))[1].step == 5


def test_disk_is_the_source_without_anything_in_memory(choose_source: Choose) -> None:
    for ranks in (
        Ranks(generation(8), covered=False),
        Ranks(generation(None)),
        Ranks(generation()),
        Ranks(generation(8), None),
    ):
        assert choose_source(ranks) == ("disk", StateSource(in_memory=False))


@pytest.mark.parametrize("culprits", [[], [1]])
def test_only_states_before_a_corruption_are_used(
    choose_source: Choose, culprits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of every rank is wrong from the first update with gradients of wrong weights on, whoever had them."""
    forgotten: list[int] = []
    monkeypatch.setattr(replica_index, "discard", lambda servers, token, *, after: forgotten.append(after))
    current = generation(9, 9)
    current.update(ReplicasDiffer(generation=4, rank=0, culprits=culprits, what="weights", last_valid=6, reason="they differ"))
    name, source = choose_source(Ranks(current), copy_of(6), copy_of(8))
    assert (name, source.step, source.newest_step) == ("memory", 6, 6)
    assert choose_source(Ranks(current), copy_of(8)) == ("disk", StateSource(in_memory=False, newest_step=6))
    assert forgotten == [6, 6], "a later failure would restore step 8"


def test_failure_records_name_rank_and_node() -> None:
    current = generation(8)
    died = failure_noticed(1, worker_died(1, 8, "died", "it was killed"), current)
    assert (died.message, died.rank, died.node, died.step) == ("rank 1 (node 1): it was killed", 1, 1, 8)
    lost = failure_noticed(2, node_lost(1, 8, "node 1: no sign of life for 2.6 s"), current)
    assert (lost.cause, lost.node, lost.message) == ("node lost", 1, "node 1: no sign of life for 2.6 s")
    cut = failure_noticed(3, disconnected(8, "rank 0 lost its connection"), current)
    assert (cut.cause, cut.rank) == ("connection lost", None)


MACHINE = Machine(host="here", cpu="some", cores=8, memory=64 << 30)


def planned(run: Run, layout: Layout | None = None) -> Plan:
    count = run.model.parameters()
    size = Size(parameters=count, active=count, flops_per_token=run.model.flops_per_token(run.train.sequence_length))
    plan = choose(run, MACHINE, size=size)
    assert layout is None or plan.layout == layout
    return plan


def replanner(run: Run) -> Replanner:
    return Replanner(run, planned(run), lambda: MACHINE)


def test_the_batch_stays_the_same_on_fewer_ranks() -> None:
    run = tiny_run("train.batch=24", "train.micro_batch=1", "layout.data=4", "layout.pipeline=2", "cluster.cpu_ranks=8")
    found = replanner(run)
    for layout in (Layout(pipeline=2, data=4), Layout(pipeline=2, data=3), Layout(pipeline=2, data=2), Layout(data=1)):
        plan = found.plan(layout)
        assert plan is not None and plan.layout == layout
        assert plan.micro_batch * plan.accumulation * layout.replicas == 24
    assert found.plan(Layout(pipeline=2, data=4)) == planned(run)


def test_a_micro_batch_that_no_longer_divides_a_replicas_share_gives_way() -> None:
    run = tiny_run("train.batch=12", "train.micro_batch=2", "layout.data=3", "cluster.cpu_ranks=3")
    plan = replanner(run).plan(Layout(data=4))
    assert plan is not None and (plan.micro_batch, plan.accumulation) == (1, 3)
    assert (planned(run).micro_batch, planned(run).accumulation) == (2, 2)


@pytest.mark.parametrize("layout", [Layout(data=5), Layout(tensor=3), Layout(pipeline=4)])
def test_layouts_that_do_not_divide_the_run_are_not_legal(layout: Layout) -> None:
    found = replanner(tiny_run("layout.data=4", "cluster.cpu_ranks=4"))
    assert not found.legal(layout)
    assert found.plan(layout) is None


def test_diverged_replicas_are_never_dropped() -> None:
    found = replanner(tiny_run("layout.data=4", "cluster.cpu_ranks=4", "optimizer.sync_every=2"))
    assert found.legal(Layout(data=4))
    assert not found.legal(Layout(data=2))


EXPERTS = ("model.moe.experts=4", "model.moe.active=2", "model.moe.ffn=32")


@pytest.mark.parametrize(
    ("layout", "assignment", "every"),
    [
        (Layout(data=2), (0, 1), None),
        (Layout(data=2), (0, 0), None),  # one node: its loss is the end anyway
        (Layout(), (0,), 1),
        (Layout(data=4), (0, 0, 1, 1), None),
        (Layout(data=2, tensor=2), (0, 0, 1, 1), None),
        (Layout(pipeline=2, data=2), (0, 0, 1, 1), 1),  # each node has a stage to itself
        (Layout(pipeline=2, data=2), (0, 1, 0, 1), None),
        (Layout(shard=4), (0, 0, 1, 1), 1),
        (Layout(data=2, shard=2), (0, 0, 1, 1), None),
        (Layout(data=2, shard=2), (0, 1, 0, 1), 1),
        (Layout(tensor=2, pipeline=2), (0, 1, 2, 3), 1),
        (Layout(data=2, expert=2), (0, 1), 1),  # each has experts that the other has not
        (Layout(data=4, expert=2), (0, 0, 1, 1), None),
        (Layout(data=4, expert=2), (0, 1, 0, 1), 1),
    ],
)
def test_copies_are_taken_where_a_lost_rank_or_node_would_take_state_with_it(
    layout: Layout, assignment: tuple[int, ...], every: int | None
) -> None:
    degrees = {name: getattr(layout, name) for name in ("pipeline", "data", "shard", "context", "tensor", "expert")}
    model = EXPERTS if layout.expert > 1 else ()
    run = tiny_run(*model, *(f"layout.{name}={degree or 1}" for name, degree in degrees.items()), "cluster.cpu_ranks=4")
    plan = planned(run)
    assert copy_every(run, plan, assignment) == every


def test_memory_every_of_the_run_file_overrides_the_default() -> None:
    def of(*overrides: str) -> int | None:
        run = tiny_run("layout.shard=2", "cluster.cpu_ranks=2", *overrides)
        return copy_every(run, planned(run), (0, 1))

    assert of() == 1
    assert of("checkpoint.memory_every=7") == 7
    assert of("resilience.restarts=0") is None
    assert of("resilience.restarts=0", "checkpoint.memory_every=7") == 7


def test_diverged_replicas_need_copies_in_memory() -> None:
    run = tiny_run("layout.data=2", "cluster.cpu_ranks=2", "optimizer.sync_every=2")
    assert copy_every(run, planned(run), (0, 1)) == 1


@pytest.mark.parametrize(("engine", "every", "slots"), [("torch", None, 3), ("xla", 1, 2)])
def test_processes_that_do_not_survive_need_copies_in_memory(engine: str, every: int | None, slots: int) -> None:
    """Those of the XLA engine, whose replicas nobody compares."""
    run = tiny_run("layout.data=2", "cluster.cpu_ranks=2", f"engine.name={engine}")
    plan = planned(tiny_run("layout.data=2", "cluster.cpu_ranks=2"))
    assert (copy_every(run, plan, (0, 0)), len(slots_for(run, plan.layout))) == (every, slots)


def test_too_little_memory_for_the_default_copies_is_said_with_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*overrides: str) -> str | None:
        run = tiny_run("layout.shard=2", "cluster.cpu_ranks=2", *overrides)
        return no_room_for_replicas(run, replace(planned(run), parameters=1_000_000_000), (0, 1))

    monkeypatch.setattr("phalanx.checkpointing.replicas.shm_slots.default_room", lambda: 20 * 2**30)
    sentence = said()
    assert sentence is not None and "copies of 1,000.0 M parameters take 22,888 MiB on a node" in sentence
    assert "room for 20,480: a lost rank costs all steps since the last checkpoint" in sentence
    assert said("checkpoint.memory_every=7") is None, "a run that asks for copies is refused before its start"
    assert said("resilience.restarts=0") is None
    monkeypatch.setattr("phalanx.checkpointing.replicas.shm_slots.default_room", lambda: 24 * 2**30)
    assert said() is None
