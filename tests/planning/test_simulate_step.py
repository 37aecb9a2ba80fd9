"""One simulated step: what the schedule alone says where no link is shared, and what sharing costs where one is."""

from __future__ import annotations

import json
from itertools import pairwise, product

import pytest

from phalanx.dashboard.simulation_view import step_trace
from phalanx.planning.simulate.simulated_step import Flow, SharedLinks, SimulatedStep, Traffic, durations_of, simulate_step
from phalanx.schedules.makers import NAMES, make
from phalanx.schedules.timing import bubble, simulate

PIECES = {"forward": 1.0, "input": 1.1, "weight": 0.9, "head": 0.0, "hop": 0.0, "tail": 0.3}
QUIET = Traffic()


def adds_up(step: SimulatedStep) -> None:
    assert sum(step.split.values()) == pytest.approx(step.seconds)


@pytest.mark.parametrize(("name", "shape"), list(product(NAMES, [(4, 8), (3, 7), (2, 2), (1, 4), (8, 32)])), ids=str)
def test_where_nothing_contends_it_is_the_schedules_own_time(name: str, shape: tuple[int, int]) -> None:
    order = make(name, *shape)
    for pieces in (PIECES, PIECES | {"head": 0.4}, PIECES | {"hop": 0.02}):
        # Messages that actions wait for are in their times already; an island's link has no other user here.
        step = simulate_step(order, pieces, Traffic(inside=(("tensor", "island", 0.2),)), other=0.1)
        alone = simulate(order, durations_of(order, pieces), pieces["hop"])
        assert step.split["contention"] >= -1e-9
        adds_up(step)
        if pieces["hop"] == 0.0:
            assert [[timed[:3] for timed in row] for row in step.timeline.ranks] == [
                list(map(tuple, row)) for row in order.actions
            ]
            assert step.timeline.stop == pytest.approx(alone.stop) and step.bubble == pytest.approx(bubble(alone))
            assert step.seconds == pytest.approx(alone.stop + 0.3 + 0.1)


@pytest.mark.parametrize("shape", [(4, 8), (3, 7), (8, 32)])
def test_the_closed_form_of_the_commonest_schedules(shape: tuple[int, int]) -> None:
    """m (F + B) + (p - 1) (F + B) / v + tail; the head is the last rank's, with every micro-batch."""
    ranks, count = shape
    for name, per_rank in (("gpipe", 1), ("1f1b", 1), ("interleaved-1f1b", 2), ("interleaved-1f1b", 4)):
        if count % ranks and per_rank > 1:
            continue
        step = simulate_step(make(name, ranks, count, per_rank), PIECES, QUIET)
        assert step.seconds == pytest.approx(count * 3.0 + (ranks - 1) * 3.0 / per_rank + 0.3)
        assert step.split["bubble"] == pytest.approx((ranks - 1) * 3.0 / per_rank)
    headed = simulate_step(make("1f1b", ranks, count), PIECES | {"head": 0.5}, QUIET)
    assert headed.seconds == pytest.approx(count * 3.5 + (ranks - 1) * 3.0 + 0.3)


def test_a_shared_link_gives_everybody_a_part() -> None:
    links = SharedLinks()
    first, second = (
        Flow((("network out", 0), ("network in", 1)), 2.0, 0.0, 0.0),
        Flow((("network out", 0), ("network in", 2)), 2.0, 1.0, 1.0),
    )
    assert links.start(first) == [first] and first.arrives == 2.0
    assert {id(flow) for flow in links.start(second)} == {id(first), id(second)}
    assert first.arrives == 3.0 and second.arrives == 5.0  # a second of work each, at half the speed
    assert links.stop(first, 3.0) == [second] and second.arrives == 4.0
    third = Flow((("network out", 3),), 1.0, 3.0, 3.0)
    assert links.start(third) == [third] and third.arrives == 4.0  # another link


def test_messages_of_several_dimensions_share_the_network() -> None:
    """Expert messages, hops and gradients all want the NIC: the step becomes longer, and only by what they share."""
    order, pieces = make("1f1b", 4, 8), PIECES | {"hop": 0.3}
    apart = simulate_step(order, pieces, Traffic(inside=(("expert", "island", 0.3),)))
    shared = simulate_step(order, pieces, Traffic(inside=(("expert", "network", 0.3),)))
    crowded = simulate_step(order, pieces, Traffic(inside=(("expert", "network", 0.3),), final=("network", 1.0)))
    assert apart.split["contention"] <= shared.split["contention"] < crowded.split["contention"]
    assert shared.split["contention"] > 0 and {one.dimension for one in crowded.messages} == {"expert", "pipeline", "data"}
    for step in (apart, shared, crowded):
        adds_up(step)
        assert step.split["expert"] == pytest.approx(0.3 * 8 * 3.0)
    # No link ever carries more than it can: shares of what is under way add up to one at most.
    hops = [one for one in shared.messages if one.dimension == "pipeline" and one.link == "network out"]
    assert len(hops) == 2 * 3 * 8 and all(one.stop - one.start >= 0.3 - 1e-9 for one in hops)
    sharing = simulate_step(order, pieces, Traffic(overlapped=("network", 0.9)))
    assert sharing.split["contention"] > 0


def test_parameters_behind_every_action_are_hidden_where_nobody_else_sends() -> None:
    step = simulate_step(make("1f1b", 1, 6), PIECES, Traffic(overlapped=("network", 0.9), final=("network", 0.1)))
    assert step.seconds == pytest.approx(6 * 3.0 + 0.3) and step.split["contention"] == pytest.approx(0.0)


@pytest.mark.parametrize("name", ["1f1b", "dualpipev"])
def test_a_trace_for_perfetto(name: str) -> None:
    order = make(name, 4, 8)
    step = simulate_step(order, PIECES | {"hop": 0.3}, Traffic(inside=(("expert", "network", 0.3),)))
    events = json.loads(step_trace(step))["traceEvents"]
    slices = [one for one in events if one["ph"] == "X"]
    ranks = [one for one in slices if one["pid"] == 1 and one["cat"] != "tail"]
    assert sorted(one["name"] for one in ranks) == sorted(str(action) for row in order.actions for action in row)
    assert max(one["ts"] + one["dur"] for one in slices) == pytest.approx(1e6 * step.seconds)
    names = {one["args"]["name"] for one in events if one["name"] == "thread_name"}
    assert {"rank 0", "rank 3", "rank 0 network out"} <= names
    # Slices of one track lie beside each other.
    for track in {(one["pid"], one["tid"]) for one in slices}:
        mine = sorted((one["ts"], one["dur"]) for one in slices if (one["pid"], one["tid"]) == track)
        assert all(a[0] + a[1] <= b[0] + 1e-3 for a, b in pairwise(mine))
