"""The program of a process that `calibration/measure_machine` starts: real steps in the environment of a rank, or collectives as one of
several ranks. Not for users.

    python -P -m phalanx.calibration.bench_process steps DEVICE COMPUTE THREADS SECONDS
    python -P -m phalanx.calibration.bench_process links DEVICE RANK RANKS PORT SECONDS

The last line of its output is JSON.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from phalanx import accelerator

SIZES = (4096, 1 << 20, 32 << 20)
"""Bytes of the messages."""


def main() -> None:
    kind, *arguments = sys.argv[1:]
    print("\n" + json.dumps(_steps(arguments) if kind == "steps" else _links(arguments)), flush=True)


def _steps(arguments: list[str]) -> Any:
    from phalanx.calibration.step_bench import time_jobs

    device, compute, threads, seconds = arguments
    assert device in ("cpu", "cuda") and compute in ("fp32", "bf16", "fp8"), arguments
    return time_jobs(device, compute, int(threads), float(seconds))  # type: ignore[arg-type]


def _links(arguments: list[str]) -> Any:
    kind, rank, ranks, port, seconds = arguments
    device = accelerator.of(kind).device(int(rank))
    accelerator.of(kind).set_device(device)
    torch.set_num_threads(1)
    backend = accelerator.of(kind).backend
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=int(rank), world_size=int(ranks))
    try:
        return time_collectives(device, float(seconds))
    finally:
        dist.destroy_process_group()


def time_collectives(device: torch.device, seconds: float) -> list[dict[str, Any]]:
    """Times all-reduce, all-gather and a message there and back at each of SIZES. All ranks return the same rows."""
    ranks, rows = dist.get_world_size(), []
    for size in SIZES:
        whole = torch.zeros(size // 4, device=device)
        shard = torch.zeros(size // 4 // ranks, device=device)
        collectives: dict[str, Callable[[], Any]] = {
            "all-reduce": partial(dist.all_reduce, whole),
            "all-gather": partial(dist.all_gather_into_tensor, whole, shard),
            "message": partial(_ping, whole),
        }
        for name, collective in collectives.items():
            rows.append({"name": name, "bytes": size, "seconds": _typical_seconds(collective, device, seconds / 9)})
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


if __name__ == "__main__":
    main()
