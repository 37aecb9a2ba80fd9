"""The same run file on a GPU: trains in bf16, agrees with the CPU in fp32, is stopped, goes on, generates."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from phalanx.events.log import read_events
from phalanx.events.records import Evaluated, Restored, RunStarted, Step, WorkerStarted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="needs a CUDA GPU: there is no nvidia-smi here"),
]

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.toml"


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "phalanx", *arguments]


Train = Callable[..., dict[str, Any]]


@pytest.fixture
def train(gpu_environment: dict[str, str]) -> Train:
    def run(run_dir: Path, *overrides: str) -> dict[str, Any]:
        words = command("train", str(EXAMPLE), *overrides, "--run-dir", str(run_dir), "--json")
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, env=gpu_environment)
        assert done.returncode == 0, done.stdout + done.stderr
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return result

    return run


def steps(run_dir: Path) -> dict[int, Step]:
    return {event.step: event for event in read_events(run_dir / "events.jsonl") if isinstance(event, Step)}


def test_trains_in_bf16_without_being_told(tmp_path: Path, train: Train) -> None:
    result = train(tmp_path / "run", "train.steps=150")
    events = read_events(tmp_path / "run" / "events.jsonl")
    started = next(event for event in events if isinstance(event, RunStarted))
    worker = next(event for event in events if isinstance(event, WorkerStarted))
    assert (started.device, started.compute, worker.device) == ("cuda", "bf16", "cuda:0")
    assert result["loss"] < 2.4
    assert 0 < result["mfu"] < 1


def test_agrees_with_the_cpu_in_fp32(tmp_path: Path, train: Train) -> None:
    short = ("train.steps=10", "precision.compute=fp32", "layout.data=1")
    train(tmp_path / "gpu", *short)
    train(tmp_path / "cpu", *short, "cluster.device=cpu")
    ours, theirs = steps(tmp_path / "gpu"), steps(tmp_path / "cpu")
    assert [step.batch_digest for step in ours.values()] == [step.batch_digest for step in theirs.values()]
    for number, step in ours.items():
        assert step.loss == pytest.approx(theirs[number].loss, rel=1e-4)
        assert step.grad_norm == pytest.approx(theirs[number].grad_norm, rel=1e-3)


def test_bf16_stays_near_fp32(tmp_path: Path, train: Train) -> None:
    train(tmp_path / "bf16", "train.steps=60")
    train(tmp_path / "fp32", "train.steps=60", "precision.compute=fp32")
    assert steps(tmp_path / "bf16")[60].loss == pytest.approx(steps(tmp_path / "fp32")[60].loss, rel=0.02)


def test_muon_trains(tmp_path: Path, train: Train) -> None:
    assert train(tmp_path / "run", "train.steps=100", "optimizer.name=muon")["loss"] < 2.6


def test_stops_goes_on_and_generates(tmp_path: Path, train: Train, gpu_environment: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    words = command("train", str(EXAMPLE), "train.steps=250", "--run-dir", str(run_dir))
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=gpu_environment)
    deadline = time.monotonic() + 120
    while not (run_dir / "events.jsonl").exists() or len(steps(run_dir)) < 50:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 75
    stopped_after = max(steps(run_dir))
    assert train(run_dir, "train.steps=250")["steps"] == 250
    events = read_events(run_dir / "events.jsonl")
    restored = next(event for event in events if isinstance(event, Restored))
    assert restored.step == stopped_after
    assert sorted(steps(run_dir)) == list(range(1, 251))
    assert any(isinstance(event, Evaluated) and event.loss < 2.3 for event in events)
    words = command("generate", str(run_dir), "def ", "--tokens", "30", "--json")
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, env=gpu_environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tokens"] > 0


def test_too_many_ranks_for_the_gpus_is_refused(tmp_path: Path, gpu_environment: dict[str, str]) -> None:
    words = command("train", str(EXAMPLE), "layout.data=4", "--run-dir", str(tmp_path / "run"))
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, env=gpu_environment)
    assert done.returncode == 2
    assert "4 ranks" in done.stderr and 'cluster.device = "cpu"' in done.stderr


def test_the_check_before_the_first_step_knows_a_gpu_that_computes_wrongly(gpu_environment: dict[str, str]) -> None:
    program = """
import torch
from phalanx.worker.compute_check import check
for dtype in (torch.bfloat16, torch.float32):
    result = check(torch.device("cuda", 0), dtype)
    assert (result.wrong, result.problem) == (0, None) and result.flops > 1e12, result
    assert check(torch.device("cuda", 0), dtype, wrong=True).wrong == 1
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=gpu_environment)
    assert done.returncode == 0, done.stdout + done.stderr
