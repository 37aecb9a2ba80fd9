"""Rehearsed peaks of memory are those of the GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU: there is no nvidia-smi here"),
]
PROGRAM = Path(__file__).parents[2] / "benchmarks" / "rehearsed.py"


@pytest.mark.parametrize("name", ["1b, full recompute", "gpt-2, fp32", "experts"])
def test_a_rehearsed_peak_is_the_real_one(name: str, gpu_environment: dict[str, str]) -> None:
    command = [sys.executable, str(PROGRAM), "--names", name, "--tries", '{"-": []}']
    done = subprocess.run(command, capture_output=True, text=True, env=gpu_environment)
    assert done.returncode == 0, done.stderr
    real = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    row = next(line for line in done.stdout.splitlines() if line.startswith(f"| {name} |"))
    told = float(row.split("|")[4].replace(",", ""))
    most = max(real["allocated"]) / 2**20
    assert abs(told - most) <= 0.02 * most
