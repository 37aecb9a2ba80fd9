"""Recorded steps: the file, and where it says that the time or the memory went."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from phalanx.observe.step_recorders import (
    BEFORE,
    OUTSIDE,
    STEP_MARK,
    TOP,
    TraceRecorder,
    allocated_by_operator,
    memory_recorder,
    peak_by_place,
    spent_by_operator,
)

CPU = torch.device("cpu")


def work(steps: int = 2) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
    for step in range(steps):
        with record_function(f"{STEP_MARK}{step}"):
            model(torch.randn(32, 64)).square().sum().backward()


def test_times_are_those_that_the_profiler_computes_itself(tmp_path: Path) -> None:
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        work()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    found = spent_by_operator(json.loads((tmp_path / "trace.json").read_text())["traceEvents"], steps=1)
    own = {each.key: each.self_cpu_time_total * 1e-6 for each in recorded.key_averages()}
    outside = own.pop("ProfilerStep*", None) or sum(own.pop(f"{STEP_MARK}{step}") for step in range(2))
    expected = sorted((*own.values(), outside), reverse=True)[:TOP]
    assert list(found.values()) == pytest.approx(expected, rel=1e-2, abs=2e-6)
    assert found[OUTSIDE] == pytest.approx(outside, rel=1e-2, abs=2e-6)
    assert all(name == OUTSIDE or found[name] == pytest.approx(own[name], rel=1e-2, abs=2e-6) for name in found)


def test_a_trace_is_written_whole_and_summed_by_step(tmp_path: Path) -> None:
    recorder = TraceRecorder(CPU)
    recorder.prepare()
    torch.zeros(3).exp()  # before it starts
    recorder.start()
    work(steps=2)
    recorder.stop()
    torch.zeros(3).exp()
    top = recorder.write(path := tmp_path / f"rank-0{recorder.suffix}", 2)
    assert [file.name for file in tmp_path.iterdir()] == ["rank-0.json.gz"]
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = {event.get("name") for event in events}
    assert "aten::addmm" in names and "aten::exp" not in names
    marks = [event for event in events if str(event.get("name")).startswith(STEP_MARK)]
    duration = sum(event["dur"] for event in marks) * 1e-6
    assert len(marks) == 2 and len(top) == TOP and 0 < 2 * sum(top.values()) <= duration * 1.01


def test_a_recorder_can_be_stopped_before_it_has_started(tmp_path: Path) -> None:
    recorder = TraceRecorder(CPU)
    recorder.prepare()
    recorder.stop()
    again = TraceRecorder(CPU)
    again.prepare()
    again.start()
    work(steps=1)
    again.stop()
    assert again.write(tmp_path / "file.json.gz", 1)


def test_kernels_of_a_device_count_before_operators() -> None:
    kernel: dict[str, Any] = {"cat": "kernel", "tid": 7, "ts": 5.0}
    events = [
        {"cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 0.0, "dur": 900.0},
        kernel | {"name": "gemm", "dur": 3000.0},
        kernel | {"name": "gemm", "dur": 1000.0},
        {"cat": "gpu_memcpy", "name": "Memcpy DtoH", "tid": 7, "ts": 9.0, "dur": 500.0},
        {"cat": "gpu_user_annotation", "name": f"{STEP_MARK}3", "tid": 7, "ts": 0.0, "dur": 9000.0},
        {"name": "process_name", "ph": "M"},
    ]
    assert spent_by_operator(events, steps=2) == {"gemm": pytest.approx(2e-3), "Memcpy DtoH": pytest.approx(250e-6)}


def test_allocations_belong_to_the_operator_that_makes_them(tmp_path: Path) -> None:
    recorder = memory_recorder(CPU)
    recorder.prepare()
    recorder.start()
    a, b = torch.ones(100, 100), torch.ones(100, 100)
    a @ b
    recorder.stop()
    path = tmp_path / f"rank-0{recorder.suffix}"
    top = recorder.write(path, 1)
    assert path.name == "rank-0.memory.json.gz"
    assert top["aten::mm"] == 100 * 100 * 4 and top["aten::empty"] >= 2 * 100 * 100 * 4
    events = [{"cat": "cpu_op", "name": "aten::mm", "tid": 1, "ts": 0.0, "dur": 9.0}]
    freed = {"name": "[memory]", "tid": 1, "ts": 3.0, "args": {"Bytes": -64}}
    late = {"name": "[memory]", "tid": 1, "ts": 30.0, "args": {"Bytes": 8}}
    own = {"name": "[memory]", "tid": 1, "ts": 2.0, "args": {"Bytes": 64}}
    assert allocated_by_operator([*events, own, freed, late], steps=2) == {"aten::mm": 32.0, OUTSIDE: 4.0}


def alloc(address: int, size: int, *frames: str) -> dict[str, Any]:
    places = [{"filename": name, "line": 3, "name": "forward"} for name in frames]
    return {"action": "alloc", "addr": address, "size": size, "frames": places}


def free(address: int, size: int) -> list[dict[str, Any]]:
    return [{"action": action, "addr": address, "size": size} for action in ("free_requested", "free_completed")]


def test_memory_at_the_peak_is_told_by_the_place_of_its_allocation() -> None:
    torch_file, own_file = "/x/torch/nn/functional.py", "/x/phalanx/models/decoder.py"
    trace = [
        alloc(1, 100, torch_file, own_file),
        alloc(2, 50),
        *free(9, 30),  # was there before
        *free(2, 50),
        alloc(3, 400, own_file),  # the peak: 1000 - 30 + 100 + 400
        *free(3, 400),
        alloc(4, 10, "/x/other.py"),
    ]
    assert peak_by_place(trace, 1000) == {BEFORE: 970.0, "models/decoder.py:3 forward": 500.0}
    assert peak_by_place([], 1000) == {BEFORE: 1000.0}
