"""Records what a rank does in some of its steps, when somebody asks: a trace of torch.profiler, or the history of its memory.

A recorder is prepared one step ahead, started, stopped and written. Only writing may be done by another thread. `training/hooks/step_profile` calls
the first three around steps.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import pickle
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
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
_HOST_WORK = ("cpu_op", "user_annotation")
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of events in a trace."""
_ALLOCATION = "[memory]"
"""Name of the event of an allocation, or of its end."""
_NAME = 160  # characters of a name in a summary
_CHUNK = 1 << 20

TraceEvent = Mapping[str, Any]
"""An event of a trace in the format of Chrome."""


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
            # Not key_averages of the profiler, which takes a minute for what this does in a second: the thread holds up training meanwhile.
            events = json.loads(plain.read_bytes())["traceEvents"]
        finally:
            plain.unlink(missing_ok=True)
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


def spent_by_operator(events: Sequence[TraceEvent], steps: int) -> dict[str, float]:
    """Seconds of one step in the kernels that take longest; where there are none, in operators themselves, without those that they call."""
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        if event.get("cat") in _DEVICE_WORK:
            spent[event["name"]] += event["dur"]
    if not spent:
        for operators in _by_thread(events).values():
            open_ones: list[TraceEvent] = []
            for event in operators:
                if (outer := _innermost(open_ones, event["ts"])) is not None:
                    spent[_operator(outer)] -= event["dur"]
                spent[_operator(event)] += event["dur"]
                open_ones.append(event)
    return _largest({name: micros * 1e-6 / steps for name, micros in spent.items()})


def allocated_by_operator(events: Sequence[TraceEvent], steps: int) -> dict[str, float]:
    """Bytes that operators allocate in one step, whether or not they free them again."""
    allocated: dict[str, float] = defaultdict(float)
    for timed in _by_thread(events, with_memory=True).values():
        open_ones: list[TraceEvent] = []
        for event in timed:
            outer = _innermost(open_ones, event["ts"])
            if event["name"] != _ALLOCATION:
                open_ones.append(event)
            elif event["args"]["Bytes"] > 0:
                allocated[OUTSIDE if outer is None else _operator(outer)] += event["args"]["Bytes"]
    return _largest({name: size / steps for name, size in allocated.items()})


def _by_thread(events: Sequence[TraceEvent], *, with_memory: bool = False) -> dict[object, list[TraceEvent]]:
    """The operators of each thread, an outer one before those that it calls."""
    threads: dict[object, list[TraceEvent]] = defaultdict(list)
    for event in events:
        if event.get("cat") in _HOST_WORK or (with_memory and event.get("name") == _ALLOCATION):
            threads[event["tid"]].append(event)
    for found in threads.values():
        found.sort(key=lambda event: (event["ts"], -event.get("dur", 0.0)))
    return threads


def _innermost(open_ones: list[TraceEvent], now: float) -> TraceEvent | None:
    """The operator that runs at a time, of those that have begun; others are dropped."""
    while open_ones and open_ones[-1]["ts"] + open_ones[-1]["dur"] <= now:
        open_ones.pop()
    return open_ones[-1] if open_ones else None


def _operator(event: TraceEvent) -> str:
    name: str = event["name"]
    return OUTSIDE if name.startswith(STEP_MARK) else name


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
