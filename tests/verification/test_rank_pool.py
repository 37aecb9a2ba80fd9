"""Ranks that stay: cases one after the other, and what is told of one that goes wrong."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from ranks import tiny_run, tiny_trainer

from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.verification.rank_pool import RankFailed, RankPool, fork

TWO = Layout(data=2)


def summed(mesh: Mesh, number: int) -> tuple[int, int, float]:
    return os.getpid(), mesh.rank, mesh.all_reduce(torch.tensor([float(number + mesh.rank)])).item()


def pid(mesh: Mesh) -> tuple[int, int]:
    return os.getpid(), mesh.ranks


def raising(mesh: Mesh, rank: int) -> None:
    if mesh.rank == rank:
        raise ValueError(f"planted on rank {rank}")
    mesh.barrier()  # waits for one that never comes


def dying(mesh: Mesh) -> None:
    if mesh.rank == 1:
        os.kill(os.getpid(), signal.SIGABRT)
    mesh.barrier()


def raising_before_another_dies(mesh: Mesh) -> None:
    if mesh.rank == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGABRT)
    raise RuntimeError("the connection to rank 1 is closed")


def collecting() -> NoReturn:
    gc.collect()
    os._exit(0)


def stuck_here(mesh: Mesh) -> None:
    if mesh.rank == 0:
        time.sleep(60)
    mesh.barrier()


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as made:
        yield made


def test_ranks_stay_from_case_to_case_and_meet_anew(pool: RankPool) -> None:
    first = pool.run(summed, TWO, 1)
    second = pool.run(summed, Layout(data=2, tensor=2), 10)
    assert [rank for _, rank, _ in second] == [0, 1, 2, 3]
    assert {total for _, _, total in first} == {1.0 + 2.0}
    assert {total for _, _, total in second} == {10.0 + 11.0 + 12.0 + 13.0}
    assert [process for process, _, _ in first] == [process for process, _, _ in second[:2]]
    assert pool.alone(pid) == (first[0][0], 1)


def sharded_loss(mesh: Mesh) -> float:
    trainer = tiny_trainer(mesh, tiny_run(f"layout.shard={mesh.layout.shard}", "layout.data=1"), Path())
    taken = trainer.step()
    trainer.close()
    assert taken is not None
    return taken.loss


def test_fully_sharded_models_of_two_cases_have_meshes_of_their_own(pool: RankPool) -> None:
    """torch keeps device meshes by their names: of the same name, the second case's tensors would lie on the first one's groups."""
    first = pool.run(sharded_loss, Layout(shard=4, zero=3))
    second = pool.run(sharded_loss, Layout(shard=2, zero=3))
    again = pool.run(sharded_loss, Layout(shard=4, zero=3))
    assert first == again
    assert second[0] == pytest.approx(first[0], abs=1e-5)


def test_a_rank_that_raises_is_named_and_the_next_case_gets_new_ranks(pool: RankPool) -> None:
    before = pool.alone(pid)[0]
    with pytest.raises(RankFailed) as failed:
        pool.run(raising, Layout(data=4), 2)
    assert failed.value.rank == 2
    assert failed.value.error == "ValueError: planted on rank 2"
    assert any("in raising" in line for line in failed.value.trace)
    assert not os.path.exists(f"/proc/{before}")
    assert {total for _, _, total in pool.run(summed, TWO, 1)} == {3.0}


def test_a_rank_that_dies_is_told_by_its_signal(pool: RankPool) -> None:
    with pytest.raises(RankFailed) as failed:
        pool.run(dying, TWO)
    assert failed.value.rank == 1
    assert failed.value.error == "was killed by SIGABRT"


def test_a_rank_that_dies_is_to_blame_also_when_another_complains_first(pool: RankPool) -> None:
    with pytest.raises(RankFailed) as failed:
        pool.run(raising_before_another_dies, TWO)
    assert str(failed.value) == "rank 1: was killed by SIGABRT"


def test_what_goes_wrong_in_one_process_is_nobody_elses(pool: RankPool) -> None:
    with pytest.raises(RankFailed) as failed:
        pool.alone(raising, 0)
    assert failed.value.rank is None
    assert str(failed.value) == "the reference process: ValueError: planted on rank 0"


def test_ranks_that_hang_are_told_with_the_place_they_stand_at() -> None:
    with RankPool(2, timeout=3.0) as pool:
        with pytest.raises(RankFailed) as failed:
            pool.run(stuck_here, TWO)
        assert failed.value.rank == 0
        assert failed.value.error == "has not ended within 3 s (nor have ranks 1)"
        assert any("in stuck_here" in line for line in failed.value.trace)
        pool.timeout = 120.0
        assert len(pool.run(summed, TWO, 0)) == 2


def test_nothing_is_left_behind() -> None:
    with RankPool(2) as pool:
        processes = [process for process, _, _ in pool.run(summed, TWO, 0)]
        folder = pool.folder
        assert folder.is_dir()
    assert not folder.exists()
    assert not any(os.path.exists(f"/proc/{process}") for process in processes)


def test_garbage_of_the_parent_is_not_collected_by_a_rank(tmp_path: Path) -> None:
    """An object that ends a thread would wait for it, or abort: the rank does not have it."""

    class Owner:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            (tmp_path / str(os.getpid())).touch()

    gc.disable()
    try:
        Owner()
        os.waitpid(fork(collecting), 0)
    finally:
        gc.enable()
    assert not list(tmp_path.iterdir())
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]
