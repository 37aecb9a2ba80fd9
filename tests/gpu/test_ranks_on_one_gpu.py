"""More ranks than GPUs: four ranks share the GPUs of this machine, and every layout computes what one process computes on one of them. NCCL has
no part in it. Streams, events, pinned copies and the placement on devices are real."""

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

PROGRAM = Path(__file__).with_name("shared_gpu.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.toml"


def checks(environment: dict[str, str], name: str) -> list[dict[str, Any]]:
    words = [sys.executable, str(PROGRAM), name]
    done = subprocess.run(words, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def sweep(environment: dict[str, str], *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "phalanx", "verify", str(EXAMPLE), "--device", "cuda", "--layouts", "all", "--ranks", "4"]
    done = subprocess.run([*command, *words, "--json"], capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    table: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return table


def failed(found: list[dict[str, Any]]) -> list[Any]:
    return [(one["layout"], one["first"], one["failure"]) for one in found if not one["passed"]]


def test_ranks_share_the_gpus_in_turn_and_sum_on_them(gpu_environment: dict[str, str]) -> None:
    found = checks(gpu_environment, "placement")
    assert [one["rank"] for one in found] == [0, 1, 2, 3]
    for one in found:
        index = one["rank"] % one["gpus"]
        assert (one["device"], one["current"]) == (f"cuda:{index}", index)
        assert one["via_host"] == (one["gpus"] < 4)
        assert one["total"] == pytest.approx(1000 * 1.5)  # the mean of 0, 1, 2 and 3, which further sums keep


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_every_technique_computes_what_one_process_does(compute: str, gpu_environment: dict[str, str]) -> None:
    found = checks(gpu_environment, compute)
    assert len(found) == 19 and {one["precision"] for one in found} == {compute}
    assert {one["ranks"] for one in found} == {4}
    assert failed(found) == []


def test_what_moves_between_device_and_host_computes_the_same(gpu_environment: dict[str, str]) -> None:
    found = checks(gpu_environment, "more")
    assert len(found) == 6
    assert failed(found) == []


def test_weights_gathered_in_fp8_compute_the_same(gpu_environment: dict[str, str]) -> None:
    code = "import torch; from phalanx.transforms import fp8; print(fp8.available(torch.device('cuda')) or '')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=gpu_environment, check=True)
    if reason := done.stdout.strip():
        pytest.skip(reason)
    found = checks(gpu_environment, "fp8")
    assert len(found) == 3 and {one["precision"] for one in found} == {"fp8"}
    assert failed(found) == []


def test_the_defaults_of_training_compile_blocks_and_compute_the_same(gpu_environment: dict[str, str]) -> None:
    found = checks(gpu_environment, "compiled")
    assert len(found) == 7 and all(one["compiled"] and one["precision"] == "bf16" for one in found)
    assert failed(found) == []


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_generated_layouts_of_every_kind_pass(compute: str, gpu_environment: dict[str, str]) -> None:
    table = sweep(gpu_environment, "--count", "25", f"precision.compute={compute}")
    assert len(table["layouts"]) == 25
    assert {(one["device"], one["ranks"], one["precision"]) for one in table["layouts"]} == {("cuda", 4, compute)}
    assert failed(table["layouts"]) == []
