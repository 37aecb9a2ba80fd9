"""What this machine's devices exchange: all-reduce, all-gather and messages, as one of the ranks that `calibration/measure_machine` starts. gloo
between cores, NCCL between GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

SIZES = (4096, 1 << 20, 32 << 20)


def collectives(device: str, rank: int, ranks: int, port: int, seconds: float) -> list[dict[str, Any]]:
    """Rows of this rank: seconds of each collective at each size; the same on all ranks."""
    backend = "nccl" if device == "cuda" else "gloo"
    here = torch.device("cuda", rank) if device == "cuda" else torch.device("cpu")
    if device == "cuda":
        torch.cuda.set_device(here)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    try:
        found = []
        for size in SIZES:
            whole = torch.zeros(size // 4, device=here)
            part = torch.zeros(size // 4 // ranks, device=here)
            kinds: dict[str, Callable[[], Any]] = {
                "all-reduce": partial(dist.all_reduce, whole),
                "all-gather": partial(dist.all_gather_into_tensor, whole, part),
                "message": partial(_ping, whole, rank),
            }
            for name, work in kinds.items():
                found.append({"name": name, "bytes": size, "seconds": _timed(work, here, seconds / 9)})
        return found
    finally:
        dist.destroy_process_group()


def _ping(tensor: torch.Tensor, rank: int) -> None:
    """From rank 0 to rank 1 and back; the others look on."""
    if rank > 1:
        return
    for sender in (0, 1):
        if rank == sender:
            dist.send(tensor, 1 - sender)
        else:
            dist.recv(tensor, sender)


def _timed(work: Callable[[], Any], device: torch.device, budget: float) -> float:
    """The usual time of one; all ranks agree on how many are made."""
    work()
    begin = time.perf_counter()
    for _ in range(3):
        work()
    _finish(device)
    each = torch.tensor([(time.perf_counter() - begin) / 3], device=device)
    dist.all_reduce(each, dist.ReduceOp.MAX)
    count = min(500, max(5, int(budget / max(float(each), 1e-6))))
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        work()
        _finish(device)
        taken.append(time.perf_counter() - start)
    return sorted(taken)[len(taken) // 3]


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
