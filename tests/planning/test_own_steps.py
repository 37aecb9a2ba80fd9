"""Predicted steps beside those that Phalanx took on one H200 (PyTorch 2.11, 16 cores; `phalanx bench` and `phalanx train`)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.calibration.bench_process import Compute, plan_of, small_run
from phalanx.planning.cost.step_time import step_times
from phalanx.planning.feedback import jobs_of
from phalanx.planning.machines.hardware import hardware
from phalanx.planning.machines.rates import rates_for
from phalanx.spec.model import Moe
from phalanx.spec.run import Cluster, Run

# (dim, layers, sequence, micro-batch), times accumulated, format, milliseconds
STEPS: list[tuple[tuple[int, int, int, int], int, Compute, float]] = [
    ((512, 4, 256, 2), 1, "bf16", 18.7),
    ((1024, 8, 512, 2), 1, "bf16", 34.2),
    ((2048, 4, 1024, 2), 1, "bf16", 23.0),
    ((2048, 4, 2048, 8), 1, "bf16", 53.8),
    ((4096, 2, 2048, 4), 1, "bf16", 46.1),
    ((4096, 2, 8192, 1), 1, "bf16", 51.2),
    ((1024, 4, 8192, 2), 1, "bf16", 27.6),
    ((2048, 4, 1024, 2), 4, "bf16", 58.7),
    ((2048, 4, 2048, 8), 1, "fp8", 76.2),
    ((4096, 2, 2048, 4), 1, "fp8", 56.2),
]
BILLION = (2048, 16, 4096, 4)


def predicted(run: Run, compute: Compute) -> float:
    """Milliseconds on an H200 that nobody has measured."""
    devices = hardware(replace(run, layout=None, cluster=Cluster(name="h200")), None)
    plan = plan_of(run)
    rates = rates_for(devices, compute, moe=run.model.moe is not None)
    return 1e3 * float(np.sum(step_times(jobs_of(run, plan, devices), rates).step))


@pytest.mark.parametrize(("shape", "accumulation", "compute", "real"), STEPS)
def test_small_steps(shape: tuple[int, int, int, int], accumulation: int, compute: Compute, real: float) -> None:
    assert predicted(small_run(shape, "cuda", compute, accumulation), compute) == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize(
    ("compute", "compiled", "real"), [("bf16", False, 274.5), ("bf16", True, 231.0), ("fp8", False, 367.5)]
)
def test_a_billion_parameters(compute: Compute, compiled: bool, real: float) -> None:
    run = small_run(BILLION, "cuda", compute)
    run = replace(run, model=replace(run.model, vocab=32768, ffn=8192), memory=replace(run.memory, compile=compiled))
    assert predicted(run, compute) == pytest.approx(real, rel=0.12)


def test_experts() -> None:
    run = small_run((1024, 16, 4096, 4), "cuda", "bf16")
    experts = Moe(experts=16, active=4, ffn=1024, shared=1)
    run = replace(run, model=replace(run.model, vocab=32768, heads=8, kv_heads=None, moe=experts))
    assert predicted(run, "bf16") == pytest.approx(187.0, rel=0.12)


def test_routed_experts_gain_nothing_from_fp8_as_they_stay_in_bf16() -> None:
    def step(compute: Compute) -> float:
        run = small_run((1024, 8, 4096, 4), "cuda", compute)
        model = replace(run.model, vocab=257, heads=8, kv_heads=1, moe=Moe(experts=8, active=4, ffn=8192, shared=0))
        return predicted(replace(run, model=model, memory=replace(run.memory, compile=True)), compute)

    assert step("fp8") == pytest.approx(step("bf16"), rel=0.06)
