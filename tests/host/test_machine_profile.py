"""The file in which what was measured on a machine is kept."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from phalanx.host.machine_profile import profile_file, read_profile, write_profile
from phalanx.host.probe import probe
from phalanx.spec.plan import Gpu, Machine

MACHINE = Machine(host="a", cpu='some "CPU"', cores=8, memory=2**34, gpus=(Gpu(name="NVIDIA H200", memory=2**37),))
CONSTANTS = {"cpu.launch": 8e-6, "cuda.bf16.gemm": 0.74, "cuda.host_bandwidth": 5.5e10, "cuda.storage": 1e9}


def test_written_values_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "machine.toml"
    rows = [{"what": "bf16 product", "shape": "8192 x 8192 x 8192", "value": 7.4e14, "unit": "FLOP/s", "seconds": None}]
    assert write_profile(MACHINE, CONSTANTS, rows, path) == path
    assert dict(read_profile(MACHINE, path)) == CONSTANTS
    assert "[[measured]]" in path.read_text() and "8192 x 8192" in path.read_text()


def test_updating_one_constant_keeps_the_others(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    write_profile(MACHINE, CONSTANTS, [{"what": "memory", "value": 1.0}], path)
    write_profile(MACHINE, {"cuda.bf16.gemm": 0.5}, path=path)
    assert dict(read_profile(MACHINE, path)) == CONSTANTS | {"cuda.bf16.gemm": 0.5}
    assert "[[measured]]" in path.read_text()


def test_profile_of_another_machine_is_ignored_and_replaced(tmp_path: Path) -> None:
    path, other = tmp_path / "machine.toml", replace(MACHINE, cores=4)
    write_profile(MACHINE, CONSTANTS, path=path)
    assert read_profile(other, path) == ()
    write_profile(other, {"cpu.launch": 1e-5}, path=path)
    assert dict(read_profile(other, path)) == {"cpu.launch": 1e-5} and read_profile(MACHINE, path) == ()


def test_missing_and_broken_profiles_are_empty(tmp_path: Path) -> None:
    path = tmp_path / "machine.toml"
    assert read_profile(MACHINE, path) == ()
    path.write_text("cpu = [")
    assert read_profile(MACHINE, path) == ()
    write_profile(MACHINE, CONSTANTS, path=path)
    assert dict(read_profile(MACHINE, path)) == CONSTANTS


def test_probe_includes_the_measured_profile() -> None:
    before = probe("")
    assert before.measured == ()
    try:
        write_profile(before, {"cpu.launch": 1e-5})
        assert probe("").measured == (("cpu.launch", 1e-5),)
    finally:
        profile_file().unlink()
