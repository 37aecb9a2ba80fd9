"""The computation that shows whether a device computes rightly."""

from __future__ import annotations

import pytest
import torch

from phalanx.control.protocol import Compute
from phalanx.host.host_check import DeviceResult
from phalanx.worker.compute_check import results


def compute(fmt: str, wrong: bool = False) -> list[DeviceResult]:
    threads = torch.get_num_threads()
    try:
        return list(results(Compute(slot=0, devices=["cpu"], compute=fmt, wrong=wrong)))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16", "fp8"])
def test_this_machine_computes_exactly_and_repeatably(fmt: str) -> None:
    (first,), (second,) = compute(fmt), compute(fmt)
    assert (first.wrong, first.problem, first.name) == (0, None, "CPU") and first.flops > 1e6
    assert first.digest == second.digest and first.model == second.model
    assert first.digest != compute("fp32" if fmt != "fp32" else "fp16")[0].digest


@pytest.mark.parametrize("fmt", ["fp32", "bf16", "fp16"])
def test_one_wrong_bit_is_seen(fmt: str) -> None:
    assert compute(fmt, wrong=True)[0].wrong == 1


def test_a_device_that_is_not_there_is_a_problem() -> None:
    (gpu,) = results(Compute(slot=99, devices=["cuda"], compute="fp32", wrong=False))
    assert gpu.name == "GPU 99" and gpu.problem
