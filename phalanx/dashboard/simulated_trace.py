"""A simulated step for Perfetto and Chrome's tracing page: a track for each pipeline rank, and one for each link. The CLI writes it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from phalanx.dashboard.simulated_picture import Sent
from phalanx.schedules.actions import KINDS
from phalanx.schedules.timing import Timeline

_MICRO = 1e6
_RANKS, _LINKS = 1, 2
"""Processes, as the format calls groups of tracks."""


def trace(timeline: Timeline, sent: Sequence[Sent], seconds: float) -> str:
    """The file's text. `seconds`: of the whole step; what follows the schedule's last action is drawn as one."""
    events: list[dict[str, Any]] = [_named(_RANKS, "pipeline ranks"), _named(_LINKS, "links")]
    for rank, row in enumerate(timeline.ranks):
        events.append(_track(_RANKS, rank, f"rank {rank}"))
        for timed in row:
            name = f"{timed.stage}{timed.kind}{timed.micro_batch}"
            told = {"stage": timed.stage, "micro-batch": timed.micro_batch}
            events.append(_slice(_RANKS, rank, name, KINDS[timed.kind], timed.start, timed.stop) | {"args": told})
        if seconds > timeline.stop:
            events.append(_slice(_RANKS, rank, "gradients, optimizer", "tail", timeline.stop, seconds))
    # Slices of one track must not overlap unless one lies within the other: messages that share a link get lanes of their own.
    free: dict[tuple[int, str], list[float]] = {}
    tracks: dict[tuple[int, str, int], int] = {}
    for rank, link, dimension, name, start, stop in sorted(sent, key=lambda one: one[4]):
        lanes = free.setdefault((rank, link), [])
        lane = next((place for place, until in enumerate(lanes) if until <= start + 1e-12), len(lanes))
        lanes[lane : lane + 1] = [stop]
        key = rank, link, lane
        if key not in tracks:
            tracks[key] = len(tracks)
            events.append(_track(_LINKS, tracks[key], f"rank {rank} {link}" + (f" ({lane + 1})" if lane else "")))
        events.append(_slice(_LINKS, tracks[key], f"{dimension} {name}", dimension, start, stop))
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})


def _named(group: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "process_name", "pid": group, "args": {"name": name}}


def _track(group: int, number: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": group, "tid": number, "args": {"name": name}}


def _slice(group: int, number: int, name: str, kind: str, start: float, stop: float) -> dict[str, Any]:
    when = {"ts": start * _MICRO, "dur": (stop - start) * _MICRO}
    return {"ph": "X", "name": name, "cat": kind, "pid": group, "tid": number} | when
