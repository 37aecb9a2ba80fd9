"""Measures operations on one device of this machine: matrix products, attention, memory, launches, host copies, the disk."""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx import accelerator
from phalanx.transforms import fp8

_DISK_BYTES = 128 << 20
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class Measurement:
    """One measured value."""

    what: str
    shape: str
    value: float
    unit: str
    """"s", "B/s" or "FLOP/s"."""
    seconds: float | None = None
    """Seconds of one repetition, for collectives."""


def best_seconds(work: Callable[[], object], device: torch.device, budget: float, *, launch_only: bool = False) -> float:
    """The fastest of as many repetitions as fit into `budget` seconds: other programs on the machine only add time. `launch_only`: until
    the host has launched the work, not until the device has done it."""
    synchronize = accelerator.of(device).synchronize
    work()
    synchronize(device)
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < 3 or (time.perf_counter() - begin < budget and len(taken) < 100):
        start = time.perf_counter()
        work()
        launched = time.perf_counter() - start
        synchronize(device)
        taken.append(launched if launch_only else time.perf_counter() - start)
    return min(taken)


def products(device: torch.device, compute: str, budget: float) -> Iterator[Measurement]:
    """Matrix products: square ones of several sizes, a wide one as in a feed-forward layer, and some of awkward sizes."""
    on_gpu = accelerator.of(device).asynchronous
    if compute == "fp8" and (not on_gpu or fp8.available(device)):
        return  # CPUs only emulate it
    sizes = [(n, n, n) for n in ((1024, 2048, 4096, 8192) if on_gpu else (128, 256, 512, 1024))]
    sizes += [(4096, 14336, 4096), (4096, 4096, 4100), (4096, 4096, 4095)] if on_gpu else [(512, 384, 128), (512, 509, 509)]
    rate = math.inf
    for m, n, k in sizes:
        if compute == "fp8" and (n % 16 or k % 16):
            continue  # the kernels refuse these sizes, and training computes them in bf16
        if 2 * m * n * k / rate > max(budget / len(sizes), 1.0):
            continue  # CPUs without instructions for a format can take a minute
        work = _product(device, compute, m, n, k)
        # On a GPU, short products are queued, so that their launches do not count.
        repeats = max(1, int(2e11 / (2 * m * n * k))) if on_gpu else 1
        seconds = best_seconds(partial(_repeat, work, repeats), device, budget / len(sizes)) / repeats
        rate = 2 * m * n * k / seconds
        yield Measurement(f"{compute} product", f"{m} x {n} x {k}", rate, "FLOP/s")


def _repeat(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


def _product(device: torch.device, compute: str, m: int, n: int, k: int) -> Callable[[], Tensor]:
    if compute == "fp8":
        a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
        scale = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
    dtype = _FORMATS[compute]
    left, right = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
    return lambda: left @ right


def attention(device: torch.device, compute: str, budget: float) -> Iterator[Measurement]:
    """Causal attention, forward and backward, by head width and sequence length. Half of the scores count as work."""
    on_gpu = accelerator.of(device).asynchronous
    dtype = _FORMATS.get(compute, torch.bfloat16)
    heads = 16 if on_gpu else 4
    shapes = [
        (width, length)
        for width in ((64, 128) if on_gpu else (32, 64))
        for length in ((1024, 4096, 16384) if on_gpu else (128, 512))
    ]
    for width, length in shapes:
        rows = max(1, 16384 // length) if on_gpu else 2
        q, k, v = (torch.randn(rows, heads, length, width, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
        attend = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
        forward = best_seconds(attend, device, budget / 20)
        out = attend()
        grads = partial(torch.autograd.grad, out, (q, k, v), torch.ones_like(out), retain_graph=True)
        backward = best_seconds(grads, device, budget / 15)
        flops = 2 * rows * heads * length * length * width
        shape = f"head {width}, {length} tokens"
        yield Measurement(f"{compute} attention forward", shape, flops / forward, "FLOP/s")
        yield Measurement(f"{compute} attention backward", shape, 2.5 * flops / backward, "FLOP/s")


def memory(device: torch.device, budget: float) -> Measurement:
    """Memory bandwidth: bytes read and written by a copy that is too large for caches."""
    count = (1 << 28) if accelerator.of(device).asynchronous else (1 << 25)
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    seconds = best_seconds(lambda: target.copy_(source), device, budget)
    return Measurement("memory", f"copy of {source.nbytes >> 20} MiB", 2 * source.nbytes / seconds, "B/s")


def launch(device: torch.device, budget: float) -> Measurement:
    """Seconds that the host needs to launch one small operation."""
    small = torch.zeros(64, device=device)

    # A GPU's queue accepts all of them before the first is done.
    seconds = best_seconds(partial(_repeat, lambda: small.add_(1.0), 200), device, budget, launch_only=True) / 200
    return Measurement("launch of an operation", "64 numbers", seconds, "s")


def host_copies(device: torch.device, budget: float) -> Iterator[Measurement]:
    """Copies between pinned host memory and the device."""
    host = accelerator.of(device).pin(torch.zeros(64 << 20, dtype=torch.uint8))
    copy = torch.empty_like(host, device=device)
    for name, work in (("host to device", lambda: copy.copy_(host)), ("device to host", lambda: host.copy_(copy))):
        seconds = best_seconds(work, device, budget / 2)
        yield Measurement(name, "64 MiB", host.nbytes / seconds, "B/s")


def disk(folder: Path) -> Measurement | None:
    """Write bandwidth of a folder's disk, without caches; None if the folder is not writable."""
    block = os.urandom(1 << 20)  # random bytes: a compressing file system would look too fast
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".phalanx-bench-") as file:
            begin = time.perf_counter()
            for _ in range(_DISK_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - begin
    except OSError:
        return None
    return Measurement("disk", f"{_DISK_BYTES >> 20} MiB written", _DISK_BYTES / seconds, "B/s")
