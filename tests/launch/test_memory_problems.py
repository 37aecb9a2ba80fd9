"""A run that does not fit is refused before it starts, by a rehearsal in another process; small ones are not held up by any."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
from ranks import tiny_run

from phalanx.launch import model_check
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Gpu, Machine, Plan
from phalanx.spec.run import Run

MODEL = ("model.dim=1024", "model.layers=2", "model.vocab=32768", "train.micro_batch=8", "train.sequence_length=512")


def machine(memory: int, gpu: int = 0) -> Machine:
    gpus = (Gpu(name="NVIDIA H100 80GB HBM3", memory=gpu),) if gpu else ()
    return Machine(host="here", cpu="a cpu", cores=2, memory=memory, gpus=gpus)


def plan_of(run: Run, device: Any, ranks: int) -> Plan:
    return Plan(
        layout=Layout(data=ranks),
        device=device,
        threads=1,
        micro_batch=8 // ranks,
        accumulation=1,
        compute="bf16" if device == "cuda" else "fp32",
        parameters=run.model.parameters(),
        flops_per_token=0.0,
        peak_flops=None,
    )


def test_ranks_on_cpus_are_held_against_the_memory_they_share() -> None:
    run = tiny_run(*MODEL)
    plan = plan_of(run, "cpu", 2)
    found = model_check.memory_problems(run, plan, machine(3 << 30))
    assert (
        len(found) == 1 and "2 CPU ranks need" in found[0] and "3.0 GiB are there" in found[0] and "--unrehearsed" in found[0]
    )


@pytest.mark.slow
def test_what_is_rehearsed_and_fits_may_start() -> None:
    run = tiny_run(*MODEL)
    plan = plan_of(run, "cpu", 2)
    assert model_check._estimate(run, plan, machine(6 << 30)) * 2 > 3 << 30  # more than half of it, so somebody is asked
    assert model_check.memory_problems(run, plan, machine(6 << 30)) == []


def test_a_gpu_that_is_too_small_is_told_with_the_layer() -> None:
    run = tiny_run(*MODEL)
    found = model_check.memory_problems(run, plan_of(run, "cuda", 1), machine(64 << 30, gpu=4 << 30))
    assert len(found) == 1 and "Rank 0 needs" in found[0] and "runs out of memory in" in found[0]


def test_small_runs_start_without_a_rehearsal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("nobody needs to be asked")

    monkeypatch.setattr(subprocess, "run", refuse)
    run = tiny_run()
    assert model_check.memory_problems(run, plan_of(run, "cpu", 2), machine(8 << 30)) == []


def test_a_rehearsal_that_says_nothing_stops_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    run = tiny_run(*MODEL)
    monkeypatch.setattr(model_check, "_ask", lambda *_: subprocess.CompletedProcess([], 0, stdout=""))
    assert model_check.memory_problems(run, plan_of(run, "cpu", 2), machine(1 << 30)) == []
