"""Constants drawn to steps: those with which steps were made come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.planning.feedback import Measured, corrected, refitted
from phalanx.planning.machine_fit import need_and_promise
from phalanx.planning.machines.cpu import cpu_hardware, of_cores
from phalanx.planning.planner import choose
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.plan import Machine
from phalanx.spec.run import Run, Train

HERE = Machine(host="a", cpu="some", cores=1, memory=2**34, core_flops=1e11)
TRUE = {"cpu.launch": 2.2e-5, "cpu.traffic": 2.4, "cpu.gemm": 0.8, "cpu.overhead": 8e-3}
SHAPES = (
    (64, 2, 128, 4),
    (64, 4, 64, 1),
    (128, 4, 128, 4),
    (256, 2, 512, 2),
    (512, 2, 128, 2),
    (512, 1, 64, 1),
    (256, 4, 256, 8),
)


def run_of(dim: int, layers: int, sequence: int, micro: int) -> Run:
    model = ModelSpec(dim=dim, layers=layers, heads=dim // 32, vocab=257)
    return Run(
        model=model, train=Train(batch=micro, micro_batch=micro, sequence_length=sequence, steps=1), layout=Layout(data=1)
    )


def test_steps_of_a_known_machine_give_its_constants_back() -> None:
    known = replace(HERE, measured=tuple(TRUE.items()))
    runs = [run_of(*shape) for shape in SHAPES]
    steps = []
    for run in runs:
        plan = choose(run, HERE)
        _, truth = need_and_promise(run, known, plan)
        assert truth is not None
        steps.append((Measured(run=run, plan=plan, seconds=truth.seconds), cpu_hardware(HERE, 1, 1)))
    widths = {name.partition(".")[2]: 1.0 for name in TRUE}
    found = corrected(refitted(steps, "fp32", widths, 0.005), cpu_hardware(HERE, 1, 1), "fp32", {})
    assert found == pytest.approx(TRUE, rel=0.1)


def test_undetermined_constants_stay_unchanged() -> None:
    run = run_of(128, 2, 128, 2)
    plan = choose(run, HERE)
    assert plan.promise is not None
    step = [(Measured(run=run, plan=plan, seconds=plan.promise.seconds), cpu_hardware(HERE, 1, 1))]
    assert refitted(step, "fp32") == pytest.approx(dict.fromkeys(refitted(step, "fp32"), 1.0), rel=1e-3)
    slower = [(Measured(run=run, plan=plan, seconds=2 * plan.promise.seconds), cpu_hardware(HERE, 1, 1))]
    scale = refitted(slower, "fp32", {"latency": 0.5, "launch": 0.7, "traffic": 0.7})
    assert scale["latency"] == pytest.approx(1.0, abs=1e-6), "one rank sends nothing"
    assert scale["traffic"] > 1 < scale["launch"]


def test_cores_that_take_turns_start_operations_more_slowly() -> None:
    alone, turns = (dict(cpu_hardware(replace(HERE, cores=2), ranks, 1).measured) for ranks in (2, 4))
    assert alone["launch"] == of_cores(HERE)["launch"] and turns["launch"] == 2 * of_cores(HERE)["launch"]
