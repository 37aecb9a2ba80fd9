"""Times real training steps of small models on one device of this machine, in this process. `calibration/measure_machine` fits the constants of
planning to them; nothing measures a machine as well as the program that is to run on it.
"""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from phalanx.accelerator import resident_bytes
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
"""(dim, layers, sequence, micro-batch): small and large, short and long, so that each constant shows somewhere."""
CUDA = (
    (512, 4, 256, 2), (1024, 8, 512, 2), (2048, 4, 1024, 2), (2048, 4, 2048, 8), (4096, 2, 2048, 4), (4096, 2, 8192, 1), (1024, 4, 8192, 2),
)  # fmt: skip
FP8 = ((2048, 4, 2048, 8), (4096, 2, 2048, 4))
"""Large enough that multiplying counts, and casting what is multiplied."""


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
    """The usual time of a step; `seconds` is about how long may be spent on it."""
    with TemporaryDirectory() as folder:
        trainer = Trainer(run, plan, connect(Place(), plan.device, 60.0, plan.layout), Path(folder) / "checkpoints")
        trainer.build()
        trainer.load_initial_weights()
        taken: list[float] = []
        for _ in range(3):  # the second is counted operation by operation
            trainer.step()
        begin = time.perf_counter()
        while len(taken) < 3 or (time.perf_counter() - begin < seconds and len(taken) < 200):
            if plan.device == "cuda":
                torch.cuda.synchronize()
            start, busy = time.perf_counter(), time.process_time()
            trainer.step()
            if plan.device == "cuda":
                torch.cuda.synchronize()
            wall, busy = time.perf_counter() - start, time.process_time() - busy
            # Where other programs have the core for a while, what this one took of it is what it takes alone.
            taken.append(min(wall, busy) if plan.device == "cpu" and plan.threads == 1 else wall)
        trainer.feed.close()
    # The quickest fifth: what else runs on the machine only ever adds.
    return sorted(taken)[len(taken) // 5]


def timed(device: Device, compute: Compute, threads: int, seconds: float) -> dict[str, Any]:
    """Seconds of a step of each of `jobs`, in about so many seconds altogether, None for what a small device has no room for; and the
    bytes of this process before any of them."""
    torch.set_num_threads(threads)
    fixed = resident_bytes()
    every = jobs(device, compute)
    each = seconds / len(every) * 0.7  # the rest goes to building them
    taken: list[float | None] = []
    for run in every:
        try:
            taken.append(step_seconds(run, plan_of(run, device, compute, threads), each))
        except torch.OutOfMemoryError:
            taken.append(None)
            torch.cuda.empty_cache()
    return {"seconds": taken, "fixed": fixed}


def jobs(device: Device, compute: Compute) -> list[Run]:
    """What is timed. The last tells what a step costs from what a micro-batch does."""
    if compute == "fp8":
        return [small_run(shape, device, compute) for shape in FP8]
    shapes = CPU if device == "cpu" else CUDA
    return [*(small_run(shape, device, compute) for shape in shapes), small_run(shapes[2], device, compute, accumulation=4)]
