"""The timeline of a run: files with what each rank did in each step, and when. Ranks write them, `phalanx trace` and the page read them;
docs/run-directory.md is the contract.

A rank writes `timeline/rank-N.SSSS.jsonl`, a segment of some steps at a time, and removes the oldest segments: the timeline of a long run has
a bounded size. The first line of a segment says who wrote it, every other line is one step. Times of a step are microseconds since its
beginning, which is in seconds of the host's monotonic clock: `watch/aligned_clocks` brings hosts together.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = "timeline"
_FORMAT = 1
_SEGMENTS = 4
"""Segments that hold the steps to keep; one more is being written."""
_QUEUE = 1000  # steps that wait for the disk
_RETRY = 1.0  # seconds after an error of the disk
_LAST_WORDS = 5.0  # seconds in which the last steps must be written
_MAX_LINE = 64 << 20  # bytes of one line that are read


class Span(NamedTuple):
    """What a rank did in an interval. Seconds since the beginning of the step; negative: before it, since the last step."""

    begin: float
    end: float
    kind: str
    """"phase": the step cut into "loading", "compute", "reduce", "optimizer", "other", and between steps "evaluating", "saving" and so on.
    "work": a part of it such as "forward 0"; an action of a pipeline is named as schedules print it, "0F1"."""
    name: str


class Call(NamedTuple):
    """A rank's part in one collective, or in one message between two ranks."""

    group: str
    """Name of the process group, or of the pair of ranks; the same on all of its ranks."""
    number: int
    """Counts the calls of a group in a step. With the group and the step, it identifies the call on all ranks."""
    operation: str
    label: str
    """What it moves, such as "bucket 3"; empty if that is unknown."""
    arrived: float
    """The rank was ready for the others: it began the collective, or waited for the message."""
    begin: float
    """It began to wait; it may have computed since it arrived."""
    end: float
    """The wait was over."""


class CallGroup(NamedTuple):
    """Ranks that communicate."""

    use: str
    """The technique: "data", "tensor", "pipeline" and so on."""
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStep:
    """One step of one rank."""

    step: int
    begin: float
    """Seconds of the host's monotonic clock."""
    seconds: float
    """Duration of the step."""
    spans: list[Span]
    calls: list[Call]


@dataclass(frozen=True, kw_only=True, slots=True)
class Author:
    """Who wrote a segment."""

    rank: int
    ranks: int
    node: int
    host: str
    boot: str
    """Identifies the running system of the host: ranks with the same one share a clock."""
    generation: int
    launch: str
    """The same on all ranks of a launch."""
    wall: float
    """Seconds since 1970 at `monotonic` seconds of the host's clock."""
    monotonic: float


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """A step as it was read, with who wrote it."""

    author: Author
    record: RankStep
    groups: dict[str, CallGroup] = field(repr=False)
    """Of the segment; shared between its steps."""

    @property
    def wall(self) -> float:
        """When it began, in seconds since 1970 by its host's clock."""
        return self.record.begin - self.author.monotonic + self.author.wall


