"""Shows that a device computes rightly and at speed, before a run trusts it. A forked worker runs it on the order `Compute`.

Products of small whole numbers have exact results in every number format and in every order of sums, so a single wrong bit is an error on any
hardware. The digest covers what has no exact result: it is equal on devices of the same model, with the same version of torch.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from phalanx import accelerator
from phalanx.control.protocol import Compute
from phalanx.host.host_check import DeviceResult
from phalanx.host.probe import processor_name

_LENGTH = 256  # of the sums that are checked: exact in bf16, as are all their parts
_SIDE = 128  # rows and columns of a result
_TILES = 16  # of such results next to each other on a GPU, so that all its processors take part
_FORMATS = {"fp32": torch.float32, "fp16": torch.float16}  # others are computed in bf16
_REPEATS = 16
_CPU_SECONDS = 0.1  # after which a CPU repeats no more: without vector instructions it is hundreds of times slower in bf16


def results(order: Compute) -> Iterator[DeviceResult]:
    """What each device of a slot computes."""
    for kind in order.devices:
        name = "CPU" if kind == "cpu" else f"GPU {order.slot}"
        torch.set_num_threads(1)  # the bits of a sum depend on the number of threads
        try:
            device = accelerator.of(kind).device(order.slot)
            accelerator.of(kind).set_device(device)
            result = check(device, _FORMATS.get(order.compute, torch.bfloat16), wrong=order.wrong)
            yield replace(result, name=name)
        except Exception as error:  # whatever a broken driver or device raises is the result
            yield DeviceResult(name=name, problem=f"{type(error).__name__}: {error}".strip().partition("\n")[0])


def check(device: torch.device, dtype: torch.dtype, *, wrong: bool = False) -> DeviceResult:
    """Compute on one device. `wrong`: flip one bit, as a broken device would."""
    generator, kind = torch.Generator().manual_seed(1), accelerator.of(device)
    tiles = _TILES if kind.asynchronous else 1

    def product(most: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """A product of matrices of whole numbers, and the exact one, computed with integers."""
        left = torch.randint(-most, most + 1, (_SIDE, _LENGTH), generator=generator)
        right = torch.randint(-most, most + 1, (_LENGTH, _SIDE), generator=generator)
        found = left.repeat(tiles, 1).to(device, dtype) @ right.repeat(1, tiles).to(device, dtype)
        return found, (left @ right).repeat(tiles, tiles)

    # In fp32, larger numbers use more bits: 256 × 127² is below 2²⁴, and each is exact in TF32, too.
    products = [product(1, dtype), product(127, torch.float32), product(127, torch.float64)]
    if wrong:
        bits = products[0][0].view(torch.int32 if dtype == torch.float32 else torch.int16)
        bits[_SIDE // 2, _SIDE // 3] ^= 1 << 9
    left, right = torch.randn(2, _SIDE, _LENGTH, generator=generator).to(device, dtype)
    inexact = functional.gelu(functional.softmax(left @ right.T, -1, dtype=torch.float32)).cumsum(0)
    model = processor_name() if device.type == "cpu" else kind.name(device)
    return DeviceResult(
        name=str(device),
        model=f"{model}, torch {torch.__version__}",
        wrong=sum(int((found.cpu().double() != exact.double()).sum()) for found, exact in products),
        digest=hashlib.sha256(bytes(inexact.cpu().contiguous().view(torch.uint8).numpy())).hexdigest()[:16],
        flops=_flops(device, dtype, 2 * _SIDE * tiles if kind.asynchronous else _SIDE),
    )


def _flops(device: torch.device, dtype: torch.dtype, size: int) -> float:
    """FLOP/s of matrix products, the best of a few. On CPUs by the time of this thread, so that other programs do not make it slower."""
    kind = accelerator.of(device)
    clock = time.perf_counter if kind.asynchronous else time.thread_time
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    spent: list[float] = []
    while len(spent) < _REPEATS and (kind.asynchronous or sum(spent) < _CPU_SECONDS):
        begin = clock()
        torch.mm(matrix, matrix)
        kind.synchronize(device)
        spent.append(clock() - begin)
    return 2.0 * size**3 / min(spent)
