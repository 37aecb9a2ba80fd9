"""`phalanx bench step` on a GPU: all trainers that are installed, compiled, in bf16."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from typing import Any

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU: there is no nvidia-smi here"),
]

SHAPE = ["model.dim=512", "model.layers=4", "model.heads=8", "model.kv_heads=4", "model.ffn=1408", "model.vocab=8192"]


def compared(environment: dict[str, str], *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "phalanx", "bench", "step", "--model", "llama3-8b", *SHAPE, "--json", *words]
    options = ["--micro-batch", "4", "--sequence", "512", "--steps", "6", "--rounds", "2"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=600, env=environment)
    if done.returncode == 2 and "needs GPUs that multiply in it" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_trainers_agree_and_have_memory_of_their_own(gpu_environment: dict[str, str]) -> None:
    trainers = compared(gpu_environment, "--compile")["trainers"]
    ran = {name: trainer for name, trainer in trainers.items() if trainer["ran"]}
    assert {"phalanx", "hand"} <= ran.keys(), trainers
    for name, trainer in ran.items():
        assert trainer["compute"] == "bf16" and trainer["mfu"] is not None and "compiled" in trainer["settings"], name
        # Master weights and two moments in fp32, at least.
        assert 12 * 20_000_000 < trainer["peak_bytes"] <= trainer["reserved_bytes"], name
        assert name == "phalanx" or trainer["same_loss"], (name, trainer)


def test_fp8_is_compared_with_bf16(gpu_environment: dict[str, str]) -> None:
    found = compared(gpu_environment, "--peers", "phalanx,hand", "precision.compute=fp8")
    trainers = found["trainers"]
    assert (trainers["phalanx"]["compute"], trainers["hand"]["compute"]) == ("fp8", "bf16")
    assert trainers["hand"]["same_loss"], trainers
