"""Times real training steps of small models on one device of this machine, in this process.

`calibration/measure_machine` fits the planner's constants to them, because the program that will run on a machine measures it best.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from phalanx import accelerator
from phalanx.parallel.mesh import connect
from phalanx.spec.layout import Layout
from phalanx.spec.model import ModelSpec
from phalanx.spec.plan import Place, Plan
from phalanx.spec.run import Cluster, Data, Memory, Precision, Run, Train
from phalanx.training.trainer import Trainer

Device = Literal["cpu", "cuda"]
Compute = Literal["fp32", "bf16", "fp8"]

_WORDS = ("the quick brown fox jumps over the lazy dog, and ", "a phalanx of spears moves as one; ")

CPU = ((64, 2, 128, 4), (64, 4, 64, 2), (128, 4, 128, 4), (128, 2, 512, 4), (256, 2, 128, 8), (256, 4, 64, 1), (512, 2, 128, 2))
"""(dim, layers, sequence, micro-batch): small and large, short and long, so that every constant matters in some of them."""
CUDA = (
    (512, 4, 256, 2), (1024, 8, 512, 2), (2048, 4, 1024, 2), (2048, 4, 2048, 8), (4096, 2, 2048, 4), (4096, 2, 8192, 1), (1024, 4, 8192, 2),
)  # fmt: skip
FP8 = ((2048, 4, 2048, 8), (4096, 2, 2048, 4))
"""Large enough that matrix products and casts dominate."""


def small_run(shape: tuple[int, int, int, int], device: Device, compute: Compute, accumulation: int = 1) -> Run:
    """A run of one rank with a model of this shape."""
    dim, layers, sequence, micro = shape
    heads = max(1, dim // (32 if dim < 1024 else 128))
    model = ModelSpec(dim=dim, layers=layers, heads=heads, kv_heads=max(1, heads // 2), vocab=257, context=sequence)
    text = "".join(_WORDS) * (1 + 40 * sequence * micro // 100)
    return Run(
        model=model,
        data=Data(source="memory", documents=(text, text), eval_fraction=0.0),
        train=Train(batch=micro * accumulation, sequence_length=sequence, steps=1000, micro_batch=micro),
        precision=Precision(compute=compute),
        memory=Memory(recompute="none", offload="none"),
        layout=Layout(data=1),
        cluster=Cluster(device=device),
    )


def plan_of(run: Run, device: Device, compute: Compute, threads: int) -> Plan:
    """The plan of one rank for a run of `small_run`."""
    model, micro = run.model, run.train.micro_batch or 1
    return Plan(
        layout=Layout(data=1),
        device=device,
        threads=threads,
        micro_batch=micro,
        accumulation=run.batch // micro,
        compute=compute,
        parameters=model.parameters(),
        flops_per_token=model.flops_per_token(run.train.sequence_length),
        peak_flops=None,
    )


def step_seconds(run: Run, plan: Plan, seconds: float) -> float:
    """The time of a step, measured for about `seconds`."""
    device = accelerator.of(plan.device)
    with TemporaryDirectory() as folder:
        trainer = Trainer(run, plan, connect(Place(), plan.device, 60.0, plan.layout), Path(folder) / "checkpoints")
        trainer.build()
        trainer.load_initial_weights()
        taken: list[float] = []
        for _ in range(3):  # the second step counts its operations, which is slow
            trainer.step()
        begin = time.perf_counter()
        while len(taken) < 3 or (time.perf_counter() - begin < seconds and len(taken) < 200):
            device.synchronize()
            start, busy = time.perf_counter(), time.process_time()
            trainer.step()
            device.synchronize()
            wall, busy = time.perf_counter() - start, time.process_time() - busy
            # If other programs use the core meanwhile, CPU time is what the step takes alone.
            taken.append(min(wall, busy) if plan.device == "cpu" and plan.threads == 1 else wall)
        trainer.feed.close()
    # The fastest fifth: other programs on the machine only add time.
    return sorted(taken)[len(taken) // 5]


def time_jobs(device: Device, compute: Compute, threads: int, seconds: float) -> dict[str, Any]:
    """Measures a step of each of `jobs` in about `seconds` altogether.

    Returns "seconds", with None for a model that does not fit, and "fixed": the resident bytes of this process before the first model.
    """
    torch.set_num_threads(threads)
    fixed = accelerator.resident_bytes()
    runs = jobs(device, compute)
    each = seconds / len(runs) * 0.7  # building the models takes the rest
    taken: list[float | None] = []
    for run in runs:
        try:
            taken.append(step_seconds(run, plan_of(run, device, compute, threads), each))
        except torch.OutOfMemoryError:
            taken.append(None)
            accelerator.of(device).empty_cache()
    return {"seconds": taken, "fixed": fixed}


def jobs(device: Device, compute: Compute) -> list[Run]:
    """The runs to time. The last accumulates gradients, which separates the cost of a step from that of a micro-batch."""
    if compute == "fp8":
        return [small_run(shape, device, compute) for shape in FP8]
    shapes = CPU if device == "cpu" else CUDA
    return [*(small_run(shape, device, compute) for shape in shapes), small_run(shapes[2], device, compute, accumulation=4)]
