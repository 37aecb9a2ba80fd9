"""Which state a run goes on from after a failure: the survivors' own, copies in memory, or the disk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from phalanx.checkpointing.replicas import replica_index
from phalanx.checkpointing.replicas.replica_index import Replica, ReplicaState
from phalanx.checkpointing.replicas.shm_slots import RankCopy
from phalanx.control.controller import Controller
from phalanx.control.recover import Recovery, noticed
from phalanx.control.state import Generation
from phalanx.recovery.state import Disconnected, NodeLost, WorkerDied
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Plan

PLAN = Plan(
    layout=Layout(data=2),
    device="cpu",
    threads=1,
    micro_batch=1,
    accumulation=1,
    compute="fp32",
    parameters=1,
    flops_per_token=1.0,
    peak_flops=None,
)


class Ranks:
    """A controller whose ranks do at once what they are told."""

    def __init__(self, current: Generation, covered: bool | None = True):
        """`covered`: what the survivors say of the state that they hand over; None: one dies instead."""
        self.current, self.covered = current, covered
        self.recovering = None
        self.troubles: list[Any] = []
        self.orders: list[dict[str, Any]] = []
        self.members = {node: SimpleNamespace(holder=("127.0.0.1", 1000 + node)) for node in (0, 1)}
        self.agent = SimpleNamespace(token="secret", spawn=self.forgot)
        self.overseer = SimpleNamespace(forget=lambda generation: generation)
        self.forgotten: list[int] = []

    def forgot(self, generation: int) -> None:
        self.forgotten.append(generation)

    def order(self, message: dict[str, Any]) -> None:
        self.orders.append(message)
        for rank in message["contributors"]:
            if self.covered is None:
                self.troubles.append(WorkerDied(rank, 8, "died", "it was killed"))
            else:
                self.current.hear({"say": "handed", "rank": rank, "covered": self.covered, "problem": None})

    async def until(self, met: Callable[[], bool], seconds: float) -> bool:
        return met()


def generation(*steps: int | None, prepared: tuple[int, ...] = ()) -> Generation:
    """Of which the first ranks stand at these steps, and the rest are dead."""
    current = Generation(4, PLAN, (0, 1))
    for rank in range(2):
        if rank >= len(steps):
            current.dead[rank] = WorkerDied(rank, None, "died", "it was killed")
            continue
        said = {"step": steps[rank], "prepared": rank in prepared, "divisor": 1.5, "bad": 0.0, "rewinds": 0}
        current.hear({"say": "standing", "rank": rank} | said)
    return current


def copy_of(step: int, generation: int = 3, left_out: int = 0) -> ReplicaState:
    contents = {"progress": {"left_out": [[0, 1]] * left_out}}
    copy = RankCopy(node=0, generation=generation, rank=0, ranks=1, slot="a", step=step, about={"bytes": 0}, contents=contents)
    return ReplicaState(generation, step, 1, ((Replica(copy, 0, ("127.0.0.1", 1000), "folder", "machine"),),))


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """What is decided, given the copies that the holders have."""

    def choose(ranks: Ranks, *copies: ReplicaState) -> dict[str, Any]:
        monkeypatch.setattr(replica_index, "complete_states", lambda addresses, token: list(copies))
        recovery = Recovery(cast(Controller, ranks))
        found: Awaitable[dict[str, Any]] = recovery._source(ranks.current)
        return asyncio.run(_awaited(found)) | {"told as": recovery._record.source}

    return choose


async def _awaited(found: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    return await found


def test_survivors_that_have_everything_are_gone_on_from(source: Callable[..., dict[str, Any]]) -> None:
    ranks = Ranks(generation(8))
    found = source(ranks, copy_of(7))
    assert (found["told as"], found["kind"], found["generation"], found["step"]) == ("live", "memory", 4, 8)
    assert found["ranks"] == 1 and found["holders"] == [["127.0.0.1", 1000], ["127.0.0.1", 1001]]
    (order,) = ranks.orders
    assert (order["order"], order["contributors"], order["step"]) == ("hand over", [0], 8)
    assert ranks.forgotten == [4], "what was handed over before is given back"


def test_those_behind_are_told_what_the_others_have_done(source: Callable[..., dict[str, Any]]) -> None:
    ranks = Ranks(generation(7, 8, prepared=(0,)))
    found = source(ranks)
    (order,) = ranks.orders
    assert (order["contributors"], order["step"], order["divisor"], order["bad"]) == ([0, 1], 8, 1.5, 0.0)
    assert (found["step"], found["ranks"]) == (8, 2)


def test_where_the_survivors_lack_something_the_newest_copies_are(source: Callable[..., dict[str, Any]]) -> None:
    ranks = Ranks(generation(8), covered=False)
    found = source(ranks, copy_of(6), copy_of(7), copy_of(5, generation=4))
    assert (found["told as"], found["generation"], found["step"], found["ranks"]) == ("memory", 3, 7, 1)
    assert ranks.forgotten == []


def test_copies_that_are_ahead_of_the_survivors_are_believed(source: Callable[..., dict[str, Any]]) -> None:
    """As after a death while the state was being restored: those that had begun from the beginning have an older one."""
    assert source(Ranks(generation(3)), copy_of(7))["step"] == 7


def test_a_run_that_went_back_does_not_go_on_from_what_it_left(source: Callable[..., dict[str, Any]]) -> None:
    found = source(Ranks(generation(8), covered=False), copy_of(9), copy_of(5, left_out=1))
    assert found["step"] == 5


def test_without_anything_in_memory_the_disk_is_read(source: Callable[..., dict[str, Any]]) -> None:
    for ranks in (
        Ranks(generation(8), covered=False),
        Ranks(generation(None)),
        Ranks(generation()),
        Ranks(generation(8), None),
    ):
        assert source(ranks) == {"kind": "disk", "until": None, "told as": "disk"}


def test_where_nobody_knows_who_is_right_only_what_was_agreed_on_counts(source: Callable[..., dict[str, Any]]) -> None:
    current = generation(9, 9)
    current.hear({"say": "corrupt", "rank": 0, "ranks": [], "what": "weights", "agreed": 6, "reason": "they differ"})
    assert source(Ranks(current), copy_of(6), copy_of(8))["step"] == 6
    assert source(Ranks(current), copy_of(8)) == {"kind": "disk", "until": 6, "told as": "disk"}


def test_failures_are_told_with_who_and_where() -> None:
    current = generation(8)
    died = noticed(1, WorkerDied(1, 8, "died", "it was killed"), current)
    assert (died.message, died.rank, died.node, died.step) == ("rank 1 (node 1): it was killed", 1, 1, 8)
    lost = noticed(2, NodeLost(1, 8, "node 1: no sign of life for 2.6 s"), current)
    assert (lost.cause, lost.node, lost.message) == ("node lost", 1, "node 1: no sign of life for 2.6 s")
    cut = noticed(3, Disconnected(8, "rank 0 lost its connection"), current)
    assert (cut.cause, cut.rank) == ("connection lost", None)
