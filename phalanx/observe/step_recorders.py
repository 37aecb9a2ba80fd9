"""Records what a rank does in some of its steps, when somebody asks: a trace of torch.profiler, or the history of its memory.

A recorder is prepared one step ahead, started, stopped and written. Only writing may be done by another thread. `training/hooks/step_profile` calls
the first three around steps.
"""

from __future__ import annotations

import contextlib
import gzip
import os
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from phalanx import accelerator

TOP = 10
"""Parts that a summary names."""
OUTSIDE = "(outside of operators)"
"""Time of the step in which the rank's own thread runs no operator: Python, waiting, reading data."""
BEFORE = "(allocated before)"
"""Memory that was in use when recording began."""
STEP_MARK = "ProfilerStep#"
"""Marks a step in a trace, as other tools know it."""
_MARK = STEP_MARK.rstrip("#")  # sums over events have another end
_NAME = 160  # characters of a name in a summary
_CHUNK = 1 << 20


class Recorder(Protocol):
    """Records steps of this rank."""

    suffix: str
    """Of the file's name."""

    def prepare(self) -> None:
        """Recording begins with the next step."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def write(self, path: Path, steps: int) -> dict[str, float]:
        """Write what was recorded in this many steps; returns its largest parts."""


class TraceRecorder:
    """Records every operator and kernel with torch.profiler; with `memory`, also every allocation of torch."""

    def __init__(self, device: torch.device, *, memory: bool = False):
        activities = [ProfilerActivity.CPU]
        if accelerator.of(device).asynchronous:
            activities.append(ProfilerActivity.CUDA)
        self._profile, self._memory = profile(activities=activities, profile_memory=memory), memory
        self.suffix = ".memory.json.gz" if memory else ".json.gz"
        self._started = False

    def prepare(self) -> None:
        self._profile.prepare_trace()

    def start(self) -> None:
        self._profile.start_trace()
        self._started = True

    def stop(self) -> None:
        if not self._started:  # the profiler cannot be stopped before
            self._profile.start_trace()
        self._profile.stop_trace()

    def write(self, path: Path, steps: int) -> dict[str, float]:
        plain = path.with_name(f".{path.name}.plain")
        try:
            self._profile.export_chrome_trace(str(plain))
            with _replaced(path) as partial, plain.open("rb") as source, gzip.open(partial, "wb", compresslevel=5) as packed:
                shutil.copyfileobj(source, packed, _CHUNK)
        finally:
            plain.unlink(missing_ok=True)
        events = self._profile.key_averages()
        return allocated_by_operator(events, steps) if self._memory else spent_by_operator(events, steps)


class MemoryRecorder:
    """Records every allocation and its stack in the allocator of a GPU."""

    suffix = ".pickle"

    def __init__(self, device: torch.device):
        self._kind = accelerator.of(device)
        self._index, self._before, self._snapshot = device.index or 0, 0, None

    def prepare(self) -> None: ...

    def start(self) -> None:
        self._before = self._kind.memory_allocated()
        self._kind.record_memory_history(True)

    def stop(self) -> None:
        try:
            self._snapshot = self._kind.memory_snapshot()
        finally:
            self._kind.record_memory_history(False)

    def write(self, path: Path, steps: int) -> dict[str, float]:
        assert self._snapshot is not None
        with _replaced(path) as partial, partial.open("wb") as file:
            pickle.dump(self._snapshot, file)
        return peak_by_place(self._snapshot["device_traces"][self._index], self._before)


def memory_recorder(device: torch.device) -> Recorder:
    """The recorder of a device's memory. Torch has no allocator of its own on CPUs: there the profiler records what operators allocate."""
    return MemoryRecorder(device) if accelerator.of(device).asynchronous else TraceRecorder(device, memory=True)


@contextlib.contextmanager
def _replaced(path: Path) -> Iterator[Path]:
    """A file beside `path` to write, which takes its place when it is complete."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def spent_by_operator(events: Sequence[Any], steps: int) -> dict[str, float]:
    """Seconds of one step in the kernels that take longest; in operators, if the device is the host."""
    kernels = [event for event in events if event.device_type != DeviceType.CPU and not _is_mark(event)]
    spent: dict[str, float] = {}
    for event in kernels or events:
        name = OUTSIDE if event.key.startswith(_MARK) else event.key
        micros = event.self_device_time_total if kernels else event.self_cpu_time_total
        spent[name] = spent.get(name, 0.0) + micros * 1e-6 / steps
    return _largest(spent)


def _is_mark(event: Any) -> bool:
    """Whether it only spans others."""
    return bool(getattr(event, "is_user_annotation", False)) or event.key.startswith(_MARK)


def allocated_by_operator(events: Sequence[Any], steps: int) -> dict[str, float]:
    """Bytes that operators allocate in one step and do not free themselves."""
    return _largest({event.key: event.self_cpu_memory_usage / steps for event in events if not event.key.startswith(_MARK)})


def peak_by_place(trace: Sequence[Mapping[str, Any]], before: int) -> dict[str, float]:
    """The bytes in use at the peak of a memory history, by the place in the program that has allocated them. `before`: in use when it began."""
    now = peak = before
    until = 0
    """Entries up to the peak."""
    for index, entry in enumerate(trace):
        now += entry["size"] if entry["action"] == "alloc" else -entry["size"] if entry["action"] == "free_completed" else 0
        if now > peak:
            peak, until = now, index + 1
    live: dict[int, Mapping[str, Any]] = {}
    for entry in trace[:until]:
        if entry["action"] == "alloc":
            live[entry["addr"]] = entry
        elif entry["action"] == "free_completed":
            live.pop(entry["addr"], None)  # else it was there before
    places: dict[str, float] = {}
    for entry in live.values():
        place = _place(entry.get("frames", ()))
        places[place] = places.get(place, 0.0) + entry["size"]
    return _largest({BEFORE: peak - sum(places.values())} | places)


def _place(frames: Sequence[Mapping[str, Any]]) -> str:
    """The innermost frame that is not torch's own."""
    own = next((frame for frame in frames if "/torch/" not in frame["filename"]), frames[0] if frames else None)
    if own is None:
        return "(unknown)"
    return f"{'/'.join(Path(own['filename']).parts[-2:])}:{own['line']} {own['name']}"


def _largest(values: Mapping[str, float]) -> dict[str, float]:
    ordered = sorted(((value, name) for name, value in values.items() if value > 0), reverse=True)[:TOP]
    return {name[:_NAME]: value for value, name in ordered}
