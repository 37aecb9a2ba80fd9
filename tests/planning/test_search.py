"""The search against judging every layout, and what must hold of any honest one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from planning_cases import SMALL, SPARSE, cluster, run_of, with_memory

from phalanx.planning.cost.footprint import footprint
from phalanx.planning.cost.step_time import step_times
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.planner import search
from phalanx.planning.search.alternatives import neighbours
from phalanx.planning.search.bounds import NEAR, Explorer, bytes_of, smallest
from phalanx.planning.search.search import Limits, capacity_of, judge, rates_of
from phalanx.planning.search.space import all_columns, space
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.run import Memory, Run

WIDE = replace(SMALL, dim=2048, heads=16, layers=12, vocab=32000)
DEEP = replace(SPARSE, dim=2048, heads=16, layers=8, vocab=32000, moe=replace(SPARSE.moe, ffn=2048) if SPARSE.moe else None)


def brute(run: Run, hardware: Hardware) -> tuple[float, int]:
    """Seconds of the quickest layout that fits, of all of them, and how many there are."""
    found = space(run, hardware)
    columns = all_columns(found)
    work = found.jobs(columns)
    seconds = np.broadcast_to(step_times(work, rates_of(run, hardware)).step, len(columns["pipeline"]))
    fits = np.broadcast_to(footprint(work).total <= capacity_of(hardware), len(seconds))
    return float(np.min(np.where(fits, seconds, np.inf))), len(seconds)


CASES = [
    (run_of(WIDE, 32, 512), cluster(8)),
    (run_of(WIDE, 32, 2048), with_memory(cluster(16), 8 * 2**30)),
    (run_of(WIDE, 16, 2048), with_memory(cluster(16), 3 * 2**30)),
    (run_of(WIDE, 12, 2048), with_memory(cluster(12, node=4, island=4), 4 * 2**30)),
    (run_of(DEEP, 16, 512), cluster(8)),
    (run_of(DEEP, 8, 2048), with_memory(cluster(8), 6 * 2**30)),
    (run_of("llama3-8b", 16, 4096), cluster(4, network=2e9, island_bandwidth=20e9)),
    (run_of(WIDE, 16, 512, memory=Memory(recompute="full")), with_memory(cluster(8), 6 * 2**30)),
    (run_of(WIDE, 16, 512, layout=Layout(tensor=2)), cluster(8)),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_search_finds_the_fastest_of_all_layouts(case: int) -> None:
    run, hardware = CASES[case]
    expected, count = brute(run, hardware)
    explorer = Explorer(space(run, hardware), rates_of(run, hardware))
    front = explorer.best(capacity_of(hardware))
    assert explorer.count == count
    if np.isinf(expected):
        assert not len(front.seconds)
        return
    assert front.seconds[0] == pytest.approx(expected, rel=1e-12)
    found = search(run, hardware)
    assert found.best.seconds <= NEAR * expected * (1 + 1e-12)
    assert found.considered == count


def test_what_fits_only_with_the_best_cut_of_stages_is_found() -> None:
    run = run_of("llama3-70b", 64, 8192)
    here = space(run, cluster(8))
    need, row = smallest(here)
    assert row["stages"][0] > 1
    front = Explorer(here, rates_of(run, here.hardware)).best(need)
    assert len(front.seconds) and bytes_of(here, front.columns)[0] <= need


def test_search_keeps_the_best_of_the_first_beam() -> None:
    """A bound that is too high for a layout must not drop it: what adding up gradients takes differs between shards and replicas."""
    run = run_of(DEEP, 16, 2048)
    here = space(run, cluster(8))
    rates = replace(rates_of(run, here.hardware), adding=50.0)
    explorer = Explorer(here, rates)
    found, first = explorer.best(1e12), explorer.glimpse(1e12)
    work = here.jobs(all_columns(here))
    every = np.broadcast_to(step_times(work, rates).step, explorer.count)
    assert found.seconds[0] == pytest.approx(float(every.min()), rel=1e-12) and found.seconds[0] <= first.seconds[0]


def test_judging_the_winner_gives_the_winner() -> None:
    for run, hardware in CASES[:2]:
        best = search(run, hardware).best
        given = replace(
            run,
            layout=best.layout,
            memory=best.with_savings(run.memory),
            train=replace(run.train, micro_batch=best.micro_batch),
        )
        judged = judge(given, hardware)
        assert judged.layout == best.layout
        assert judged.seconds == pytest.approx(best.seconds)
        assert judged.memory == pytest.approx(best.memory)


def test_judging_an_illegal_layout_says_why() -> None:
    with pytest.raises(RunError, match=r"does not divide model\.heads"):
        judge(run_of(SMALL, 16, 64, layout=Layout(tensor=3)), cluster(6))


def test_judging_what_does_not_fit_tells_what_it_would_take() -> None:
    option = judge(run_of("llama3-70b", 64, 4096, layout=Layout(tensor=8)), cluster(8))
    assert not option.fits
    assert option.bytes > option.capacity


def test_more_memory_is_never_slower_and_a_faster_network_neither() -> None:
    run = run_of(WIDE, 32, 2048)
    sizes = [search(run, with_memory(cluster(16), gib * 2**30)).best.seconds for gib in (4, 6, 40)]
    assert all(later <= earlier * NEAR for earlier, later in pairwise(sizes))
    assert sizes[-1] < sizes[0]
    speeds = [search(run, cluster(16, network=network)).best.seconds for network in (1e9, 100e9)]
    assert all(later <= earlier * NEAR for earlier, later in pairwise(speeds))
    assert speeds[-1] < speeds[0]


def test_runners_up_differ_in_their_degrees_and_are_no_quicker() -> None:
    found = search(run_of("llama3-8b", 16, 4096), cluster(16))
    degrees = [
        (o.layout.pipeline, o.layout.replicas, o.layout.context, o.layout.tensor) for o in (found.best, *found.runners_up)
    ]
    assert len(set(degrees)) == len(degrees) > 5
    assert all(found.best.seconds <= other.seconds * NEAR for other in found.runners_up)
    assert [option.bytes for option in found.curve] == sorted(option.bytes for option in found.curve)
    assert [option.seconds for option in found.curve] == sorted((option.seconds for option in found.curve), reverse=True)


def test_alternatives_reasons_follow_from_numbers() -> None:
    found = search(run_of("llama3-70b", 512, 4096), cluster(256))
    reasons = {one.name: one for one in found.alternatives}
    assert len(reasons) > 10
    for one in reasons.values():
        if one.candidate is None:
            assert one.reason.startswith("not legal: ")
        elif not one.candidate.fits:
            assert one.reason == f"needs {one.candidate.bytes / 2**30:.1f} GiB of {one.candidate.capacity / 2**30:.1f}"
        elif (one.candidate.compute, one.candidate.compiled) == ("bf16", False):  # others the search was not free to take
            assert one.candidate.seconds >= found.best.seconds / NEAR
    odd, hardware = run_of(replace(WIDE, heads=10, kv_heads=2, dim=1280), 8, 128, layout=Layout(tensor=2, data=4)), cluster(8)
    others = neighbours(space(odd, hardware), rates_of(odd, hardware), judge(odd, hardware))
    illegal = {one.name: one.reason for one in others if one.candidate is None}
    assert illegal["TP4"] == "not legal: layout.tensor = 4 does not divide model.heads = 10"


def test_fewer_devices_are_taken_where_all_cannot_be_used() -> None:
    found = search(run_of(SMALL, 12, 64), cluster(7))
    assert found.best.layout.ranks == 6


def test_search_respects_memory_deadline_and_budget() -> None:
    run, hardware = run_of("llama3-8b", 8, 4096), cluster(8)
    free = search(run, hardware)
    tight = search(run, hardware, limits=Limits(fits_in=40 * 2**30))
    assert tight.best.bytes <= 40 * 2**30 < free.best.bytes
    assert tight.best.seconds >= free.best.seconds
    with pytest.raises(RunError, match="deadline"):
        search(run, hardware, limits=Limits(deadline=free.best.expected_days / 3))
    assert free.best.price is not None
    with pytest.raises(RunError, match="budget"):
        search(run, hardware, limits=Limits(budget=free.best.price / 10))
    cheap = search(run, hardware, aim="price")
    assert cheap.best.price is not None and cheap.best.price <= free.best.price


def test_planning_imports_no_torch() -> None:
    program = "import sys, phalanx.planning.search.search, phalanx.planning.solve, phalanx.planning.placement; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
