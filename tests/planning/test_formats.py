"""Compiled blocks and chunks of the loss, which plans choose for GPUs, and what a plan says of other number formats."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from planning_cases import cluster, run_of

from phalanx.planning.planner import plan_run, search
from phalanx.planning.report import keys_to_change, run_file_tables
from phalanx.planning.search.alternatives import other_formats
from phalanx.planning.search.candidate import Candidate
from phalanx.planning.search.search import judge
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Machine
from phalanx.spec.run import Memory, Precision, Run

LAPTOP = Machine(host="a", cpu="some", cores=4, memory=2**34, core_flops=1e11)
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
    assert set(found) == {f"bf16, {EAGER}", f"fp8, {EAGER}", f"fp8, {COMPILED}"}
    assert all((one.layout, one.micro_batch) == (best.layout, best.micro_batch) for one, _ in found.values())
    quickest, reason = found[f"fp8, {COMPILED}"]
    percent = round(100 * (quickest.seconds / best.seconds - 1))
    assert -40 < percent < -10 and reason.startswith(f"quicker, but in coarser numbers; step {percent}%")
    assert keys_to_change(best, quickest).endswith("precision.compute=fp8")
    assert keys_to_change(best, found[f"bf16, {EAGER}"][0]).endswith("memory.compile=false")
    assert 'compute = "fp8"' in run_file_tables(quickest) and "compile = true" in run_file_tables(quickest)
    assert "compile = false" in run_file_tables(found[f"fp8, {EAGER}"][0])


def test_rounding_in_passes_of_its_own_may_cost_more_than_fp8_brings() -> None:
    small = run_of("llama3.2-1b", 32, 4096, layout=Layout(data=8))
    slow, reason = others(small)[1][f"fp8, {EAGER}"]
    assert re.fullmatch(r"slower, because rounding to fp8 takes separate passes; step \+\d+%.*", reason)
    assert slow.seconds > judge(small, cluster(8)).seconds


def test_fp8_run_is_compared_with_bf16() -> None:
    run = run_of("llama3.2-1b", 32, 4096, layout=Layout(data=8), precision=Precision(compute="fp8"))
    run = replace(run, memory=Memory(compile=False))
    assert set(others(run)[1]) == {f"fp8, {COMPILED}", f"bf16, {EAGER}", f"bf16, {COMPILED}"}
    assert others(run)[1][f"bf16, {EAGER}"][1].startswith("quicker, and in finer numbers; step -")


@pytest.mark.parametrize(
    ("gpu", "changed", "expected"),
    [
        ("a100-sxm-80gb", {}, {f"bf16, {EAGER}"}),  # has no fp8
        ("h100-sxm", {"precision": Precision(compute="fp32")}, set()),  # somebody wants just that
    ],
)
def test_only_formats_of_the_gpu_are_compared(gpu: str, changed: dict[str, object], expected: set[str]) -> None:
    run = replace(run_of("llama3.2-1b", 32, 4096, layout=Layout(data=8)), **changed)  # type: ignore[arg-type]
    assert set(others(run, gpu)[1]) == expected


def test_other_formats_come_first_in_alternatives() -> None:
    found = search(run_of("llama3-8b", 64, 4096), cluster(8))
    assert found.alternatives[0].name == f"fp8, {COMPILED}"
    assert found.best.compute == "bf16" and found.best.compiled


@pytest.mark.parametrize(
    ("layout", "memory", "compiled"),
    [
        (Layout(data=8), Memory(), True),
        (Layout(data=1, tensor=8), Memory(), False),  # compiled blocks keep gathered inputs
        (Layout(data=1, tensor=8), Memory(compile=True), True),
        (Layout(data=1, pipeline=8), Memory(), True),
        (Layout(data=1, pipeline=8, schedule="zbv"), Memory(), False),  # compiled blocks cannot split their backward
        (Layout(data=8), Memory(compile=False), False),
    ],
)
def test_gpus_compile_by_default(layout: Layout, memory: Memory, compiled: bool) -> None:
    best = judge(replace(run_of("llama3.2-1b", 32, 4096, layout=layout), memory=memory), cluster(8))
    assert best.compiled is compiled and best.with_savings(memory).compile is compiled


@pytest.mark.parametrize(("tensor", "given", "chunk"), [(1, None, 8192), (4, None, 32768), (1, 0, 0), (1, 100, 100)])
def test_gpus_divide_the_loss_by_default(tensor: int, given: int | None, chunk: int) -> None:
    """128,256 words: 8,192 tokens have logits of 2 GiB."""
    memory = Memory(loss_chunk=given)
    run = replace(run_of("llama3.2-1b", 32, 4096, layout=Layout(data=8 // tensor, tensor=tensor)), memory=memory)
    best = judge(run, cluster(8))
    assert best.loss_chunk == chunk and best.with_savings(memory).loss_chunk == chunk


def test_cpus_do_neither_by_default() -> None:
    planned = plan_run(run_of("gpt2-124m", 4, 64), LAPTOP)
    assert not planned.run.memory.compile and planned.run.memory.loss_chunk is None
