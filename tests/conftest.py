"""For all tests: GPUs are hidden, since tests fork ranks and a process that has touched a GPU cannot be forked; nor can one that has
multiplied matrices by several threads, as PyTorch does on ARM cores whatever it is told later.

Tests marked `gpu` start processes of their own, with what was hidden here.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

_THREADS = os.environ.get("OMP_NUM_THREADS")
os.environ["OMP_NUM_THREADS"] = "1"  # read when torch is first imported; what tests start is not to see it
import torch  # noqa: E402, F401

if _THREADS is None:
    del os.environ["OMP_NUM_THREADS"]
else:
    os.environ["OMP_NUM_THREADS"] = _THREADS
_HIDDEN = os.environ.get("CUDA_VISIBLE_DEVICES")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
# What somebody has measured on this machine must not decide what tests see.
os.environ["XDG_CONFIG_HOME"] = tempfile.mkdtemp(prefix="phalanx-config-")
atexit.register(shutil.rmtree, os.environ["XDG_CONFIG_HOME"], ignore_errors=True)
# Names that exist nowhere must not be looked up on a network. Tests of the hub start a server of their own.
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": os.environ["XDG_CONFIG_HOME"] + "/hf"}
# nohup ignores SIGHUP, and a script's background jobs ignore SIGINT. Programs inherit that from pytest, and the ones under test would never
# get the signals that tests send. A handler that does nothing is not inherited: pytest ignores as it was told, what it starts does not.
for _number in (signal.SIGHUP, signal.SIGINT):
    if signal.getsignal(_number) == signal.SIG_IGN:
        signal.signal(_number, lambda *_: None)


FORKING = (
    "checkpointing",
    "observe",
    "optim",
    "parallel",
    "training",
    "verification",
    "worker",
    "cli/test_checkpoint.py",
    "rehearsal/test_rehearsed_rank.py",
)
"""Folders and files whose tests fork ranks. With a torch that is built for GPUs, a process that has computed gradients or rehearsed a GPU
cannot be forked any more: these tests come first in every process."""
LONGEST = (
    "parallel/test_data_parallel_sharded.py",
    "verification/test_rows.py",
    "parallel/test_context_parallel.py",
    "training/test_trainer.py",
    "parallel/test_executor.py",
    "cli/test_resume.py",
    "cli/test_train.py",
    "launch/test_failures.py",
    "launch/test_model_check.py",
    "cli/test_layouts.py",
    "cli/test_torchrun.py",
    "cli/test_recovery.py",
    "cli/test_api.py",
)
"""Files that take longest. They come early, so that no process works alone at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that fork first, rehearsals last, and of each the longest files first."""

    def order(item: pytest.Item) -> tuple[int, int]:
        file = item.path.relative_to(Path(__file__).parent).as_posix()
        group = 0 if file.startswith(FORKING) else 2 if "rehears" in file else 1
        return group, LONGEST.index(file) if file in LONGEST else len(LONGEST)

    items.sort(key=order)


@pytest.fixture
def gpu_environment() -> dict[str, str]:
    """The environment in which the machine's GPUs are seen."""
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    return environment if _HIDDEN is None else environment | {"CUDA_VISIBLE_DEVICES": _HIDDEN}


@pytest.fixture
def mount_disk() -> Iterator[Callable[[Path, str], Path]]:
    """Makes a real disk of a given size, such as "4m", at a path; skips where that is not permitted."""
    mounted: list[Path] = []

    def mount(place: Path, size: str) -> Path:
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)]
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except OSError as error:
            pytest.skip(f"no disk can be mounted here: {error}")
        if done.returncode:
            pytest.skip(f"no disk can be mounted here: {done.stderr.strip()}")
        mounted.append(place)
        return place

    yield mount
    for place in mounted:
        subprocess.run(["umount", str(place)], check=True)
