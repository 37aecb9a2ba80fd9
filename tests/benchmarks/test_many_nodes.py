"""The control plane on many nodes: real controller, light agents, ranks on paper."""

from __future__ import annotations

import pytest
from many_nodes import measure


@pytest.mark.parametrize(
    "processes", [pytest.param(2, id="over connections"), pytest.param(0, id="in memory", marks=pytest.mark.slow)]
)
def test_lost_and_silent_nodes_are_noticed_and_nobody_else(processes: int) -> None:
    # A long heartbeat: a busy machine must not lose nodes that are only slow.
    check(measure(24, 4, 3, processes, steady=1.0, heartbeat=8.0), nodes=24, slots=4, lost=3)


@pytest.mark.slow
def test_two_thousand_nodes() -> None:
    """Without connections, so that it passes on few cores. `benchmarks/many_nodes.py` measures it with 16 cores and connections."""
    result = measure(2048, 8, 10, 0)
    print(result)
    check(result, nodes=2048, slots=8, lost=10)


def check(result: dict, *, nodes: int, slots: int, lost: int) -> None:
    ranks = (nodes - lost) * slots
    assert result["lose"]["nodes noticed"] == result["silence"]["nodes noticed"] == lost
    assert (result["lose"]["action"], result["lose"]["ranks"]) == ("spare", ranks)
    assert result["silence"]["action"] == "shrink" and result["silence"]["ranks"] < ranks
    assert set(result["steady"]["messages per second"]) == {"received Beats"}, "nothing else is said while nothing happens"
