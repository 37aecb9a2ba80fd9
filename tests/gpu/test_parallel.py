"""What ranks do for each other, on one GPU: kernels of context parallelism, ZeRO over NCCL with one rank, split backwards."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU: there is no nvidia-smi here"),
]

PROGRAM = Path(__file__).with_name("one_gpu.py")


def checks(environment: dict[str, str], name: str) -> list[dict[str, Any]]:
    words = [sys.executable, str(PROGRAM), name]
    done = subprocess.run(words, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_kernels_that_say_their_weight_equal_the_plain_one(gpu_environment: dict[str, str]) -> None:
    found = checks(gpu_environment, "attention")
    assert {one["kernel"] for one in found} == {"flash", "efficient"}
    for one in found:
        assert one["difference"] < (1e-4 if "float32" in one["dtype"] else 1.5e-2), one


def test_zero_over_nccl_with_one_rank_trains_like_one_device(gpu_environment: dict[str, str]) -> None:
    found = checks(gpu_environment, "engines")
    assert len(found) == 18
    for one in found:
        assert one["difference"] < (1e-4 if one["compute"] == "fp32" else 2e-2), one


def test_schedules_with_all_stages_here_train_like_one_device(gpu_environment: dict[str, str]) -> None:
    found = checks(gpu_environment, "pipelines")
    assert len(found) == 6
    for one in found:
        assert one["difference"] < 1e-4, one
