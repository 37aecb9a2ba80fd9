"""Days, hours, dollars and energy against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from phalanx.planning.cost.run_cost import cost
from phalanx.planning.machines.hardware import hardware
from phalanx.spec.load import loads

H800 = hardware(loads('[train]\nbatch = 8\nsteps = 2\n[cluster]\nname = "h800-2048"\n'), None)


def test_price_of_deepseek_v3() -> None:
    """2.664M H800-hours of pre-training at 2 dollars, on 2,048 of them: 54 days, 5.328M dollars."""
    steps = 1000
    spent = cost(H800, step=2.664e6 * 3600 / 2048 / steps, steps=steps)
    assert spent.gpu_hours == pytest.approx(2.664e6)
    assert spent.dollars == pytest.approx(5.328e6)
    assert spent.days == pytest.approx(54.2, abs=0.05)
    assert spent.joules == pytest.approx(2.664e6 * 10.2 / 8 * 3.6e6)  # a node of 10.2 kW for eight


def test_price_includes_lost_time() -> None:
    whole, half = cost(H800, step=2.0, steps=10, devices=8), cost(H800, step=2.0, steps=10, devices=8, goodput=0.5)
    assert whole.gpu_hours == pytest.approx(8 * 20 / 3600)
    assert half.days == pytest.approx(2 * whole.days) and half.dollars == pytest.approx(2 * whole.dollars)


def test_price_of_columns_and_of_unknown_power() -> None:
    spent = cost(replace(H800, price=None, power=None), step=np.array([1.0, 2.0]), steps=3600)
    assert spent.gpu_hours == pytest.approx([2048, 4096])
    assert spent.dollars is None and spent.joules is None
