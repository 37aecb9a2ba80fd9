from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import ranks as helpers
import torch
import torch.distributed as dist
from ranks import ALONE, run_ranks

from phalanx.accelerator import resident_bytes
from phalanx.parallel.mesh import Mesh, abandoned, connect, disconnect
from phalanx.spec.layout import Layout
from phalanx.spec.plan import Place


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_are_over_all_ranks_and_in_place(ranks: int) -> None:
    def add(mesh: Mesh) -> tuple[list[float], bool]:
        values = torch.tensor([1.0, 10.0 * mesh.rank], dtype=torch.float64)
        return mesh.all_reduce(values).tolist(), mesh.all_reduce(values) is values

    assert run_ranks(add, ranks) == [([ranks, 10.0 * sum(range(ranks))], True)] * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_reductions_run_in_the_background_with_the_operation_asked_for(ranks: int) -> None:
    def reduce(mesh: Mesh) -> tuple[float, float]:
        added, largest = torch.tensor(mesh.rank + 1.0), torch.tensor(5.0 - mesh.rank)
        for work in (mesh.start_all_reduce(added), mesh.start_all_reduce(largest, dist.ReduceOp.MAX)):
            if work is not None:
                work.wait()
        return added.item(), largest.item()

    assert run_ranks(reduce, ranks) == [(sum(range(1, ranks + 1)), 5.0)] * ranks


def test_rank_0s_value_is_shared_whatever_it_is() -> None:
    def share(mesh: Mesh) -> object:
        mine = {"path": Path("somewhere"), "who": mesh.rank, "text": "x" * mesh.rank * 1000}
        return mesh.broadcast_object(mine if mesh.rank != 0 else mine | {"more": [1, None]})

    assert run_ranks(share, 3) == [{"path": Path("somewhere"), "who": 0, "text": "", "more": [1, None]}] * 3
    assert ALONE.broadcast_object("own") == "own"


def test_nobody_passes_a_barrier_before_all_have_come() -> None:
    def meet(mesh: Mesh) -> tuple[float, float]:
        time.sleep(0.15 * mesh.rank)
        came = time.monotonic()
        mesh.barrier()
        return came, time.monotonic()

    times = run_ranks(meet, 3)
    assert max(came for came, _ in times) <= min(left for _, left in times)


def test_a_later_generation_meets_anew_in_the_same_processes() -> None:
    def meet_twice(mesh: Mesh) -> list[float]:
        first = mesh.all_reduce(torch.ones(1)).item()
        disconnect(mesh)
        # As after a failure: the places are dealt anew, and the old generation's addresses are still in the store when
        # those that are first look there for those that come late.
        time.sleep(0.2 * mesh.rank)
        place = replace(mesh.place, rank=mesh.ranks - 1 - mesh.rank, generation=1)
        again = connect(place, "cpu", 30)
        return [first, again.all_reduce(torch.tensor([10.0 * again.rank])).item()]

    assert run_ranks(meet_twice, 3) == [[3.0, 30.0]] * 3


@pytest.mark.parametrize("after", [0.05, 0.3])
def test_who_was_interrupted_while_it_joined_joins_the_next_generation(after: float) -> None:
    class Halted(BaseException):
        pass

    def halt(number: int, frame: object) -> None:
        raise Halted

    def join(mesh: Mesh) -> float:
        disconnect(mesh)
        if mesh.rank == 0:  # the other never comes to this one
            signal.signal(signal.SIGALRM, halt)
            signal.setitimer(signal.ITIMER_REAL, after)
            with pytest.raises(Halted):
                connect(replace(mesh.place, generation=1), "cpu", 2)
                signal.pause()
        with abandoned():
            pass
        return connect(replace(mesh.place, generation=2), "cpu", 10).all_reduce(torch.ones(1)).item()

    assert run_ranks(join, 2) == [2.0, 2.0]


