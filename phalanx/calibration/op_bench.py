"""What one device of this machine reaches, operation by operation: matrix products, attention, memory, launches, copies to and from the
host, the disk. `calibration/measure_machine` shows the rows, and fits constants where real steps do not tell.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx.transforms import fp8

Row = dict[str, Any]
"""what, shape, value, unit, and for the reader's own use seconds of one repetition."""

_DISK = 128 << 20
_FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def best_seconds(work: Callable[[], object], device: torch.device, budget: float) -> float:
    """The quickest of as many repetitions as fit into the budget: what else runs on the machine only ever adds."""
    work()
    _finish(device)
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < 3 or (time.perf_counter() - begin < budget and len(taken) < 100):
        start = time.perf_counter()
        work()
        _finish(device)
        taken.append(time.perf_counter() - start)
    return min(taken)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def products(device: torch.device, compute: str, budget: float) -> Iterator[Row]:
    """Square ones of several sizes, a wide one as in a feed-forward layer, and two whose sizes suit nobody."""
    if compute == "fp8" and (device.type != "cuda" or fp8.available(device)):
        return  # cores only pretend to
    on_gpu = device.type == "cuda"
    sizes = [(n, n, n) for n in ((1024, 2048, 4096, 8192) if on_gpu else (128, 256, 512, 1024))]
    sizes += [(4096, 14336, 4096), (4096, 4096, 4100), (4096, 4096, 4095)] if on_gpu else [(512, 384, 128), (512, 509, 509)]
    rate = math.inf
    for m, n, k in sizes:
        if compute == "fp8" and (n % 16 or k % 16):
            continue  # the kernels refuse them, and the runtime computes them in bf16
        if 2 * m * n * k / rate > max(budget / len(sizes), 1.0):
            continue  # cores without instructions for a format take a minute for what others do in a moment
        work = _product(device, compute, m, n, k)
        # Short ones are queued up on a GPU, so that their launches do not count.
        often = max(1, int(2e11 / (2 * m * n * k))) if on_gpu else 1
        seconds = best_seconds(partial(_often, work, often), device, budget / len(sizes)) / often
        rate = 2 * m * n * k / seconds
        yield {"what": f"{compute} product", "shape": f"{m} x {n} x {k}", "value": rate, "unit": "FLOP/s"}


def _often(work: Callable[[], object], times: int) -> None:
    for _ in range(times):
        work()


def _product(device: torch.device, compute: str, m: int, n: int, k: int) -> Callable[[], Tensor]:
    if compute == "fp8":
        a = torch.randn(m, k, device=device).to(torch.float8_e4m3fn)
        b = torch.randn(n, k, device=device).to(torch.float8_e4m3fn).t()
        one = torch.ones((), device=device)
        return lambda: torch._scaled_mm(a, b, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    dtype = _FORMATS[compute]
    left, right = torch.randn(m, k, device=device, dtype=dtype), torch.randn(k, n, device=device, dtype=dtype)
    return lambda: left @ right


def attention(device: torch.device, compute: str, budget: float) -> Iterator[Row]:
    """Causal, forward and back, by the width of a head and the length of the sequence. Half of the scores count."""
    on_gpu = device.type == "cuda"
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
        back = best_seconds(grads, device, budget / 15)
        flops = 2 * rows * heads * length * length * width
        shape = f"head {width}, {length} tokens"
        yield {"what": f"{compute} attention forward", "shape": shape, "value": flops / forward, "unit": "FLOP/s"}
        yield {"what": f"{compute} attention backward", "shape": shape, "value": 2.5 * flops / back, "unit": "FLOP/s"}


def memory(device: torch.device, budget: float) -> Row:
    """Bytes read and written by a copy that is too large for caches."""
    count = (1 << 28) if device.type == "cuda" else (1 << 25)
    source = torch.zeros(count, device=device)
    target = torch.empty_like(source)
    seconds = best_seconds(lambda: target.copy_(source), device, budget)
    return {
        "what": "memory",
        "shape": f"copy of {source.nbytes >> 20} MiB",
        "value": 2 * source.nbytes / seconds,
        "unit": "B/s",
    }


def launch(device: torch.device, budget: float) -> Row:
    """Seconds that one small operation takes the host."""
    small = torch.zeros(64, device=device)

    def many() -> None:
        for _ in range(200):
            small.add_(1.0)

    many()
    _finish(device)
    taken: list[float] = []
    begin = time.perf_counter()
    while len(taken) < 5 or time.perf_counter() - begin < budget:
        start = time.perf_counter()
        many()  # on a GPU the queue takes them all before the first is done
        taken.append((time.perf_counter() - start) / 200)
        _finish(device)
    return {"what": "launch of an operation", "shape": "64 numbers", "value": min(taken), "unit": "s"}


def host_copies(device: torch.device, budget: float) -> Iterator[Row]:
    """From the host's memory to the device and back, pinned."""
    here = torch.zeros(64 << 20, dtype=torch.uint8).pin_memory()
    there = torch.empty_like(here, device=device)
    for name, work in (("host to device", lambda: there.copy_(here)), ("device to host", lambda: here.copy_(there))):
        seconds = best_seconds(work, device, budget / 2)
        yield {"what": name, "shape": "64 MiB", "value": here.nbytes / seconds, "unit": "B/s"}


def disk(folder: Path) -> Row | None:
    """Bytes written, on the disk and not in a cache; None where nothing can be written there."""
    block = os.urandom(1 << 20)  # a file system that compresses must not look fast
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".phalanx-bench-") as file:
            begin = time.perf_counter()
            for _ in range(_DISK // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - begin
    except OSError:
        return None
    return {"what": "disk", "shape": f"{_DISK >> 20} MiB written", "value": _DISK / seconds, "unit": "B/s"}
