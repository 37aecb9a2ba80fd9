"""Records of imaginary runs, as the tests of this room need them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from phalanx.events.records import RunStarted, Step

Make = Callable[..., Any]


@pytest.fixture
def started() -> Make:
    def make(**values: Any) -> RunStarted:
        usual: dict[str, Any] = {
            "version": "1", "ranks": 4, "device": "cpu", "steps": 300, "parameters": 3_345_152, "micro_batch": 4,
            "accumulation": 2, "layout": {"data": 4}, "compute": "fp32", "time": 1000.0,
        }  # fmt: skip
        return RunStarted(**(usual | values))

    return make


@pytest.fixture
def step() -> Make:
    """Step n: loss 10 − n/100, 1000 tokens, two seconds after the one before."""

    def make(number: int, **values: Any) -> Step:
        usual: dict[str, Any] = {
            "loss": 10 - number / 100, "tokens": 1000, "samples": 8 * number, "batch_digest": "0", "learning_rate": 3e-4, "grad_norm": 0.812,
            "seconds": 2.0, "tokens_per_second": 500.0, "flops_per_second": 1.24e12, "mfu": 0.4123, "memory": 3 * 2**30,
            "time": 1000.0 + 2 * number,
        }  # fmt: skip
        return Step(step=number, **(usual | values))

    return make
