"""Predicted steps beside those that Phalanx took on one H200 (PyTorch 2.11, 16 cores; `phalanx bench` and `phalanx train`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phalanx.calibration.bench_process import Compute, plan_of, small_run
from phalanx.planning.cost.step_time import step_times
from phalanx.planning.feedback import jobs_of
from phalanx.planning.machines.hardware import hardware
from phalanx.planning.machines.rates import rates_for
from phalanx.spec.model import PRESETS, Moe
from phalanx.spec.run import Cluster, Run

# (dim, layers, sequence, micro-batch), times accumulated, format, milliseconds
STEPS: list[tuple[tuple[int, int, int, int], int, Compute, float]] = [
    ((512, 4, 256, 2), 1, "bf16", 15.5),
    ((1024, 8, 512, 2), 1, "bf16", 28.9),
    ((2048, 4, 1024, 2), 1, "bf16", 17.3),
    ((2048, 4, 2048, 8), 1, "bf16", 49.9),
    ((4096, 2, 2048, 4), 1, "bf16", 41.3),
    ((4096, 2, 8192, 1), 1, "bf16", 46.2),
    ((1024, 4, 8192, 2), 1, "bf16", 25.8),
    ((2048, 4, 1024, 2), 4, "bf16", 53.9),
    ((2048, 4, 2048, 8), 1, "fp8", 71.8),
    ((4096, 2, 2048, 4), 1, "fp8", 49.0),
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
    ("compute", "compiled", "real"),
    [("bf16", False, 263.0), ("bf16", True, 220.4), ("fp8", False, 347.1), ("fp8", True, 175.8)],
)
def test_a_billion_parameters(compute: Compute, compiled: bool, real: float) -> None:
    run = small_run(BILLION, "cuda", compute)
    run = replace(run, model=replace(run.model, vocab=32768, ffn=8192), memory=replace(run.memory, compile=compiled))
    assert predicted(run, compute) == pytest.approx(real, rel=0.1)


# preset, changes, sequence, micro-batch, format, milliseconds; compiled
PRESET_STEPS: list[tuple[str, dict[str, Any], int, int, Compute, float]] = [
    ("llama3.2-1b", {"tied": False}, 4096, 8, "bf16", 488.0),
    ("llama3.2-1b", {"tied": False}, 4096, 8, "fp8", 406.0),
    ("llama3-8b", {"layers": 16}, 4096, 4, "bf16", 712.8),
    ("llama3-8b", {"layers": 16}, 4096, 4, "fp8", 533.5),
    ("gpt2-124m", {}, 1024, 16, "bf16", 34.3),
    ("qwen3-30b-a3b", {"layers": 6}, 4096, 8, "bf16", 326.1),
    ("qwen3-30b-a3b", {"layers": 6}, 4096, 16, "bf16", 637.0),
]


@pytest.mark.parametrize(("preset", "changes", "sequence", "micro_batch", "compute", "real"), PRESET_STEPS)
def test_presets(preset: str, changes: dict[str, Any], sequence: int, micro_batch: int, compute: Compute, real: float) -> None:
    run = small_run((64, 1, sequence, micro_batch), "cuda", compute)
    run = replace(run, model=replace(PRESETS[preset], **changes), memory=replace(run.memory, compile=True, loss_chunk=8192))
    assert predicted(run, compute) == pytest.approx(real, rel=0.1)


def test_routed_experts_gain_nothing_from_fp8_as_they_stay_in_bf16() -> None:
    def step(compute: Compute) -> float:
        run = small_run((1024, 8, 4096, 4), "cuda", compute)
        model = replace(run.model, vocab=257, heads=8, kv_heads=1, moe=Moe(experts=8, active=4, ffn=8192, shared=0))
        return predicted(replace(run, model=model, memory=replace(run.memory, compile=True)), compute)

    assert step("fp8") == pytest.approx(step("bf16"), rel=0.06)