def test_one_rank_needs_no_process_group() -> None:
    mesh = connect(ALONE.place, "cpu", 1)
    assert not dist.is_initialized()
    assert (mesh.rank, mesh.ranks, mesh.replica, mesh.device) == (0, 1, 0, torch.device("cpu"))
    mesh.barrier()
    disconnect(mesh)


def test_resident_bytes_are_what_the_kernel_says() -> None:
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert resident_bytes() == pytest.approx(int(status["VmRSS"].split()[0]) * 1024, rel=0.05)


def test_patience_outlasts_the_timeout_of_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 prepares for longer than the ranks wait for each other in a collective."""

    def prepare(mesh: Mesh) -> tuple[str, float]:
        share = mesh.slow_broadcast(60.0)
        if mesh.rank == 0:
            time.sleep(3.0)
        found = share("a plan" if mesh.rank == 0 else None)
        return found, mesh.all_reduce(torch.ones(1)).item()

    connected = helpers.connect
    monkeypatch.setattr(helpers, "connect", lambda place, device, timeout, layout: connected(place, device, 1.0))
    assert run_ranks(prepare, 2) == [("a plan", 2.0)] * 2
    assert ALONE.slow_broadcast(1.0)("alone") == "alone"


def laid_out(layout: Layout, rank: int) -> Mesh:
    """Without anybody to talk to."""
    return Mesh(Place(rank=rank, ranks=layout.ranks), torch.device("cpu"), layout)


def test_what_lost_ranks_shared_is_shared_by_those_that_are_left() -> None:
    layout = Layout(pipeline=2, data=3, tensor=2)  # stage 1: ranks 6 to 11
    meshes = [laid_out(layout, rank) for rank in range(12)]
    assert [mesh.peer_index("tensor") for mesh in meshes[6:]] == [(0, 3), (0, 3), (1, 3), (1, 3), (2, 3), (2, 3)]
    assert [mesh.peer_index() for mesh in meshes[6:]] == [(index, 6) for index in range(6)]
    for mesh in meshes:
        mesh.mark_lost([6, 9, 11])
    assert [meshes[rank].peer_index("tensor") for rank in (7, 8, 10)] == [(0, 1), (0, 2), (1, 2)]
    assert [meshes[rank].peer_index() for rank in (7, 8, 10)] == [(0, 3), (1, 3), (2, 3)]
    assert [rank for rank in (7, 8, 10) if meshes[rank].is_stage_leader] == [7]
    assert meshes[0].peer_index("tensor") == (0, 3), "another stage has lost nothing"


@pytest.mark.parametrize(
    ("layout", "lost", "axes", "covered"),
    [
        (Layout(data=2, tensor=2), [0], ("tensor",), True),
        (Layout(data=2, tensor=2), [0, 3], ("tensor",), True),
        (Layout(data=2, tensor=2), [0, 2], ("tensor",), False),
        (Layout(data=2, tensor=2), [0, 2], (), True),  # what every tensor rank has
        (Layout(shard=4), [1], ("shard",), False),
        (Layout(data=2, shard=2), [0, 3], ("shard",), True),
        (Layout(data=2, shard=2), [0, 3], ("data", "shard"), False),  # replicas that go their own way
        (Layout(data=4, expert=2), [0, 2], ("expert",), False),
        (Layout(data=4, expert=2), [0, 1], ("expert",), True),
        (Layout(data=4, expert=2), [0, 2], (), True),
        (Layout(pipeline=2, data=2), [2, 3], (), True),  # of this rank's stage
    ],
)
def test_whether_those_that_are_left_have_everything(
    layout: Layout, lost: list[int], axes: tuple[str, ...], covered: bool
) -> None:
    found = [laid_out(layout, rank) for rank in range(layout.ranks // layout.pipeline) if rank not in lost]
    for mesh in found:
        assert mesh.covers(*axes)
        mesh.mark_lost(lost)
    assert [mesh.covers(*axes) for mesh in found] == [covered] * len(found)
