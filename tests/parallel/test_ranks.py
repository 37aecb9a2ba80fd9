from __future__ import annotations

import os
import time
import traceback

import pytest
import torch
from ranks import ALONE, run_ranks

from phalanx.parallel.mesh import Mesh


def test_every_rank_runs_connected_and_results_come_back_in_order() -> None:
    def add(mesh: Mesh, what: list[float]) -> tuple[int, int, list[float], int]:
        return mesh.rank, mesh.ranks, mesh.all_reduce(torch.tensor(what) * (mesh.rank + 1)).tolist(), torch.get_num_threads()

    assert run_ranks(add, 3, [1.0, 10.0]) == [(rank, 3, [6.0, 60.0], 1) for rank in range(3)]


def test_what_a_rank_raises_is_raised_with_its_traceback_and_nobody_waits_for_the_others() -> None:
    def fail(mesh: Mesh) -> None:
        if mesh.rank == 1:
            deep_inside()
        time.sleep(3600)  # whoever waited for this one would say that it had not ended in time

    def deep_inside() -> None:
        raise ZeroDivisionError("of rank 1")

    with pytest.raises(ZeroDivisionError, match="of rank 1") as caught:
        run_ranks(fail, 3)
    shown = "".join(traceback.format_exception(caught.value))
    assert "On rank 1" in shown
    assert "in deep_inside" in shown


def test_a_rank_that_dies_is_noticed() -> None:
    def die(mesh: Mesh) -> None:
        if mesh.rank == 0:
            os._exit(3)
        time.sleep(3600)

    with pytest.raises(RuntimeError, match="rank 0 ended without a result"):
        run_ranks(die, 2)


def test_a_rank_that_hangs_runs_into_the_timeout() -> None:
    with pytest.raises(TimeoutError, match=r"\[0, 1\]"):
        run_ranks(lambda mesh: time.sleep(60), 2, timeout=1.5)


def test_big_results_and_errors_that_cannot_be_pickled_pass_the_pipe() -> None:
    class Local(Exception):
        pass

    def fail(mesh: Mesh) -> None:
        raise Local("cannot be found by name")

    big = run_ranks(lambda mesh: torch.full((300_000,), float(mesh.rank)), 2)
    assert [(len(tensor), tensor[-1].item()) for tensor in big] == [(300_000, 0.0), (300_000, 1.0)]
    with pytest.raises(RuntimeError, match="Local: cannot be found by name"):
        run_ranks(fail, 1)


def test_ranks_may_be_forked_after_the_test_has_used_torch() -> None:
    def train(mesh: Mesh) -> float:
        model = torch.nn.Linear(256, 256)
        model(torch.ones(256, 256)).sum().backward()
        assert model.weight.grad is not None
        return mesh.all_reduce(model.weight.grad.sum()).item()

    alone = train(ALONE)
    assert alone == 256.0**3
    assert run_ranks(train, 2) == [2 * alone] * 2
