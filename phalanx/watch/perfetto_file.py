"""Writes a timeline as a file for Perfetto (ui.perfetto.dev) and chrome://tracing: a process per rank, with its phases, its work and its waits, and
one process that shows who was the last to arrive at each collective. The format is Chrome's trace events."""

from __future__ import annotations

import gzip
import heapq
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from phalanx.watch.step_timeline import Meeting, StepOfRank, StepTimeline

_STEPS, _PHASES, _WORK, _WAITS = 1, 2, 3, 4
_TRACKS = {_STEPS: "steps", _PHASES: "phases", _WORK: "work", _WAITS: "waits"}
_LAST_TO_ARRIVE = 1
"""Process of that track; rank N is process N + 2, as 0 is the idle process of Linux."""

TraceEvent = dict[str, Any]


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
    steps = [step for ranks in timeline.steps.values() for step in ranks.values()]
    stamps = [step.begin for step in steps] + [span.begin for step in steps for span in step.spans]
    zero = min(stamps, default=0.0)
    last = {(m.step, name, m.number): m for m in timeline.meetings for name in {call.group for call in m.calls.values()}}
    yield from _named(_LAST_TO_ARRIVE, "last to arrive", -1)
    yield from _last_to_arrive(timeline, zero)
    seen: set[int] = set()
    for step in sorted(steps, key=lambda step: (step.rank, step.begin)):
        if step.rank not in seen:
            seen.add(step.rank)
            author = step.author
            yield from _named(step.rank + 2, f"rank {step.rank} (node {author.node}, {author.host})", step.rank)
            for track, name in _TRACKS.items():
                yield _metadata("thread_name", step.rank + 2, track, {"name": name})
                yield _metadata("thread_sort_index", step.rank + 2, track, {"sort_index": track})
        yield from _rank_events(step, zero, last)


def _rank_events(step: StepOfRank, zero: float, meetings: dict[tuple[int, str, int], Meeting]) -> Iterator[TraceEvent]:
    pid = step.rank + 2
    yield _slice((pid, _STEPS), f"step {step.step}", (step.begin - zero, step.end - zero), "step")
    for span in step.spans:
        track = _PHASES if span.kind == "phase" else _WORK
        yield _slice((pid, track), span.name, (span.begin - zero, span.end - zero), span.kind)
    for call in step.calls:
        meeting = meetings.get((step.step, call.group, call.number))
        name = f"{call.operation} of {call.label}" if call.label else call.operation
        about: dict[str, Any] = {"operation": call.operation, "number": call.number}
        if meeting is not None:
            about |= {
                "technique": meeting.group.use,
                "last_to_arrive": f"rank {meeting.last}",
                "waited_ms": round(1e3 * meeting.blocked(step.rank), 3),
            }
        yield _slice((pid, _WAITS), name, (call.begin - zero, call.end - zero), "wait", about)
        if call.arrived < call.begin:  # it was under way while the rank computed
            flight = {"cat": "in flight", "id": f"{step.rank}.{step.step}.{call.group}.{call.number}", "name": name, "pid": pid}
            yield {"ph": "b", "tid": _WAITS, "ts": _us(call.arrived - zero), **flight}
            yield {"ph": "e", "tid": _WAITS, "ts": _us(call.end - zero), **flight}


def _last_to_arrive(timeline: StepTimeline, zero: float) -> Iterator[TraceEvent]:
    """A slice from the first arrival to the last, named by the last rank. Collectives of one technique that overlap have a row each."""
    tracks: dict[tuple[str, int], int] = {}
    ends: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for meeting in timeline.meetings:
        use, busy = meeting.group.use, ends[meeting.group.use]
        row = heapq.heappop(busy)[1] if busy and busy[0][0] <= meeting.first_arrival else len(busy)
        heapq.heappush(busy, (meeting.last_arrival, row))
        if (use, row) not in tracks:
            tracks[use, row] = len(tracks) + 1
            name = use if row == 0 else f"{use} ({row + 1})"
            yield _metadata("thread_name", _LAST_TO_ARRIVE, tracks[use, row], {"name": name})
        about = {
            "collective": meeting.name,
            "technique": use,
            "step": meeting.step,
            "longest_wait_ms": round(1e3 * max(meeting.blocked(rank) for rank in meeting.calls), 3),
        }
        interval = meeting.first_arrival - zero, meeting.last_arrival - zero
        yield _slice(
            (_LAST_TO_ARRIVE, tracks[use, row]), f"rank {meeting.last}: {meeting.name}", interval, "last to arrive", about
        )


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _slice(
    track: tuple[int, int], name: str, interval: tuple[float, float], category: str, about: dict[str, Any] | None = None
) -> TraceEvent:
    times = {"ts": _us(interval[0]), "dur": _us(max(0.0, interval[1] - interval[0]))}
    event = {"ph": "X", "cat": category, "name": name, "pid": track[0], "tid": track[1]} | times
    return event | ({"args": about} if about else {})


def _metadata(kind: str, pid: int, tid: int, about: dict[str, Any]) -> TraceEvent:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": about}


def _named(pid: int, name: str, order: int) -> Iterator[TraceEvent]:
    yield _metadata("process_name", pid, 0, {"name": name})
    yield _metadata("process_sort_index", pid, 0, {"sort_index": order})
