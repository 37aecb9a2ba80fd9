"""Measurements of this machine, as far as they can be held to anything: units, signs, and that plans take them up."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from phalanx.calibration import measure_machine
from phalanx.calibration.bench_process import jobs, plan_of, step_seconds
from phalanx.calibration.measure_machine import bench
from phalanx.dashboard.plan_text import show_bench
from phalanx.host.probe import probe
from phalanx.planning.feedback import EIGHT_BITS, Measured, corrected, refitted
from phalanx.planning.machines.hardware import hardware
from phalanx.planning.machines.rates import NAMES, rates_for
from phalanx.planning.planner import choose
from phalanx.spec.plan import Gpu, Machine
from phalanx.spec.run import Cluster, Run, Train

CPU = torch.device("cpu")
ASKING = Run(train=Train(batch=1, steps=1), cluster=Cluster(device="cuda"))


def test_products_are_counted_in_operations_a_second() -> None:
    rows = list(measure_machine.products(CPU, "fp32", 0.05))
    assert {row.shape for row in rows} >= {"1024 x 1024 x 1024", "512 x 509 x 509"}
    one = torch.randn(512, 512)
    seconds = measure_machine.best_seconds(lambda: one @ one, CPU, 0.2)
    measured = next(row.value for row in rows if row.shape == "512 x 512 x 512")
    assert 0.1 < measured / (2 * 512**3 / seconds) < 10, "the same product, timed by hand"
    assert list(measure_machine.products(CPU, "fp8", 0.05)) == [], "no core multiplies in it"


def test_the_rest_has_values_and_units(tmp_path: Path) -> None:
    rows = [
        *measure_machine.attention(CPU, "fp32", 0.1),
        measure_machine.memory(CPU, 0.01),
        measure_machine.launch(CPU, 0.01),
        measure_machine.disk(tmp_path),
    ]
    assert all(row is not None and row.value > 0 for row in rows)
    assert list(tmp_path.iterdir()) == [], "what was written is gone"
    assert measure_machine.disk(tmp_path / "not there") is None
    console = Console(width=100, record=True)
    show_bench(console, [(row.what, row.shape, row.value, row.unit) for row in rows if row], {"cpu.launch": 8e-6})
    text = console.export_text()
    assert "FLOP/s" in text and "GiB/s" in text and "µs" in text and "cpu.launch" in text


def test_more_work_takes_a_real_step_longer() -> None:
    every = jobs("cpu", "fp32")
    small, large = every[1], every[4]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # A busy machine may hold up either; not the same one ten times.
        pairs = ((step_seconds(small, 0.2), step_seconds(large, 0.2)) for _ in range(10))
        assert any(0 < 2 * quick < slow for quick, slow in pairs)
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_whole_bench_makes_plans_that_use_it(tmp_path: Path) -> None:
    machine = probe("")
    found = bench(machine, tmp_path, minutes=0.5)
    json.dumps(found.to_json(), allow_nan=False)
    names = {name.rpartition(".")[2] for name in found.constants}
    fields = {"bandwidth", "storage", "island_bandwidth", "fixed_memory"}
    assert names <= set(NAMES) | fields and {"gemm", "launch", "traffic"} <= names
    told = replace(machine, measured=tuple(found.constants.items()))
    for run, seconds in zip(jobs("cpu", "fp32"), (row.value for row in found.rows if row.what == "fp32 step"), strict=True):
        promise = choose(replace(run, cluster=replace(run.cluster, threads=1)), told).promise
        assert promise is not None and promise.seconds == pytest.approx(seconds, rel=0.5)


def test_a_format_of_its_own_is_fitted_to_steps_in_it() -> None:
    """What a GPU's steps in fp8 would be made of, on a machine that has none: rounding slows them, and bf16 is what it was."""
    machine = Machine(
        host="h",
        cpu="c",
        cores=8,
        memory=1 << 37,
        gpus=(Gpu(name="NVIDIA H200", memory=140 << 30),),
        measured=(("cuda.fp8.gemm", 0.7),),
    )
    devices = hardware(ASKING, machine)
    steps = [Measured(run=run, plan=plan_of(run), seconds=0.1) for run in jobs("cuda", "fp8")]
    found = corrected(refitted([(step, devices) for step in steps], "fp8", EIGHT_BITS), devices, "fp8", {})
    assert list(found) == ["cuda.fp8.gemm", "cuda.rounding"] and 0 < found["cuda.fp8.gemm"] < 0.7
    assert found["cuda.rounding"] > 1.2 * rates_for(devices, "fp8").rounding
    slower = hardware(ASKING, replace(machine, measured=tuple(found.items())))
    assert rates_for(slower, "fp8").gemm == found["cuda.fp8.gemm"]
    assert rates_for(slower, "fp8").rounding == found["cuda.rounding"]
    assert rates_for(slower, "bf16").gemm == rates_for(devices, "bf16").gemm, "other formats are what they were"


def test_dense_steps_leave_the_cost_of_experts_as_it_was() -> None:
    machine = Machine(host="h", cpu="c", cores=8, memory=1 << 37, gpus=(Gpu(name="NVIDIA H200", memory=140 << 30),))
    devices = hardware(ASKING, machine)
    before = rates_for(devices, "bf16")
    found = corrected({"launch": 4.0}, devices, "bf16", {})
    assert found["cuda.launch"] == pytest.approx(4 * before.launch)
    assert found["cuda.launch"] * found["cuda.expert_kernels"] == pytest.approx(before.launch * before.expert_kernels)
