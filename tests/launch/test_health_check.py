"""The doctor on this machine, and on machines with one thing wrong each."""

from __future__ import annotations

import io
import json
import resource
import socket
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from phalanx.host.probe import probe
from phalanx.launch import health_check
from phalanx.launch.health_check import HealthReport, examine
from phalanx.spec.plan import Gpu, Machine

GIB = 2**30
HEALTHY = {"version": "2.13.0", "cuda": None, "cuda_available": False, "devices": 0, "gloo": True, "nccl": False}
GPU = HEALTHY | {"cuda": "12.8", "cuda_available": True, "devices": 2, "nccl": True}
Usage = namedtuple("Usage", "total used free")

TOPOLOGY = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-47\t0
GPU1\tNV18\t X \tNV18\tSYS\t0-47\t0
GPU2\tSYS\tNV18\t X \tSYS\t48-95\t1
NIC0\tPIX\tSYS\tSYS\t X \t\t

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect
"""


def machine(gpus: int = 0, name: str = "NVIDIA H200", memory: int = 64 * GIB) -> Machine:
    return Machine(host="h", cpu="c", cores=4, memory=memory, core_flops=1e11, gpus=(Gpu(name=name, memory=140 * GIB),) * gpus)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A healthy machine without GPUs, whose torch answers at once and whose disk is written little."""
    monkeypatch.setattr(health_check, "_TEST_BYTES", 2**20)
    monkeypatch.setattr(health_check, "_ask_torch", lambda: dict(HEALTHY))
    monkeypatch.setattr(health_check, "free_memory", lambda: 32 * GIB)
    monkeypatch.setattr(health_check, "version", lambda name: "1.0")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (4096, 4096))
    monkeypatch.setattr("shutil.disk_usage", lambda place: Usage(100 * GIB, 0, 50 * GIB))
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(health_check, "driver_problem", lambda: None)
    return monkeypatch


def rendered(report: HealthReport) -> str:
    file = io.StringIO()
    report.render(Console(file=file, width=80, force_terminal=False))
    return file.getvalue()


def the_problem(report: HealthReport, *parts: str) -> None:
    (found,) = report.problems
    assert found.endswith(".") and "; " in found, f"no remedy in: {found}"
    for part in parts:
        assert part in found
    assert "problem: " in rendered(report)


def test_health_check_of_this_machine(tmp_path: Path) -> None:
    report = examine(tmp_path, probe(""))
    assert not any("torch" in problem for problem in report.problems)
    imported, installed = report.torch["version"], report.packages["torch"]
    assert imported.partition("+")[0] == installed.partition("+")[0]  # "+cu130" is not always in both
    assert report.torch["gloo"] is True
    assert report.write_speed is not None and report.write_speed > 0
    assert list(tmp_path.iterdir()) == []  # the test file is gone
    json.dumps(report.to_json(), allow_nan=False)
    text = rendered(report)
    assert "GPUs       none" in text and all(len(row) <= 80 for row in text.splitlines())


def test_nothing_heavy_is_imported() -> None:
    names = (
        "phalanx.launch.health_check, phalanx.planning.machines.hardware, phalanx.dashboard.progress, phalanx.dashboard.summary"
    )
    heavy = f"import sys, {names}; print({{'torch', 'numpy', 'matplotlib'}} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True).stdout.strip() == "set()"


def test_healthy_machine_has_no_problems(quick: Any, tmp_path: Path) -> None:
    report = examine(tmp_path, machine())
    assert (report.problems, [w for w in report.warnings if "/s, under" not in w]) == ([], [])
    assert "nothing here would stop a run" in rendered(report)


def test_directory_that_is_not_there_yet_is_judged_by_its_parent(quick: Any, tmp_path: Path) -> None:
    report = examine(tmp_path / "runs" / "new", machine())
    assert report.problems == []
    assert not (tmp_path / "runs").exists()


def test_torch_missing(quick: Any, tmp_path: Path) -> None:
    quick.setattr(health_check, "version", lambda name: None if name == "torch" else "1.0")
    quick.setattr(health_check, "_ask_torch", lambda: {"error": "No module named 'torch'"})
    the_problem(examine(tmp_path, machine()), "torch is not installed", "pip install")


def test_torch_does_not_import(quick: Any, tmp_path: Path) -> None:
    quick.setattr(health_check, "_ask_torch", lambda: {"error": "libcudart.so: cannot open"})
    the_problem(examine(tmp_path, machine()), "torch 1.0 does not import (libcudart.so: cannot open)")


def test_torch_without_cuda_beside_gpus(quick: Any, tmp_path: Path) -> None:
    the_problem(examine(tmp_path, machine(2)), "lists 2 GPUs", "built without CUDA", "sees none")


