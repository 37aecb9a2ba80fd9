"""The probe against machines made of text: /proc and /sys in a folder, nvidia-smi as a script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from phalanx.host.probe import driver_problem, gpu_links, probe

XEON = """processor\t: 0
vendor_id\t: GenuineIntel
cpu family\t: 6
model name\t: Intel(R) Xeon(R) Platinum 8175M CPU @ 2.50GHz
cpu MHz\t\t: 3100.000
siblings\t: {siblings}
cpu cores\t: 24
flags\t\t: fpu {flags}

processor\t: 1
model name\t: another
flags\t\t: fpu
"""
GRAVITON = "processor\t: 0\nBogoMIPS\t: 243.75\nFeatures\t: fp asimd crc32\nCPU implementer\t: 0x41\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH of one empty folder."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def fake_smi(folder: Path, body: str) -> None:
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)


@pytest.mark.parametrize(
    ("flags", "per_cycle"),
    [
        ("sse sse2", 8),
        ("sse avx", 16),
        ("sse avx avx2", 16),
        ("sse avx avx2 fma", 32),
        ("sse avx avx2 fma avx512f", 64),
        ("", None),
    ],
)
def test_peak_of_a_core_follows_its_vector_units(tmp_path: Path, flags: str, per_cycle: int | None) -> None:
    machine = probe(root=write(tmp_path, {"proc/cpuinfo": XEON.format(flags=flags, siblings=24)}))
    assert machine.cpu == "Intel(R) Xeon(R) Platinum 8175M CPU @ 2.50GHz"
    assert machine.core_flops == (None if per_cycle is None else pytest.approx(2.5e9 * per_cycle))


def test_hardware_threads_share_the_peak_of_their_core(tmp_path: Path) -> None:
    machine = probe(root=write(tmp_path, {"proc/cpuinfo": XEON.format(flags="avx512f", siblings=48)}))
    assert machine.core_flops == pytest.approx(2.5e9 * 64 / 2)


def test_zen_4_runs_wide_vectors_in_two_halves(tmp_path: Path) -> None:
    text = "vendor_id : AuthenticAMD\ncpu family : 25\nmodel name : AMD EPYC 9654\ncpu MHz : 2400.0\nflags : avx avx2 fma avx512f\n"
    assert probe(root=write(tmp_path, {"proc/cpuinfo": text})).core_flops == pytest.approx(2.4e9 * 32)


def test_clock_comes_from_the_frequency_driver_first(tmp_path: Path) -> None:
    files = {
        "proc/cpuinfo": XEON.format(flags="avx2 fma", siblings=24),
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "3500000\n",
    }
    assert probe(root=write(tmp_path, files)).core_flops == pytest.approx(3.5e9 * 32)


def test_clock_comes_from_the_running_frequency_last(tmp_path: Path) -> None:
    text = XEON.format(flags="avx2 fma", siblings=24).replace(" @ 2.50GHz", "")
    assert probe(root=write(tmp_path, {"proc/cpuinfo": text})).core_flops == pytest.approx(3.1e9 * 32)


def test_arm_with_a_frequency_driver(tmp_path: Path) -> None:
    files = {"proc/cpuinfo": GRAVITON, "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": "2600000\n"}
    assert probe(root=write(tmp_path, files)).core_flops == pytest.approx(2.6e9 * 16)


@pytest.mark.parametrize(
    ("cpuinfo", "scalar"),
    [
        (GRAVITON, ("bf16",)),
        (GRAVITON.replace("crc32", "crc32 asimdhp bf16"), ()),
        (XEON.format(flags="avx2 fma", siblings=24), ()),
        ("", ()),
    ],
)
def test_formats_without_instructions(tmp_path: Path, cpuinfo: str, scalar: tuple[str, ...]) -> None:
    assert probe(root=write(tmp_path, {"proc/cpuinfo": cpuinfo})).scalar == scalar


def test_unknown_clock_means_unknown_peak(tmp_path: Path) -> None:
    assert probe(root=write(tmp_path, {"proc/cpuinfo": GRAVITON})).core_flops is None


def test_nothing_to_read_is_still_a_machine(tmp_path: Path) -> None:
    machine = probe(root=tmp_path)
    assert machine.core_flops is None
    assert machine.cpu == os.uname().machine
    assert machine.cores == len(os.sched_getaffinity(0))
    assert machine.memory == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", None), ("50000 100000", 1), ("100001 100000", 2)])
def test_cpu_quota_rounds_up(tmp_path: Path, quota: str, cores: int | None) -> None:
    allowed = len(os.sched_getaffinity(0))
    machine = probe(root=write(tmp_path, {"sys/fs/cgroup/cpu.max": quota}))
    assert machine.cores == (allowed if cores is None else min(cores, allowed))


def test_memory_limit_of_any_enclosing_group_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        "sys/fs/cgroup/job/step/memory.max": "max\n",
        "sys/fs/cgroup/job/memory.max": str(256 * 2**20),
    }
    assert probe(root=write(tmp_path, files)).memory == 256 * 2**20


def test_gpus_as_the_driver_lists_them(programs: Path) -> None:
    fake_smi(programs, 'echo "NVIDIA H200, 143771, GPU-aaaa"; echo "NVIDIA H100 80GB HBM3, 81559, GPU-bbbb"')
    machine = probe()
    assert [(gpu.name, gpu.memory) for gpu in machine.gpus] == [
        ("NVIDIA H200", 143771 * 2**20),
        ("NVIDIA H100 80GB HBM3", 81559 * 2**20),
    ]


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ["A", "B", "C"]),
        ("", []),
        ("-1", []),
        ("2, 0", ["C", "A"]),
        ("1,9,0", ["B"]),  # CUDA stops at the first that does not exist
        ("GPU-cc,GPU-aaaa", ["C", "A"]),
        ("MIG-1234", []),
    ],
)
def test_visible_gpus(programs: Path, visible: str | None, names: list[str]) -> None:
    fake_smi(programs, 'echo "A, 100, GPU-aaaa"; echo "B, 100, GPU-bbbb"; echo "C, 100, GPU-cccc"')
    assert [gpu.name for gpu in probe(visible).gpus] == names


def test_gpu_that_shares_the_memory_of_its_host(programs: Path) -> None:
    fake_smi(programs, 'echo "NVIDIA GB10, [N/A], GPU-aaaa"')
    machine = probe()
    assert machine.gpus[0].memory == machine.memory


def test_no_devices_found(programs: Path) -> None:
    fake_smi(programs, 'echo "No devices were found"')
    assert probe().gpus == ()


def test_broken_driver_is_no_gpu_and_a_problem(programs: Path) -> None:
    fake_smi(programs, 'echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18')
    assert probe().gpus == ()
    problem = driver_problem()
    assert problem is not None
    assert "Driver/library version mismatch" in problem


def test_driver_that_does_not_answer(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("phalanx.host.probe._SMI_TIMEOUT", 0.1)
    fake_smi(programs, "exec /bin/sleep 600")
    assert probe().gpus == ()
    problem = driver_problem()
    assert problem is not None
    assert "no answer" in problem


def test_program_that_cannot_run(programs: Path) -> None:
    fake_smi(programs, "")
    (programs / "nvidia-smi").write_bytes(b"\x00not a program")
    problem = driver_problem()
    assert problem is not None
    assert "nvidia-smi fails" in problem


def test_silent_failure_names_its_exit_status(programs: Path) -> None:
    fake_smi(programs, "exit 9")
    assert "exit status 9" in (driver_problem() or "")


def test_healthy_driver_and_none_are_no_problem(programs: Path, tmp_path: Path) -> None:
    assert driver_problem(root=tmp_path) is None
    assert gpu_links() is None
    fake_smi(programs, 'echo "NVIDIA H200"')
    assert driver_problem(root=tmp_path) is None


def test_driver_without_its_tool(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    assert "nvidia-smi is not on PATH" in (driver_problem(root=tmp_path) or "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_probe_without_gpus_starts_no_process(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a probe must be quick")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    assert probe().cores >= 1
