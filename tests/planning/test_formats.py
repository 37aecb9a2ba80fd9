"""What a plan says of other number formats and of compiled blocks, which a search does not choose by itself."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from planning_cases import cluster, run_of

from phalanx.planning.planner import search
from phalanx.planning.report import keys_to_change, run_file_tables
from phalanx.planning.search.alternatives import other_formats
from phalanx.planning.search.candidate import Candidate
from phalanx.planning.search.search import judge
from phalanx.spec.layout import Layout
from phalanx.spec.run import Memory, Precision, Run

COMPILED, EAGER = "compiled blocks", "blocks not compiled"


def others(run: Run, gpu: str = "h100-sxm") -> tuple[Candidate, dict[str, tuple[Candidate, str]]]:
    devices = cluster(8, gpu)
    best = judge(run, devices)
    found = other_formats(run, devices, best)
    options = [one.candidate for one in found]
    assert [option.seconds for option in options if option] == sorted(option.seconds for option in options if option)
    return best, {one.name: (one.candidate, one.reason) for one in found if one.candidate is not None}


def test_other_formats_keep_the_layout() -> None:
    best, found = others(run_of("llama3-8b", 64, 4096, layout=Layout(shard=8, data=1)))
    assert set(found) == {f"bf16, {COMPILED}", f"fp8, {EAGER}", f"fp8, {COMPILED}"}
    assert all((one.layout, one.micro_batch) == (best.layout, best.micro_batch) for one, _ in found.values())
    quickest, reason = found[f"fp8, {COMPILED}"]
    percent = round(100 * (quickest.seconds / best.seconds - 1))
    assert -40 < percent < -10 and reason.startswith(f"quicker, but in coarser numbers; step {percent}%")
    assert keys_to_change(best, quickest).endswith("precision.compute=fp8 memory.compile=true")
    assert 'compute = "fp8"' in run_file_tables(quickest) and "compile = true" in run_file_tables(quickest)
    assert "compile" not in run_file_tables(best)


def test_rounding_in_passes_of_its_own_may_cost_more_than_fp8_brings() -> None:
    small = run_of("llama3.2-1b", 32, 4096, layout=Layout(data=8))
    slow, reason = others(small)[1][f"fp8, {EAGER}"]
    assert re.fullmatch(r"slower, because rounding to fp8 takes separate passes; step \+\d+%.*", reason)
    assert slow.seconds > judge(small, cluster(8)).seconds


def test_fp8_run_is_compared_with_bf16() -> None:
    run = run_of("llama3.2-1b", 32, 4096, layout=Layout(data=8), precision=Precision(compute="fp8"))
    assert set(others(run)[1]) == {f"fp8, {COMPILED}", f"bf16, {EAGER}", f"bf16, {COMPILED}"}
    assert others(run)[1][f"bf16, {EAGER}"][1].startswith("quicker, and in finer numbers; step -")


@pytest.mark.parametrize(
    ("gpu", "changed", "expected"),
    [
        ("a100-sxm-80gb", {}, {f"bf16, {COMPILED}"}),  # has no fp8
        ("h100-sxm", {"precision": Precision(compute="fp32")}, set()),  # somebody wants just that
        ("h100-sxm", {"memory": Memory(recompute="selective")}, {f"fp8, {EAGER}"}),  # goes with no compiled blocks
    ],
)
def test_only_formats_of_the_gpu_are_compared(gpu: str, changed: dict[str, object], expected: set[str]) -> None:
    run = replace(run_of("llama3.2-1b", 32, 4096, layout=Layout(data=8)), **changed)  # type: ignore[arg-type]
    assert set(others(run, gpu)[1]) == expected


def test_other_formats_come_first_in_alternatives() -> None:
    found = search(run_of("llama3-8b", 64, 4096), cluster(8))
    assert found.alternatives[0].name == f"fp8, {COMPILED}"
    assert found.best.compute == "bf16" and not found.best.compiled