def test_torch_newer_than_the_driver(quick: Any, tmp_path: Path) -> None:
    quick.setattr(health_check, "_ask_torch", lambda: GPU | {"cuda_available": False, "devices": 0})
    the_problem(examine(tmp_path, machine(1)), "lists 1 GPU but", "CUDA 12.8", "sees none")


def test_torch_without_gloo(quick: Any, tmp_path: Path) -> None:
    quick.setattr(health_check, "_ask_torch", lambda: HEALTHY | {"gloo": False})
    the_problem(examine(tmp_path, machine()), "no gloo")


def test_broken_driver(quick: Any, tmp_path: Path) -> None:
    quick.setattr(health_check, "driver_problem", lambda: "nvidia-smi fails (mismatch); reload it.")
    the_problem(examine(tmp_path, machine()), "nvidia-smi fails")


def test_directory_cannot_be_written(quick: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    report = examine(tmp_path / "file" / "runs", machine())
    the_problem(report, "cannot be written")
    assert report.write_speed is None


def test_test_file_is_removed_when_writing_fails(quick: Any, tmp_path: Path) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    quick.setattr("os.fsync", full)
    (tmp_path / "runs").mkdir()
    the_problem(examine(tmp_path / "runs", machine()), "No space left on device")
    assert list((tmp_path / "runs").iterdir()) == []


def test_disk_full(quick: Any, tmp_path: Path) -> None:
    quick.setattr("shutil.disk_usage", lambda place: Usage(100 * GIB, 0, 1000))
    the_problem(examine(tmp_path, machine()), "1000 B free", "1 GiB")


def test_little_memory(quick: Any, tmp_path: Path) -> None:
    the_problem(examine(tmp_path, machine(memory=GIB // 2)), "512.0 MiB", "1 GiB")


def test_no_loopback(quick: Any, tmp_path: Path) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(99, "Cannot assign requested address")

    quick.setattr(socket, "create_server", refuse)
    the_problem(examine(tmp_path, machine()), "127.0.0.1")


def test_few_open_files(quick: Any, tmp_path: Path) -> None:
    quick.setattr(resource, "getrlimit", lambda which: (256, 4096))
    the_problem(examine(tmp_path, machine()), "256 files", "1024", "ulimit -n")


def test_unlimited_open_files(quick: Any, tmp_path: Path) -> None:
    quick.setattr(resource, "getrlimit", lambda which: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    report = examine(tmp_path, machine())
    assert report.problems == [] and "unlimited open files" in rendered(report)


def test_gpus_with_their_peaks_and_links(quick: Any, tmp_path: Path) -> None:
    quick.setattr(health_check, "_ask_torch", lambda: GPU | {"devices": 3})
    quick.setattr(health_check, "gpu_links", lambda: TOPOLOGY)
    report = examine(tmp_path, machine(3))
    assert report.problems == []
    assert report.links == {"NV18": 2, "SYS": 1}
    text = rendered(report)
    assert "3 × NVIDIA H200, 140.0 GiB, 989 TFLOP/s in bf16" in text and "2 × NV18, 1 × SYS" in text


def test_warnings_do_not_stop_a_run(quick: Any, tmp_path: Path) -> None:
    quick.setattr(health_check, "_ask_torch", lambda: GPU | {"nccl": False})
    quick.setattr("shutil.disk_usage", lambda place: Usage(64 * 2**20 if place == "/dev/shm" else 100 * GIB, 0, 50 * GIB))
    quick.setattr(health_check, "_write_speed", lambda place, free: (5e6, None))
    report = examine(tmp_path, machine(3, name="NVIDIA Z999"))
    assert report.problems == []
    for part in ("torch sees 2", "no NCCL", "Z999 is not in the catalogue", "--shm-size", "100 MB/s"):
        assert any(part in warning for warning in report.warnings), part
    assert "warning: " in rendered(report)


def test_unknown_processor_is_a_warning(quick: Any, tmp_path: Path) -> None:
    unknown = Machine(host="h", cpu="c", cores=4, memory=64 * GIB)
    assert any("peak of this processor" in warning for warning in examine(tmp_path, unknown).warnings)


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        ('echo noise; echo \'{"version": "9"}\'', {"version": "9"}),
        (
            "echo Traceback >&2; echo 'ImportError: no' >&2; exit 1",
            {"error": "its process ended with exit code 1 and no answer, saying 'ImportError: no'"},
        ),
        ("kill -SEGV $$", {"error": "its process was ended by SIGSEGV"}),
        ("exec /bin/sleep 5", {"error": "no answer within 0 s"}),
    ],
)
def test_output_of_the_torch_process_is_parsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, answer: dict[str, str]
) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{body}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(health_check, "_TORCH_TIMEOUT", 0.2)
    assert health_check._ask_torch() == answer


def test_python_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "No such file" in health_check._ask_torch()["error"]
