"""Messages: against rings counted by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from phalanx.planning.cost.job_table import JobTable
from phalanx.planning.cost.step_time import exchange, gather, group, hop
from phalanx.planning.machines.rates import Rates

RATES = Rates(island=1.0, network=1.0, latency=0.0, far_latency=0.0)


def work(**values: Any) -> JobTable:
    model = dict.fromkeys(
        ("layers", "dim", "attention_weights", "score_width", "value_width", "kv_width", "heads", "kv_heads", "ffn", "gated"), 1
    )
    machine = {"peak": 1.0, "peak16": 1.0, "bandwidth": 1.0, "memory": 1.0, "island": 8}
    links = {"island_bandwidth": 400e9, "network": 50e9}
    rest = {"vocab": 1, "tied": 0, "sequence": 1, "batch": 1, "micro_batch": 1, "ranks": 64}
    return JobTable(**(model | machine | links | rest | values))


def ring(parts: int, size: float, bandwidth: float) -> float:
    """Step by step: in each of n-1 steps every rank passes on one n-th."""
    return sum(size / parts / bandwidth for _ in range(parts - 1))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_inside_an_island_a_gather_is_a_ring_on_its_links(size: int) -> None:
    wires = group(work(), RATES, size)
    assert float(gather(wires, 1e9)) == pytest.approx(ring(size, 1e9, 400e9))


def test_out_of_an_island_all_its_members_cards_carry_the_ring() -> None:
    assert float(gather(group(work(), RATES, 64), 1e9)) == pytest.approx(
        ring(64, 1e9, 400e9)
    )  # 8 cards of 50 GB/s are as quick
    assert float(gather(group(work(), RATES, 8, stride=8), 1e9)) == pytest.approx(ring(8, 1e9, 50e9))  # one of each island
    assert float(gather(group(work(), RATES, 16, stride=4), 1e9)) == pytest.approx(ring(16, 1e9, 100e9))  # two of each


def test_group_of_one_rank_costs_nothing() -> None:
    slow = Rates(latency=1.0, far_latency=1.0)
    assert float(gather(group(work(), slow, 1), 1e9)) == 0.0
    assert float(exchange(work(active=2), slow, 1, 1e9)) == 0.0


def test_latency_grows_with_the_islands_of_a_ring() -> None:
    rates = Rates(latency=1e-5, far_latency=1e-6)
    assert float(group(work(), rates, 8).latency) == pytest.approx(1e-5)
    assert float(group(work(), rates, 64).latency) == pytest.approx(1e-5 + 7e-6)
    assert float(group(work(), rates, 16, stride=4).latency) == pytest.approx(1e-5 + 7e-6)  # two ranks of eight islands each


def test_a_token_goes_to_an_island_once_however_many_experts_it_has_there() -> None:
    """Eight copies of a token among 64 ranks of eight islands: all eight may leave, but at most four groups are asked."""
    copies, limited = 8e9, work(active=8, active_groups=4)
    assert float(exchange(limited, RATES, 64, copies)) == pytest.approx(copies * 4 / 8 * 7 / 8 / 50e9)
    inside = exchange(limited, RATES, 8, copies)
    assert float(inside) == pytest.approx(copies * 7 / 8 / 400e9)


def test_hop_inside_an_island_uses_fast_links() -> None:
    assert float(hop(work(), RATES, 1e9, 4)) == pytest.approx(1e9 / 400e9)
    assert float(hop(work(), RATES, 1e9, 8)) == pytest.approx(1e9 / 50e9)


def test_collectives_of_columns_equal_those_of_numbers() -> None:
    sizes = np.array([1, 2, 8, 64])
    together = gather(group(work(), RATES, sizes), 1e9)
    assert together == pytest.approx([float(gather(group(work(), RATES, int(size)), 1e9)) for size in sizes])


def test_a_shared_bus_gives_each_rank_less() -> None:
    rates = replace(RATES, bus=0.5)
    bus, links = (group(work(island_bandwidth=speed), rates, 8).per_byte for speed in (32e9, 400e9))
    assert bus == pytest.approx((1 - 1 / 8) / 16e9)
    assert links == pytest.approx((1 - 1 / 8) / 400e9)
