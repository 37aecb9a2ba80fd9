"""Ranks for a caller whose process must not be forked: after any work with torch, in a notebook, and from threads."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from phalanx.parallel.mesh import Mesh
from phalanx.spec.layout import Layout
from phalanx.verification.pool_process import PoolProcess
from phalanx.verification.rank_pool import RankFailed

TWO = Layout(data=2)
RUN = """
[model]
dim = 32
layers = 1
heads = 2

[data]
source = "memory"
documents = ["to be or not to be, that is the question: whether 'tis nobler in the mind to suffer the slings and arrows of"]
eval_fraction = 0.0

[train]
batch = 4
sequence_length = 16
steps = 100

[cluster]
device = "cpu"
"""
EXAMPLE = """
import phalanx as px

run = px.load("run.toml", ["train.steps=20"])
trainer = px.trainer(run)
trainer.step()
"""
"""As `help(phalanx)` shows it."""
UNUSABLE = """
import os

# A process with threads leaves its forks locks that nobody releases, at random: here they are unusable for certain.
os.register_at_fork(after_in_child=lambda: os._exit(9))
"""
VERIFY = """
report = px.verify(run, steps=1)
assert report.passed, report.failure
print("passed on", report.case.layout.ranks, "ranks")
"""


def test_verify_after_a_step_does_not_fork_the_caller(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    done = subprocess.run(
        [sys.executable, "-c", EXAMPLE + UNUSABLE + VERIFY], cwd=tmp_path, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("passed on ")


def test_verify_in_a_notebook(tmp_path: Path) -> None:
    """A real kernel, in which other threads run from the start."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    (tmp_path / "run.toml").write_text(RUN)
    cells = [nbformat.v4.new_code_cell(source) for source in (EXAMPLE, UNUSABLE, VERIFY, VERIFY)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    for cell in notebook.cells[2:]:
        assert cell.outputs[0].text.startswith("passed on ")


def test_the_example_is_the_one_of_the_documentation() -> None:
    import phalanx

    shown = [line.partition("#")[0].strip() for line in (phalanx.__doc__ or "").splitlines()]
    assert [line for line in EXAMPLE.splitlines() if line and line not in shown] == []


# --- the pool itself ---


def summed(mesh: Mesh, number: int) -> tuple[int, float]:
    return os.getpid(), mesh.all_reduce(torch.tensor([float(number + mesh.rank)])).item()


def alone(mesh: Mesh) -> int:
    return mesh.ranks


def raising(mesh: Mesh) -> None:
    if mesh.rank == 1:
        raise ValueError("planted on rank 1")
    mesh.barrier()


def stuck(mesh: Mesh, flag: Path) -> None:
    flag.with_name(f"{mesh.rank}").write_text(str(os.getpid()))
    time.sleep(600)


def killing_the_pool(mesh: Mesh) -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)


def test_it_is_a_pool_like_the_other() -> None:
    with PoolProcess(2) as pool:
        first = pool.run(summed, TWO, 1)
        assert [total for _, total in first] == [3.0, 3.0]
        assert pool.alone(alone) == 1
        assert [pid for pid, _ in pool.run(summed, TWO, 5)] == [pid for pid, _ in first]
        with pytest.raises(RankFailed) as failed:
            pool.run(raising, TWO)
        assert (failed.value.rank, failed.value.error) == (1, "ValueError: planted on rank 1")
        assert any("in raising" in line for line in failed.value.trace)
        second = pool.run(summed, TWO, 2)
        assert [total for _, total in second] == [5.0, 5.0]
        folder = pool.folder
        assert folder.is_dir()
    assert not folder.exists()
    assert not any(psutil.pid_exists(pid) for pid, _ in (*first, *second))


def test_a_pool_that_dies_is_reported() -> None:
    with PoolProcess(2) as pool, pytest.raises(RankFailed, match="the process that starts the ranks was killed by SIGKILL"):
        pool.alone(killing_the_pool)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts this process, also where pytest runs in the background and would ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_ends_the_ranks(tmp_path: Path) -> None:
    def interrupt() -> None:
        while not all((tmp_path / str(rank)).exists() for rank in range(2)):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt), PoolProcess(2) as pool:
        pool.run(stuck, TWO, tmp_path / "flag")
    ranks = [int((tmp_path / str(rank)).read_text()) for rank in range(2)]
    psutil.wait_procs([psutil.Process(pid) for pid in ranks if psutil.pid_exists(pid)], timeout=30)
    assert not any(psutil.pid_exists(pid) for pid in ranks)
