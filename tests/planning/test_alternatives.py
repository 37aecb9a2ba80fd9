"""Why not another layout: what is said of neighbours that are quicker, slower, too large or not legal, in this order."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import groupby

import pytest
from planning_cases import SMALL, cluster, run_of, with_memory

from phalanx.planning.machines.hardware import hardware
from phalanx.planning.search.alternatives import neighbours
from phalanx.planning.search.candidate import Alternative
from phalanx.planning.search.search import SAFE, judge, rates_of
from phalanx.planning.search.space import space
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine
from phalanx.spec.run import Memory, Precision, Run

WIDE = replace(SMALL, dim=2048, heads=10, kv_heads=2, layers=12, vocab=32000)
LAYOUT = Layout(tensor=2, pipeline=2, data=2, schedule="gpipe")


def reasons(run: Run, memory: float) -> tuple[float, list[Alternative]]:
    devices = with_memory(cluster(8), memory)
    best = judge(run, devices)
    return best.seconds, list(neighbours(space(run, devices, 8), rates_of(run, devices), best))


def test_alternatives_order_is_faster_slower_too_large_illegal() -> None:
    memory = 8 * 2.0**30
    run = run_of(WIDE, 32, 2048, layout=LAYOUT, memory=Memory(recompute="full", compile=False, loss_chunk=0))
    seconds, found = reasons(run, memory)

    def kind(one: Alternative) -> str:
        if one.candidate is None:
            return "not legal"
        if one.candidate.bytes > SAFE * memory:
            return "too large"
        return "quicker" if one.candidate.seconds < 0.99 * seconds else "slower"

    assert [name for name, _ in groupby(found, kind)] == ["quicker", "slower", "too large", "not legal"]
    starts = {"quicker": "quicker, ", "too large": "needs ", "not legal": "not legal: "}
    for one in found:
        assert one.reason.startswith(starts.get(kind(one), "")), one
        if kind(one) == "slower":
            assert re.search(r"; step \+\d+%$", one.reason) or one.reason.startswith("as quick ("), one


def test_a_quicker_neighbour_says_which_key_of_the_run_file_rules_it_out() -> None:
    run = run_of(WIDE, 32, 4096, layout=LAYOUT)
    _, found = reasons(run, 80 * 2.0**30)
    said = {one.name: one.reason for one in found}
    assert re.fullmatch(r"quicker, -\d+% for .*; step -\d+%, but the run file has layout.schedule = \"gpipe\"", said["zbv"])
    assert "layout.tensor = 2" in said["no TP"]


def test_reasons_give_sizes_in_fitting_units() -> None:
    _, found = reasons(
        run_of(WIDE, 32, 2048, layout=LAYOUT, memory=Memory(recompute="full", compile=False, loss_chunk=0)), 8 * 2.0**30
    )
    said = {one.name: one.reason for one in found}
    assert re.fullmatch(r"needs \d+\.\d GiB of 8\.0", said["no TP"])
    assert re.fullmatch(r"as quick \(-0\.\d%\) and takes \d\.\d GiB instead of \d\.\d", said["ZeRO-1"])
    machine = Machine(host="laptop", cpu="some", cores=4, memory=int(0.9 * 2**32), core_flops=1e11)
    run = run_of(SMALL, 64, 512, layout=Layout(data=4), memory=Memory(recompute="full"), precision=Precision(compute="fp32"))
    devices = hardware(run, machine)
    found = list(neighbours(space(run, devices, 4), rates_of(run, devices), judge(run, devices)))
    sizes = [one.reason for one in found if "takes" in one.reason]
    assert sizes and all(re.search(r"takes \d+ MiB instead of \d+$", reason) for reason in sizes)


@pytest.mark.parametrize("every", [1, 2])
def test_recomputing_all_blocks_and_every_second_are_different_neighbours(every: int) -> None:
    run = run_of(replace(WIDE, heads=16), 32, 512, layout=Layout(data=8), memory=Memory(recompute="none"))
    devices = cluster(8)
    best = judge(run, devices)
    open_ = replace(run, memory=Memory(), layout=Layout())
    found = {one.name: one.candidate for one in neighbours(space(open_, devices, 8), rates_of(open_, devices), best)}
    option = found["full recomputation" if every == 1 else "full recomputation 1/2"]
    assert option is not None and (option.recompute, option.recompute_every) == ("full", every)
    assert option.seconds > best.seconds
