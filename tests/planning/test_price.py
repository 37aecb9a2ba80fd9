"""Dollars and energy against sums done by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from phalanx.planning.cost.run_cost import price_and_energy
from phalanx.planning.machines.hardware import hardware
from phalanx.spec.load import loads

H800 = hardware(loads('[train]\nbatch = 8\nsteps = 2\n[cluster]\nname = "h800-2048"\n'), None)


def test_price_of_deepseek_v3() -> None:
    """2.664M H800-hours of pre-training at 2 dollars, on 2,048 of them: 5.328M dollars."""
    dollars, joules = price_and_energy(H800, 2048, 2.664e6 * 3600 / 2048)
    assert dollars == pytest.approx(5.328e6)
    assert joules == pytest.approx(2.664e6 * 10.2 / 8 * 3.6e6)  # a node of 10.2 kW for eight


def test_price_and_energy_are_unknown_without_their_rates() -> None:
    assert price_and_energy(replace(H800, price=None, power=None), 2048, 3600.0) == (None, None)
