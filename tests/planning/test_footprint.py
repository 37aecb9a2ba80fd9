"""Memory against what the runtime really holds: stages against the cuts and schedules that training makes, states against ranks that
are foreseen, and what a step takes against whole rehearsals."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from planning_cases import SMALL, SPARSE, cluster, run_of

from phalanx.planning.cost.footprint import COMPONENTS, footprint, pipeline_shares
from phalanx.planning.cost.job_table import SCHEDULES, JobTable
from phalanx.planning.cost.schedule_cost import CODE, _counted
from phalanx.planning.search.space import Space, all_columns, given_space, pick
from phalanx.schedules.makers import make
from phalanx.schedules.stage_split import cut, flop_costs
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.run import Memory, Run


def jobs(run: Run, layout: Layout) -> tuple[Space, JobTable]:
    """The given layout, with what is the first of everything that is open."""
    found = given_space(replace(run, layout=layout), cluster(layout.ranks))
    return found, found.jobs(pick(all_columns(found), slice(0, 1)))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ranks", "count"), [(2, 1), (2, 6), (4, 3), (4, 4), (4, 9), (6, 12)])
def test_forwards_in_flight_equal_the_schedule_list(schedule: str, ranks: int, count: int) -> None:
    run = run_of(replace(SMALL, layers=24), count, 64)
    run = replace(run, train=replace(run.train, micro_batch=1))
    _, work = jobs(run, Layout(pipeline=ranks, data=1, schedule=schedule))  # type: ignore[arg-type]
    order = make(schedule, ranks, count)
    for share in pipeline_shares(work):
        alive, most, owing, owed = 0, 0, 0, 0
        rank = int(np.max(share.rank))
        splits = {(a.stage, a.micro_batch) for a in order.actions[rank] if a.kind == "W"}
        for action in order.actions[rank]:
            ends = action.kind in "BW" or (action.kind == "I" and (action.stage, action.micro_batch) not in splits)
            alive += (action.kind == "F") - ends
            most = max(most, alive)
            owing += (action.kind == "I") - (action.kind == "W")
            owed = max(owed, owing)
        assert float(np.max(share.in_flight)) == pytest.approx(most, abs=1), (schedule, rank)
        assert float(np.max(share.in_flight)) >= most
        assert float(np.max(share.deferred)) == pytest.approx(owed, abs=1), (schedule, rank)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (3, 1), (4, 2), (5, 3), (8, 1), (8, 4)])
@pytest.mark.parametrize("vocab", [512, 200_000])
def test_blocks_of_a_rank_are_those_that_stages_are_cut_into(ranks: int, stages: int, vocab: int) -> None:
    model = replace(SMALL, layers=37, vocab=vocab)
    layout = Layout(pipeline=ranks, data=1, schedule="interleaved-1f1b", stages=stages)
    _, work = jobs(run_of(model, 8, 64), layout)
    costs = flop_costs(model, 64)
    ranges = cut(costs.blocks, costs.first, costs.last, ranks * stages)
    for share in pipeline_shares(work):
        rank = int(np.max(share.rank))
        real = sum(stop - first for stage, (first, stop) in enumerate(ranges) if stage % ranks == rank)
        assert int(np.max(share.blocks)) == pytest.approx(real, abs=1)


STATES = [
    Layout(data=2),
    Layout(data=1, tensor=2, sequence=True),
    Layout(data=1, tensor=8),
    Layout(data=1, shard=4, zero=1),
    Layout(data=1, shard=4, zero=2),
    Layout(data=2, shard=2, zero=3),
    Layout(data=1, shard=2, zero=1, tensor=2),
    Layout(data=1, pipeline=2, tensor=2),
]
DEALT = [
    Layout(data=4, expert=4),
    Layout(data=1, shard=4, zero=1, expert=2),
    Layout(data=1, shard=4, zero=3, expert=2, expert_tensor=2),
]


@pytest.mark.parametrize(
    ("model", "layout"), [(SMALL, layout) for layout in STATES] + [(SPARSE, layout) for layout in [*STATES[:5], *DEALT]]
)
def test_states_are_those_of_a_foreseen_rank(model: ModelSpec, layout: Layout) -> None:
    from phalanx.training.build import dry_build

    run = run_of(model, 8, 64)
    _, work = jobs(run, layout)
    found = footprint(work)
    with dry_build(run, layout, int(np.max(found.fullest)) * layout.ranks // layout.pipeline) as built:
        held = built.sharded.owned
        values = sum(one.value.numel() for one in held)
        whole = {p: p.numel() * p.element_size() for part in built.sharded.parts for p in part.parameters()}
        apart = layout.shard == 1 or layout.zero < 3  # master weights of their own
        parameters = sum(whole.values()) + 4 * sum(
            one.value.numel() for one in held if apart and len(one.shard.slice.whole) > 1
        )
    assert float(np.max(found.components["optimizer"])) == pytest.approx(8 * values, rel=0.02)
    if layout.shard == 1 or apart:
        assert float(np.max(found.components["parameters"])) == pytest.approx(parameters, rel=0.02)


def test_memory_components_sum_up() -> None:
    _, work = jobs(run_of("llama3-8b", 16, 4096), Layout(data=2, shard=4))
    found = footprint(work)
    assert set(found.at(0)) == set(COMPONENTS)
    assert sum(found.at(0).values()) == pytest.approx(float(np.max(found.total)))


def test_recomputation_and_offload_take_less_memory() -> None:
    def total(layout: Layout, **memory: object) -> float:
        run = run_of("llama3-8b", 16, 4096, memory=replace(Memory(compile=False, loss_chunk=0), **memory))  # type: ignore[arg-type]
        run = replace(run, train=replace(run.train, micro_batch=1))
        found = given_space(replace(run, layout=layout), cluster(layout.ranks))
        rows = all_columns(found)
        wanted = np.flatnonzero((rows["offload"] == rows["offload"].min()) & (rows["recompute"] == rows["recompute"].min()))
        return float(np.max(np.broadcast_to(footprint(found.jobs(pick(rows, wanted))).total, 1)))

    plain = Layout(data=1, shard=8, zero=3)
    assert total(plain, recompute="full") < total(plain, recompute="selective") < total(plain)
    assert total(plain, offload="cpu") < total(plain)
    assert total(plain, loss_chunk=1024) < total(plain)
    assert total(plain) < total(replace(plain, zero=2)) < total(replace(plain, zero=1)) < total(Layout(data=8))
    assert total(Layout(data=1, tensor=8, sequence=True)) < total(Layout(data=1, tensor=8)) < total(Layout(data=8))
    assert total(Layout(data=1, context=8)) < total(Layout(data=8))


@pytest.mark.parametrize(("gpu", "table"), [("a100-sxm-80gb", False), ("v100-sxm2", True)])
def test_documents_and_grouped_heads_cost_a_table_of_scores_on_older_gpus(gpu: str, table: bool) -> None:
    run = run_of("llama3-8b", 8, 4096, layout=Layout(data=8))
    run = replace(run, precision=replace(run.precision, compute="fp16"))
    sizes = {}
    for name in (gpu, "h100-sxm"):
        found = given_space(run, cluster(8, name))
        sizes[name] = footprint(found.jobs(pick(all_columns(found), slice(0, 1)))).at(0)["activations"]
    assert (sizes[gpu] > 1.5 * sizes["h100-sxm"]) == table


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "interleaved-1f1b"])
def test_schedule_without_closed_form_is_counted_from_its_list(schedule: str) -> None:
    run = run_of(replace(SMALL, layers=24), 12, 64)
    run = replace(run, train=replace(run.train, micro_batch=1))
    _, table = jobs(run, Layout(pipeline=4, data=1, schedule=schedule))  # type: ignore[arg-type]
    for rank, expected in enumerate(make(schedule, 4, 12).forwards_in_flight):
        counted = _counted(table, rank, 0.0, lambda *key: make(*key).forwards_in_flight, codes=[CODE[schedule]])
        assert float(np.max(counted)) == expected
    assert float(np.max(_counted(table, 0, 7.0, lambda *key: make(*key).forwards_in_flight, codes=[]))) == 7.0
