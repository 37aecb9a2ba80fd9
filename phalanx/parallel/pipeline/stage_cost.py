"""What the parts of a model really take on this device, for cutting it into pipeline stages. Training asks for it where the
run wants stages cut by measured time; without measuring, `schedules/stage_split` counts operations."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median

import torch
from torch import Tensor

from phalanx.parallel.mesh import Mesh

_REPEATS = 5


def measure_costs(kinds: Mapping[str, Callable[[], Tensor]], mesh: Mesh) -> dict[str, float]:
    """Seconds of forward and backward of each kind of part. Rank 0 measures, so that all cut alike.

    Each callable runs one forward at the sizes of the run and returns its output; backward goes from its sum.
    """
    found = {name: seconds(forward, mesh.device) for name, forward in kinds.items()} if mesh.rank == 0 else None
    return mesh.broadcast_object(found)


def seconds(forward: Callable[[], Tensor], device: torch.device) -> float:
    """The median of a few runs, after one that warms up."""

    def once() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        output = forward()
        if output.requires_grad:
            output.sum().backward()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    return median(once() for _ in range(_REPEATS))
