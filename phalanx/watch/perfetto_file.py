"""Writes a timeline as a file for Perfetto (ui.perfetto.dev) and chrome://tracing: a process per rank, with its phases, its work and its waits, and
one process that shows who was the last to arrive at each collective. The format is Chrome's trace events."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.watch.step_timeline import Meeting, StepOfRank, StepTimeline

_LAST_TO_ARRIVE = 1
"""Process of that track; rank N is process N + 2, as 0 is the idle process of Linux."""
_TRACKS = ("step", "phase", "work", "wait")
_TOLERANCE = 5e-6  # seconds by which slices of a row overlap because of rounding; Perfetto drops slices that cross

TraceEvent = dict[str, Any]
Meetings = dict[tuple[int, str, int], Meeting]
"""By step, group and number."""


class _Rows:
    """The rows of one process. Slices of a track that overlap get a row each: a row can only nest them."""

    def __init__(self, pid: int):
        self._pid = pid
        self._ends: dict[str, list[float]] = {}
        self._ids: dict[tuple[str, int], int] = {}

    def events(self, track: str, name: str, interval: tuple[float, float], about: dict[str, Any]) -> Iterator[TraceEvent]:
        """A slice, after the name of its row if that is new. Slices of a track come in the order of their beginnings."""
        begin, end = interval
        ends = self._ends.setdefault(track, [])
        row = next((row for row, free in enumerate(ends) if free <= begin + _TOLERANCE), len(ends))
        if row == len(ends):
            ends.append(begin)
            self._ids[track, row] = tid = len(self._ids) + 1
            yield _metadata("thread_name", self._pid, tid, {"name": track if row == 0 else f"{track} ({row + 1})"})
            order = _TRACKS.index(track) if track in _TRACKS else len(_TRACKS)
            yield _metadata("thread_sort_index", self._pid, tid, {"sort_index": 100 * order + row})
        begin = max(begin, ends[row])
        ends[row] = end = max(begin, end)
        times = {"ts": _us(begin), "dur": _us(end) - _us(begin)}
        event = {"ph": "X", "cat": track, "name": name, "pid": self._pid, "tid": self._ids[track, row]} | times
        yield event | ({"args": about} if about else {})


def write_perfetto(timeline: StepTimeline, path: Path) -> int:
    """Writes the file, compressed if its name ends with .gz; returns the number of slices."""
    slices = 0
    # Written aside and moved: a half-written file would load as a short run.
    partial = path.with_name(f".{path.name}.partial")
    with gzip.open(partial, "wt", encoding="utf-8") if path.suffix == ".gz" else partial.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
        separator = ""
        for event in trace_events(timeline):
            file.write(separator + json.dumps(event, separators=(",", ":")))
            separator = ",\n"
            slices += event["ph"] in ("X", "b")
        file.write("\n]}\n")
    partial.replace(path)
    return slices


def trace_events(timeline: StepTimeline) -> Iterator[TraceEvent]:
    by_rank: dict[int, list[StepOfRank]] = defaultdict(list)
    for ranks in timeline.steps.values():
        for rank, step in ranks.items():
            by_rank[rank].append(step)
    stamps = [min((span.begin for span in step.spans), default=step.begin) for steps in by_rank.values() for step in steps]
    zero = min(stamps, default=0.0)
    meetings = {(m.step, name, m.number): m for m in timeline.meetings for name in {call.group for call in m.calls.values()}}
    yield from _named(_LAST_TO_ARRIVE, "last to arrive", 0)
    rows = _Rows(_LAST_TO_ARRIVE)
    for meeting in timeline.meetings:
        about = {
            "collective": meeting.name,
            "technique": meeting.group.use,
            "step": meeting.step,
            "longest_wait_ms": round(1e3 * max(meeting.blocked(rank) for rank in meeting.calls), 3),
        }
        interval = meeting.first_arrival - zero, meeting.last_arrival - zero
        yield from rows.events(meeting.group.use, f"rank {meeting.last}: {meeting.name}", interval, about)
    for rank, steps in sorted(by_rank.items()):
        yield from _named(rank + 2, f"rank {rank} (node {steps[0].author.node}, {steps[0].author.host})", rank + 1)
        yield from _rank_events(sorted(steps, key=lambda step: step.begin), zero, meetings)


def _rank_events(steps: list[StepOfRank], zero: float, meetings: Meetings) -> Iterator[TraceEvent]:
    rank = steps[0].rank
    rows = _Rows(rank + 2)
    for step in steps:
        yield from rows.events("step", f"step {step.step}", (step.begin - zero, step.end - zero), {})
        for span in sorted(step.spans):
            yield from rows.events(span.kind, span.name, (span.begin - zero, span.end - zero), {})
        for call in sorted(step.calls, key=lambda call: call.begin):
            meeting = meetings.get((step.step, call.group, call.number))
            about: dict[str, Any] = {"operation": call.operation, "number": call.number}
            if meeting is not None:
                waited = round(1e3 * meeting.blocked(rank), 3)
                about |= {"technique": meeting.group.use, "last_to_arrive": f"rank {meeting.last}", "waited_ms": waited}
            name = f"{call.operation} of {call.label}" if call.label else call.operation
            yield from rows.events("wait", name, (call.begin - zero, call.end - zero), about)
            if call.arrived < call.begin:  # it was under way while the rank computed
                flight = {"cat": "in flight", "id": f"{rank}.{step.step}.{call.group}.{call.number}", "name": name}
                yield {"ph": "b", "pid": rank + 2, "tid": 0, "ts": _us(call.arrived - zero), **flight}
                yield {"ph": "e", "pid": rank + 2, "tid": 0, "ts": _us(call.end - zero), **flight}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _metadata(kind: str, pid: int, tid: int, about: dict[str, Any]) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": about}


def _named(pid: int, name: str, order: int) -> Iterator[TraceEvent]:
    yield _metadata("process_name", pid, 0, {"name": name})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": order})
