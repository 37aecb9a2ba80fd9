"""The measurements that need processes of their own, in the environment of a rank: training steps of small models, because the
program that will run on a machine measures it best, and collectives between ranks. The last line of its output is JSON.

    python -P -m phalanx.calibration.bench_process steps DEVICE COMPUTE SECONDS
    python -P -m phalanx.calibration.bench_process links DEVICE RANK RANKS PORT SECONDS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch
import torch.distributed as dist

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
_MESSAGES = (4096, 1 << 20, 32 << 20)
"""Bytes of the messages between ranks."""


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
        memory=Memory(recompute="none", offload="none", compile=False, loss_chunk=0),
        layout=Layout(data=1),
        cluster=Cluster(device=device),
    )


def plan_of(run: Run) -> Plan:
    """The plan of one rank for a run of `small_run`."""
    model, micro = run.model, run.train.micro_batch or 1
    return Plan(
        layout=run.layout,
        device=run.cluster.device or "cpu",
        threads=1,
        micro_batch=micro,
        accumulation=run.batch // micro,
        compute=run.precision.compute or "fp32",
        parameters=model.parameters(),
        flops_per_token=model.flops_per_token(run.train.sequence_length),
        peak_flops=None,
    )


def step_seconds(run: Run, seconds: float) -> float:
    """The time of a step, measured for about `seconds`."""
    plan = plan_of(run)
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
            taken.append(min(wall, busy) if plan.device == "cpu" else wall)
        trainer.feed.close()
    # The fastest fifth: other programs on the machine only add time.
    return sorted(taken)[len(taken) // 5]


def time_jobs(device: Device, compute: Compute, seconds: float) -> dict[str, Any]:
    """Measures a step of each of `jobs` in about `seconds` altogether. Returns "seconds", with None for a model that does not fit, and
    "fixed": the resident bytes of this process before the first model."""
    torch.set_num_threads(1)
    fixed = accelerator.resident_bytes()
    runs = jobs(device, compute)
    each = seconds / len(runs) * 0.7  # building the models takes the rest
    taken: list[float | None] = []
    for run in runs:
        try:
            taken.append(step_seconds(run, each))
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


def time_links(device_kind: Device, rank: int, ranks: int, store: str, seconds: float) -> list[dict[str, Any]]:
    """Times all-reduce, all-gather and a message there and back of each size, as one of several ranks of this machine. All ranks
    return the same rows."""
    kind = accelerator.of(device_kind)
    device = kind.device(rank)
    kind.set_device(device)
    torch.set_num_threads(1)
    dist.init_process_group(kind.backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    rows = []
    for size in _MESSAGES:
        whole, shard = torch.zeros(size // 4, device=device), torch.zeros(size // 4 // ranks, device=device)
        collectives: dict[str, Callable[[], Any]] = {
            "all-reduce": partial(dist.all_reduce, whole),
            "all-gather": partial(dist.all_gather_into_tensor, whole, shard),
            "message": partial(_ping, whole),
        }
        for name, collective in collectives.items():
            rows.append({"name": name, "bytes": size, "seconds": _typical_seconds(collective, device, seconds / 9)})
    dist.destroy_process_group()  # where a collective fails, the process ends anyway
    return rows


def _ping(tensor: torch.Tensor) -> None:
    """Sends a message from rank 0 to rank 1 and back; other ranks do nothing."""
    rank = dist.get_rank()
    if rank > 1:
        return
    for sender in (0, 1):
        if rank == sender:
            dist.send(tensor, 1 - sender)
        else:
            dist.recv(tensor, sender)


def _typical_seconds(collective: Callable[[], Any], device: torch.device, budget: float) -> float:
    """The lower third of the times of a collective. All ranks agree on the number of repetitions."""
    synchronize = accelerator.of(device).synchronize
    collective()
    begin = time.perf_counter()
    for _ in range(3):
        collective()
    synchronize(device)
    first = torch.tensor([(time.perf_counter() - begin) / 3], device=device)
    dist.all_reduce(first, dist.ReduceOp.MAX)
    count = min(500, max(5, int(budget / max(float(first), 1e-6))))
    times = []
    for _ in range(count):
        start = time.perf_counter()
        collective()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 3]


def main() -> None:
    kind, device, *arguments = sys.argv[1:]
    assert device in ("cpu", "cuda"), device
    if kind == "steps":
        compute, seconds = arguments
        assert compute in ("fp32", "bf16", "fp8"), compute
        answer: Any = time_jobs(device, compute, float(seconds))  # type: ignore[arg-type]
    else:
        rank, ranks, store, seconds = arguments
        answer = time_links(device, int(rank), int(ranks), store, float(seconds))  # type: ignore[arg-type]
    print("\n" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
