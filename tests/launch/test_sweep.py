"""The runs of a sweep: which they are, and what part of the machine each gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.launch.sweep import members, parse_sweep, shared_out
from phalanx.spec.errors import RunError
from phalanx.spec.load import loads
from phalanx.spec.plan import Gpu, Machine
from phalanx.spec.run import Run

TEXT = """
[model]
dim = 32
heads = 2
layers = 1
[train]
batch = 8
sequence_length = 32
steps = 4
"""
GIB = 1 << 30


def made(settings: list[str]) -> Run:
    return loads(TEXT, overrides=settings)


def machine(cores: int = 8, gpus: int = 0) -> Machine:
    return Machine(
        host="here",
        cpu="any",
        cores=cores,
        memory=64 * GIB,
        gpus=tuple(Gpu(name="NVIDIA H100", memory=80 * GIB) for _ in range(gpus)),
    )


def test_every_combination_is_a_run_named_by_its_values() -> None:
    grid = parse_sweep(["optimizer.learning_rate=1e-4,3e-4", 'data.paths=["a, b"],["c"]'])
    assert grid == {"optimizer.learning_rate": ("1e-4", "3e-4"), "data.paths": ('["a, b"]', '["c"]')}
    found = members(grid, Path("folder"), made)
    assert [(run.run.optimizer.learning_rate, run.run.data.paths) for run in found] == [
        (1e-4, ("a, b",)),
        (1e-4, ("c",)),
        (3e-4, ("a, b",)),
        (3e-4, ("c",)),
    ]
    assert [run.name for run in found[:2]] == ["learning_rate=1e-4,paths=a,_b", "learning_rate=1e-4,paths=c"]
    assert {run.directory for run in found} == {Path("folder") / run.name for run in found} and len(
        {run.name for run in found}
    ) == 4


def test_keys_of_one_name_are_written_out() -> None:
    (first, *_) = members({"train.seed": ("1", "2"), "data.seed": ("3",)}, Path("folder"), made)
    assert first.name == "train.seed=1,data.seed=3"


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (["optimizer.learning_rate"], "write a key and its values"),
        (["optimizer.learning_rate=1e-4,"], "write a key and its values"),
        (["train.seed=1", "train.seed=2"], "train.seed is swept already"),
        (["train.seed=1,1"], "has a value twice"),
    ],
)
def test_a_grid_that_is_none_is_refused(texts: list[str], problem: str) -> None:
    with pytest.raises(RunError, match=problem):
        parse_sweep(texts)


def test_all_runs_are_checked_before_the_first_starts() -> None:
    with pytest.raises(RunError) as caught:
        members({"model.heads": ("2", "5"), "train.steps": ("4", "-1")}, Path("folder"), made)
    text = "\n".join(caught.value.problems)
    assert "model.heads = 5" in text and "train.steps = -1" in text
    with pytest.raises(RunError, match="have the name paths=a_"):
        members({"data.paths": ('["a?"]', '["a!"]')}, Path("folder"), made)


def test_cores_are_divided() -> None:
    on_cpu = made(['cluster.device="cpu"'])
    assert shared_out(on_cpu, machine(), 1) == on_cpu
    half = shared_out(on_cpu, machine(), 2).cluster
    assert half.cpu_ranks is not None and half.threads is not None
    assert 1 <= half.cpu_ranks * half.threads <= 4, "two runs use more than all cores"
    with pytest.raises(RunError, match=r"--parallel 9: this machine has 8 cores, .* lower --parallel to at most 8"):
        shared_out(on_cpu, machine(), 9)
    with pytest.raises(
        RunError, match=r"each run has 4 ranks, but there are 2 of 8 cores for it: lower --parallel to at most 2"
    ):
        shared_out(made(['cluster.device="cpu"', "layout.data=4"]), machine(), 4)


def test_gpus_are_divided() -> None:
    with pytest.raises(RunError, match=r"--parallel 3: this machine has 2 GPUs"):
        shared_out(made([]), machine(gpus=2), 3)
    assert shared_out(made([]), machine(gpus=4), 2).cluster.cpu_ranks is None