class TimelineWriter:
    """Writes the timeline of one rank, in a thread of its own. A disk that is full or slow costs records, never a step."""

    def __init__(self, run_dir: Path, author: Author, keep: int):
        """`keep`: the number of steps that remain at least."""
        self._folder, self._author = run_dir / FOLDER, author
        self._per_segment = max(1, -(-keep // _SEGMENTS))
        self._groups: dict[str, CallGroup] = {}
        self._queue: queue.Queue[RankStep | None] = queue.Queue(maxsize=_QUEUE)
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)
        self._thread.start()

    def add_group(self, name: str, group: CallGroup) -> None:
        """A group that the following steps mention."""
        self._groups[name] = group

    def add(self, step: RankStep) -> None:
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(step)

    def close(self) -> None:
        """Write what is left."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=_LAST_WORDS)
        self._thread.join(timeout=_LAST_WORDS)

    def _run(self) -> None:
        while (step := self._queue.get()) is not None:
            try:
                if not self._write_segment(step):
                    return
            except OSError:
                time.sleep(_RETRY)  # the disk is full; what the queue cannot hold meanwhile is lost

    def _write_segment(self, step: RankStep | None) -> bool:
        """Writes this step and those after it; returns False if one of them was the last of all."""
        self._folder.mkdir(parents=True, exist_ok=True)
        known = _segments(self._folder, self._author.rank)
        number = 1 + max((segment for segment, _ in known), default=-1)
        for segment, path in known:
            if segment < number - _SEGMENTS:
                path.unlink(missing_ok=True)
        named: set[str] = set()
        header = {"timeline": _FORMAT} | {name: getattr(self._author, name) for name in Author.__slots__}
        path = self._folder / f"rank-{self._author.rank}.{number:04d}.jsonl"
        with path.open("x", encoding="utf-8", buffering=1) as file:
            file.write(_dump(header))
            for place in range(self._per_segment):
                step = self._queue.get() if place else step
                if step is None:
                    return False
                new = {call.group for call in step.calls} - named
                named |= new
                file.write(_dump(_encoded(step, {name: self._groups[name] for name in sorted(new) if name in self._groups})))
        return True


def _segments(folder: Path, rank: int | None = None) -> list[tuple[int, Path]]:
    """Numbers and files of all segments, or of those of one rank, in the order of their numbers."""
    found = []
    for path in folder.glob(f"rank-{'*' if rank is None else rank}.*.jsonl"):
        parts = path.name.split(".")
        if len(parts) == 3 and parts[1].isdecimal():
            found.append((int(parts[1]), path))
    return sorted(found)


def _dump(table: dict[str, Any]) -> str:
    return json.dumps(table, separators=(",", ":"), allow_nan=False) + "\n"


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)


def _encoded(step: RankStep, groups: dict[str, CallGroup]) -> dict[str, Any]:
    return {
        "step": step.step,
        "begin": round(step.begin, 6),
        "us": _microseconds(step.seconds),
        "spans": [[_microseconds(begin), _microseconds(end), kind, name] for begin, end, kind, name in step.spans],
        "calls": [[*call[:4], *map(_microseconds, call[4:])] for call in step.calls],
    } | ({"groups": {name: [group.use, list(group.ranks)] for name, group in groups.items()}} if groups else {})


def has_timeline(run_dir: Path) -> bool:
    return bool(_segments(run_dir / FOLDER))


def recorded_ranks(run_dir: Path) -> list[int]:
    """Ranks with a timeline, by its files."""
    names = {path.name.split(".")[0].removeprefix("rank-") for _, path in _segments(run_dir / FOLDER)}
    return sorted(int(name) for name in names if name.isdecimal())


def read_timeline(run_dir: Path, first: int = 0, last: int | None = None) -> list[RecordedStep]:
    """The steps `first` to `last` of all ranks. A step that was taken several times, after a failure or in several launches, is there as it
    was taken last; lines that cannot be read are left out."""
    newest: dict[tuple[int, int], RecordedStep] = {}
    for _, path in _segments(run_dir / FOLDER):
        for found in _read_segment(path, first, last):
            key = found.record.step, found.author.rank
            if key not in newest or found.wall >= newest[key].wall:
                newest[key] = found
    # Ranks of a former launch or layout, which the newest has not: their step is another one.
    origin: dict[int, RecordedStep] = {}
    for (step, _), found in newest.items():
        if step not in origin or found.wall > origin[step].wall:
            origin[step] = found
    kept = [found for (step, _), found in newest.items() if _generation(found) == _generation(origin[step])]
    return sorted(kept, key=lambda found: (found.record.step, found.author.rank))


def _generation(found: RecordedStep) -> tuple[str, int, int]:
    return found.author.launch, found.author.generation, found.author.ranks


def _read_segment(path: Path, first: int, last: int | None) -> Iterator[RecordedStep]:
    author: Author | None = None
    groups: dict[str, CallGroup] = {}
    with contextlib.suppress(OSError), path.open("rb") as file:
        while line := file.readline(_MAX_LINE):
            try:
                table = json.loads(line)
                if "timeline" in table:
                    author = Author(**{name: table[name] for name in Author.__slots__})
                    continue
                groups.update({name: CallGroup(use, tuple(ranks)) for name, (use, ranks) in table.get("groups", {}).items()})
                if author is not None and first <= table["step"] <= (table["step"] if last is None else last):
                    yield RecordedStep(author, _decoded(table), groups)
            except (ValueError, TypeError, KeyError, AttributeError):
                continue  # half a line, or damaged


def _decoded(table: dict[str, Any]) -> RankStep:
    return RankStep(
        step=int(table["step"]),
        begin=float(table["begin"]),
        seconds=table["us"] / 1e6,
        spans=[Span(begin / 1e6, end / 1e6, str(kind), str(name)) for begin, end, kind, name in table["spans"]],
        calls=[
            Call(str(group), int(number), str(operation), str(label), arrived / 1e6, begin / 1e6, end / 1e6)
            for group, number, operation, label, arrived, begin, end in table["calls"]
        ],
    )
