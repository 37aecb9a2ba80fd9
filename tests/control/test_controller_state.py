"""What the controller concludes from the reports of a generation: the newest usable state and the ranks that have it."""

from __future__ import annotations

import json

import pytest
from controllers import plan_on

from phalanx.control.codec import decode, encode
from phalanx.control.controller_state import ControllerState, Generation
from phalanx.control.protocol import (
    Beats,
    BeginGeneration,
    BeginRank,
    ConnectionLost,
    FirstStepDone,
    Join,
    Kill,
    RankEnded,
    RankFailure,
    RankPaused,
    RankRestored,
    ReplicasDiffer,
    StateSource,
    SurvivorReport,
    WorkerInfo,
)
from phalanx.events.fault_log import fault_record
from phalanx.events.heartbeat import Beat
from phalanx.faults.grammar import parse
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Place, Plan, Promise


def of(layout: Layout) -> Generation:
    return Generation(3, plan_on(layout), (0,) * (layout.ranks // 2) + (1,) * (layout.ranks - layout.ranks // 2))


def stand(current: Generation, rank: int, step: int | None, *, prepared: bool = False, divisor: float | None = None) -> None:
    bad = None if divisor is None else 0.0
    current.update(SurvivorReport(generation=3, rank=rank, step=step, prepared=prepared, divisor=divisor, bad=bad))


def test_survivors_share_the_previous_step_if_none_applied_the_next() -> None:
    current = of(Layout(data=4))
    current.dead.add(2)
    for rank in (0, 1, 3):
        stand(current, rank, 7, prepared=rank == 1, divisor=1.5)
    target = current.newest_state()
    assert target is not None
    assert target[:2] == (7, [0, 1, 3])
    assert current.step == 7


def test_prepared_survivors_roll_forward_to_the_newest_step() -> None:
    current = of(Layout(data=4))
    current.dead.add(0)
    stand(current, 1, 7, prepared=True, divisor=1.5)  # of step 7
    stand(current, 2, 8, divisor=2.5)
    stand(current, 3, 7, prepared=True)
    target = current.newest_state()
    assert target is not None
    step, contributors, ahead = target
    assert (step, contributors) == (8, [1, 2, 3])
    assert (ahead.divisor, ahead.bad) == (2.5, 0.0)


def test_survivors_that_cannot_reach_the_newest_step_do_not_contribute() -> None:
    current = of(Layout(data=4))
    stand(current, 0, 8, divisor=2.5)
    stand(current, 1, 7)  # not prepared
    stand(current, 2, None)  # in the middle of an update, or not built yet
    stand(current, 3, 6, prepared=True)  # two behind
    assert current.newest_state() == (8, [0], current.survivors[0])


@pytest.mark.parametrize(
    ("what", "guilty", "valid", "left"),
    [
        ("weights", [1], 9, [0, 2, 3]),  # they changed after the last update
        ("weights", [1], 5, None),  # gradients computed with them have reached everybody
        ("weights", [1], None, [0, 2, 3]),  # no update since the state was restored
        ("weights", [], None, None),  # it cannot be told whose are right
        ("gradients", [], 9, [0, 1, 2, 3]),  # they were not applied
    ],
)
def test_corrupt_states_are_not_used(what: str, guilty: list[int], valid: int | None, left: list[int] | None) -> None:
    current = of(Layout(data=4))
    for rank in range(4):
        stand(current, rank, 9, divisor=1.0)
        current.restored[rank] = 9 if valid is None else 3
    current.update(ReplicasDiffer(generation=3, rank=0, culprits=guilty, what=what, last_valid=valid, reason="they differ"))
    target = current.newest_state()
    assert (None if target is None else target[1]) == left


def test_no_newest_state_without_survivor_states() -> None:
    current = of(Layout(data=2))
    assert current.newest_state() is None and current.step is None
    stand(current, 0, None)
    assert current.newest_state() is None


def test_reports_of_dead_ranks_are_ignored() -> None:
    current = of(Layout(data=2))
    stand(current, 0, 8, divisor=2.0)
    stand(current, 1, 7)
    current.dead.add(0)
    assert current.newest_state() == (7, [1], current.survivors[1])


def test_contributors_must_cover_all_pipeline_stages() -> None:
    current = of(Layout(pipeline=2, data=2, tensor=2))
    assert current.covers_all_stages([0, 7])
    assert not current.covers_all_stages([0, 1, 2, 3])
    assert not current.covers_all_stages([])


def test_reports_are_recorded_by_rank() -> None:
    current = of(Layout(data=2))
    reports = [
        RankRestored(generation=3, rank=0, step=4),
        FirstStepDone(generation=3, rank=0),
        ConnectionLost(generation=3, rank=1, reason="Connection closed by peer"),
        ConnectionLost(generation=3, rank=1, reason="and again"),
        RankPaused(generation=3, rank=1),
        RankEnded(generation=3, rank=0, code=0),
    ]
    for report in reports:
        current.update(report)
    first = current.first_steps[0]
    current.update(FirstStepDone(generation=3, rank=0))
    assert current.first_steps == {0: first}, "the first step is the one that counts"
    assert (current.restored, current.paused, current.ended) == ({0: 4}, {1}, {0: 0})
    assert current.disconnected == {1: "Connection closed by peer"}
    assert not current.complete
    current.update(RankEnded(generation=3, rank=1, code=75))
    assert current.complete


def test_messages_survive_json() -> None:
    failure = RankFailure(cause="hung", reason="rank 1 hangs", traceback="stack")
    source = StateSource(in_memory=True, generation=2, step=7, ranks=2, servers=[["127.0.0.1", 1]])
    promise = Promise(seconds=1.0, low=0.9, high=1.2, tokens_per_second=10.0, memory={"state": 3.0}, total_memory=4.0)
    plan = Plan(
        layout=Layout(data=2), device="cpu", threads=1, micro_batch=1, accumulation=1, compute="fp32", parameters=10,
        flops_per_token=60.0, peak_flops=None, promise=promise, placement={"nodes": [[0, 1]]},
    )  # fmt: skip
    begin = BeginGeneration(
        term=2, generation=3, plan=plan, nodes=[[0, 1]], source=source,
        store=["127.0.0.1", 2], copy_every=None, save_only=False, author=0,
    )  # fmt: skip
    worker = WorkerInfo(rank=0, generation=3, exit_code=None)
    place = Place(rank=1, ranks=2, store=("127.0.0.1", 2), token="t", generation=3)
    for message in (
        BeginRank(begin=begin, place=place, heartbeat="/h", chaos=""),
        Kill(term=1, generation=3, ranks=[1], failure=failure),
        Join(
            node=0,
            name="0-a",
            slots=2,
            replica_server=["h", 1],
            workers={"0.1": worker},
            last_begin=begin,
            step=8,
            stopping=None,
        ),
        SurvivorReport(generation=3, rank=1, step=8, prepared=True),
    ):
        assert decode(json.loads(json.dumps(encode(message)))) == message
    beats = Beats(beats={"0": Beat(step=3, phase="data", generation=1)})
    assert Beat(*decode(json.loads(json.dumps(encode(beats)))).beats["0"]) == beats.beats["0"]


def test_injected_faults_are_known_by_number() -> None:
    chaos = "kill rank=1 step=5; fill-disk; kill rank=1 step=5; kill node=2 step=9"
    faults, state = parse(chaos), ControllerState(wanted=Layout())
    for number in (2, 3):
        state.on_fault(fault_record(faults[number], 5), chaos)
    assert state.injected == {0, 3}, "of two equal faults the first"
    state.on_fault(fault_record(faults[0], 5), chaos)
    assert state.injected == {0, 2, 3}
