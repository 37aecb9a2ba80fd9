"""Each rung of the ladder: what is decided, for which ranks, on which nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from happenings import corrupt, disconnected, node_lost, worker_died

from phalanx.recovery.policy import decide
from phalanx.recovery.relayout import Legal, initial_assignment
from phalanx.recovery.state import Event, Failure, NewGeneration, NodeJoined, Situation, Wait
from phalanx.spec.layout import Layout
from phalanx.spec.run import Resilience

LegalFor = Callable[..., Legal]
CUBE = Layout(pipeline=2, data=2, tensor=2)


def nodes(*slots: int) -> dict[int, int]:
    return dict(enumerate(slots))


def situation(layout: Layout, living: dict[int, int], **changes: Any) -> Situation:
    fields: dict[str, Any] = {
        "wanted": layout,
        "layout": layout,
        "assignment": initial_assignment(layout, living),
        "nodes": living,
    }
    return Situation(**(fields | changes))


def killed(rank: int) -> Failure:
    return worker_died(rank, 10, "died", f"rank {rank} was killed")


def fresh(go: NewGeneration) -> tuple[int, ...]:
    """New ranks that need a new process."""
    return tuple(rank for rank, old in enumerate(go.old) if old is None)


def went(before: Situation, event: Event | tuple[Event, ...], legal: Legal) -> NewGeneration:
    action = decide(before, event if isinstance(event, tuple) else (event,), legal)
    assert isinstance(action, NewGeneration), action
    return action


@pytest.fixture
def legal(legal_for: LegalFor) -> Legal:
    return legal_for(12)


@pytest.mark.parametrize("rank", [0, 5])
def test_a_dead_worker_is_started_again_where_it_was(legal: Legal, rank: int) -> None:
    before = situation(CUBE, nodes(4, 4))
    go = went(before, killed(rank), legal)
    assert (go.action, go.layout, go.assignment, fresh(go)) == ("restart", CUBE, before.assignment, (rank,))
    assert go.old == tuple(None if other == rank else other for other in range(8))


def test_broken_connections_need_no_new_process(legal: Legal) -> None:
    go = went(situation(CUBE, nodes(4, 4)), disconnected(10), legal)
    assert (go.action, go.layout, go.old) == ("restart", CUBE, tuple(range(8)))


def test_a_corrupt_rank_is_replaced(legal: Legal) -> None:
    before = situation(CUBE, nodes(4, 4))
    assert fresh(went(before, corrupt(3, 10), legal)) == (3,)
    assert fresh(went(before, corrupt(None, 10), legal)) == tuple(range(8))  # nobody's numbers are believed


def test_a_spare_node_takes_the_ranks_of_a_lost_one(legal: Legal) -> None:
    go = went(situation(CUBE, nodes(4, 4, 2, 4)), node_lost(0, 10), legal)
    assert (go.action, go.layout, fresh(go)) == ("spare", CUBE, (0, 1, 2, 3))
    assert go.assignment == (3, 3, 3, 3, 1, 1, 1, 1)
    assert go.old == (None, None, None, None, 4, 5, 6, 7)


def test_free_places_hold_whole_tensor_groups(legal: Legal) -> None:
    go = went(situation(CUBE, nodes(4, 4, 3, 2)), node_lost(1, 10), legal)
    assert go.action == "spare" and go.assignment == (0, 0, 0, 0, 2, 2, 3, 3)


def test_a_rank_joins_the_rest_of_its_tensor_group(legal: Legal) -> None:
    before = situation(CUBE, nodes(1, 5, 5), assignment=(0, 1, 1, 1, 2, 2, 2, 2))
    assert went(before, node_lost(0, 10), legal).assignment == (1, 1, 1, 1, 2, 2, 2, 2)


def test_a_place_that_is_gone_is_not_used(legal: Legal) -> None:
    """A device of node 1 died with its worker: the node has 3 places now."""
    go = went(replace(situation(CUBE, nodes(4, 4, 1)), nodes=nodes(4, 3, 1)), killed(6), legal)
    assert go.action == "spare" and fresh(go) == (6,) and go.assignment == (0, 0, 0, 0, 1, 1, 2, 1)


def test_run_without_spare_nodes_shrinks(legal: Legal) -> None:
    before = situation(CUBE, nodes(2, 2, 2, 2))
    go = went(before, node_lost(1, 10), legal)
    assert go.action == "shrink" and go.layout == Layout(pipeline=1, data=3, tensor=2)
    assert go.assignment == (0, 0, 2, 2, 3, 3) and go.old == (0, 1, 4, 5, 6, 7) and fresh(go) == ()


def test_run_shrinks_twice_and_grows_back(legal: Legal) -> None:
    state, ranks = situation(CUBE, nodes(2, 2, 2, 2)), []
    everything = state.nodes
    for event, living in (
        (node_lost(0, 10), (1, 2, 3)),
        (node_lost(3, 20), (1, 2)),
        (NodeJoined(0), (0, 1, 2)),
        (NodeJoined(3), (0, 1, 2, 3)),
    ):
        state = replace(state, nodes={node: everything[node] for node in living})
        go = went(state, event, legal)
        assert go.action == ("shrink" if isinstance(event, Failure) else "grow")
        ranks.append(go.layout.ranks)
        kept = [old for old in go.old if old is not None]
        assert len(kept) == min(go.layout.ranks, state.layout.ranks)  # every process that can be kept is
        assert all(state.assignment[old] == node for old, node in zip(go.old, go.assignment, strict=True) if old is not None)
        assert all(len({go.assignment[rank], go.assignment[rank + 1]}) == 1 for rank in range(0, go.layout.ranks, 2))
        state = replace(state, layout=go.layout, assignment=go.assignment)
    assert ranks == [6, 4, 6, 8] and state.layout == CUBE


def test_processes_are_kept_where_there_are_most(legal_for: LegalFor) -> None:
    """The first node has one survivor and 3 places, the other 4 of each; the batch is for 4 ranks or 8."""
    before = replace(situation(CUBE, nodes(4, 4)), nodes=nodes(3, 4))
    go = went(before, (killed(0), killed(1), killed(2)), legal_for(8))
    assert go.layout.ranks == 4 and go.assignment == (1, 1, 1, 1) and go.old == (4, 5, 6, 7)


def test_run_that_must_not_shrink_waits_for_the_node(legal: Legal) -> None:
    before = situation(CUBE, nodes(4, 4), settings=Resilience(shrink=False))
    wait = decide(before, [node_lost(1, 10)], legal)
    assert isinstance(wait, Wait) and wait.dead == (4, 5, 6, 7) and "resilience.shrink = false" in wait.reason
    waiting = replace(before, dead=wait.dead)
    assert isinstance(decide(replace(waiting, nodes=nodes(4)), [NodeJoined(0)], legal), Wait)
    back = went(waiting, NodeJoined(1), legal)  # it is there again, but what ran on it is not
    assert (back.action, back.assignment, fresh(back)) == ("restart", before.assignment, (4, 5, 6, 7))
    other = went(replace(waiting, nodes={0: 4, 7: 4}), NodeJoined(7), legal)
    assert (other.action, other.assignment[4:], fresh(other)) == ("spare", (7, 7, 7, 7), (4, 5, 6, 7))


def test_run_waits_if_no_layout_fits() -> None:
    wait = decide(situation(CUBE, nodes(4, 4)), [node_lost(1, 10)], lambda layout: layout.ranks == 8)
    assert isinstance(wait, Wait) and "8 ranks" in wait.reason and "1 node with 4 slots" in wait.reason
    gone = decide(situation(CUBE, nodes(4, 4)), (node_lost(0, 10), node_lost(1, 10)), lambda layout: True)
    assert isinstance(gone, Wait) and gone.dead == tuple(range(8))


def test_a_node_and_a_worker_at_once_are_one_decision(legal: Legal) -> None:
    event = (node_lost(1, 10), killed(3), killed(4))
    go = went(situation(CUBE, nodes(4, 4, 4)), event, legal)
    assert (go.action, fresh(go), go.assignment) == ("spare", (3, 4, 5, 6, 7), (0, 0, 0, 0, 2, 2, 2, 2))


def test_a_node_that_is_back_already_starts_its_ranks_again(legal: Legal) -> None:
    before = situation(CUBE, nodes(4, 4))
    go = went(before, (node_lost(1, 10), NodeJoined(1)), legal)
    assert (go.action, go.assignment, fresh(go)) == ("restart", before.assignment, (4, 5, 6, 7))


def test_a_node_that_is_not_needed_changes_nothing(legal: Legal) -> None:
    assert decide(situation(CUBE, nodes(4, 4, 4)), [NodeJoined(2)], legal) is None
    six = Layout(data=3, tensor=2)
    assert decide(situation(six, nodes(4, 3), wanted=CUBE), [NodeJoined(1)], legal) is None  # 7 are no better than 6


def test_a_failure_with_room_for_more_grows_at_once(legal: Legal) -> None:
    six = Layout(data=3, tensor=2)
    go = went(situation(six, nodes(2, 2, 2, 2), wanted=CUBE), killed(2), legal)
    assert (go.action, go.layout) == ("grow", CUBE) and len(fresh(go)) == 3


# --- healthy replicas go on -------------------------------------------------------------------------------------------


def test_healthy_replicas_go_on_in_their_processes(legal: Legal) -> None:
    before = situation(CUBE, nodes(4, 4), settings=Resilience(continue_degraded=True))
    go = went(before, killed(2), legal)  # of the second replica, which is ranks 2, 3, 6 and 7
    assert (go.action, go.layout) == ("shrink", replace(CUBE, data=1))
    assert (go.old, fresh(go), go.assignment) == ((0, 1, 4, 5), (), (0, 0, 1, 1))
    grown = went(replace(before, layout=go.layout, assignment=go.assignment), NodeJoined(0), legal)
    assert (grown.action, grown.layout, len(fresh(grown))) == ("grow", CUBE, 4)


def test_as_many_replicas_go_on_as_the_batch_allows(legal_for: LegalFor) -> None:
    before = situation(Layout(data=4), nodes(2, 2), settings=Resilience(continue_degraded=True))
    assert went(before, killed(0), legal_for(12)).old == (1, 2, 3)
    assert went(before, killed(0), legal_for(8)).old == (1, 2)
    assert went(before, killed(0), lambda layout: layout.data == 4).action == "restart"


def test_going_on_comes_before_growing(legal: Legal) -> None:
    before = situation(Layout(data=3), nodes(2, 2), wanted=Layout(data=4), settings=Resilience(continue_degraded=True))
    go = went(before, killed(0), legal)
    assert (go.action, go.old) == ("shrink", (1, 2))
    assert went(replace(before, layout=go.layout, assignment=go.assignment), NodeJoined(0), legal).layout == Layout(data=4)


def test_going_on_needs_a_whole_replica(legal: Legal) -> None:
    before = situation(CUBE, nodes(4, 4), settings=Resilience(continue_degraded=True))
    assert went(before, (killed(0), killed(3)), legal).action == "restart"
    assert (
        went(situation(Layout(data=1, shard=4), nodes(4), settings=Resilience(continue_degraded=True)), killed(0), legal).action
        == "restart"
    )
    assert went(before, disconnected(10), legal).action == "restart"
    assert went(before, (killed(2), disconnected(10)), legal).action == "shrink"


def test_the_first_places_leave_spare_nodes_idle() -> None:
    assert initial_assignment(CUBE, nodes(4, 4, 4)) == (0, 0, 0, 0, 1, 1, 1, 1)
    assert initial_assignment(CUBE, nodes(3, 3, 3)) == (0, 0, 1, 1, 2, 2, 2, 0)  # the last tensor group fits nowhere whole
    assert initial_assignment(Layout(data=1, tensor=8), nodes(4, 4)) == (0, 0, 0, 0, 1, 1, 1, 1)
