"""Layouts that a run may go on with, their plans, and how often its state is copied into memory."""

from __future__ import annotations

import pytest
from ranks import tiny_run

from phalanx.control.recover import Replanner, copy_every
from phalanx.planning.planner import choose
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine, Plan, Size
from phalanx.spec.run import Run

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
def test_what_does_not_divide_is_not_legal(layout: Layout) -> None:
    found = replanner(tiny_run("layout.data=4", "cluster.cpu_ranks=4"))
    assert not found.legal(layout)
    assert found.plan(layout) is None


def test_replicas_with_states_of_their_own_are_never_fewer() -> None:
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


def test_what_the_run_file_says_about_copies_holds() -> None:
    def of(*overrides: str) -> int | None:
        run = tiny_run("layout.shard=2", "cluster.cpu_ranks=2", *overrides)
        return copy_every(run, planned(run), (0, 1))

    assert of() == 1
    assert of("checkpoint.memory_every=7") == 7
    assert of("resilience.restarts=0") is None
    assert of("resilience.restarts=0", "checkpoint.memory_every=7") == 7


def test_replicas_that_go_their_own_way_for_some_steps_do_not_stand_in_for_each_other() -> None:
    run = tiny_run("layout.data=2", "cluster.cpu_ranks=2", "optimizer.sync_every=2")
    assert copy_every(run, planned(run), (0, 1)) == 1
