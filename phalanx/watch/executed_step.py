"""One step of a pipeline as its ranks executed it, from the timeline of the run (`watch.timeline`), for the page. Only the ranks of one pipeline are
read, and of their files only the lines of one step: the page asks again and again."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from phalanx.events.records import ClockAligned
from phalanx.events.timeline_files import FOLDER, Author
from phalanx.spec.json_value import Json, JsonObject
from phalanx.watch.follow_lines import read_small
from phalanx.watch.record_values import Record, count, entries, known, number, parse, text, whole
from phalanx.watch.step_timeline import clock_shifts

_SEGMENT = re.compile(r"rank-(\d{1,7})\.(\d{1,9})\.jsonl")
_LINE = re.compile(rb'^\{"step":(\d{1,15}),[^\n]*\n', re.MULTILINE)
_ACTION = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)
_OTHERS = ("loading", "reduce", "optimizer")
"""Phases of a step that are drawn besides the actions."""
_MAX_BYTES = 64 << 20
"""Of one file; a longer one is not read beyond them."""
_MAX_FILES, _MAX_SPANS = 100_000, 20_000
_LOOK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Found:
    """The line of a step of a rank, and who wrote it."""

    author: Author
    line: bytes

    @property
    def launch(self) -> tuple[str, int, int]:
        return self.author.launch, self.author.generation, self.author.ranks


@dataclass(slots=True)
class TimelineReader:
    """The timeline of a run directory. Its files are listed once a second at most."""

    run_dir: Path
    _looked: float = field(default=-math.inf, init=False)
    _files: dict[int, list[int]] = field(default_factory=dict, init=False)
    """Segments of each rank."""

    def _listed(self) -> dict[int, list[int]]:
        if time.monotonic() - self._looked > _LOOK_SECONDS:
            files: dict[int, list[int]] = {}
            try:
                names = [entry.name for entry, _ in zip(os.scandir(self.run_dir / FOLDER), range(_MAX_FILES), strict=False)]
            except OSError:
                names = []
            for match in filter(None, map(_SEGMENT.fullmatch, names)):
                files.setdefault(int(match[1]), []).append(int(match[2]))
            self._files, self._looked = files, time.monotonic()
        return self._files

    def _path(self, rank: int, segment: int) -> Path:
        return self.run_dir / FOLDER / f"rank-{rank}.{segment:04d}.jsonl"

    def version(self) -> str:
        """Changes with what is recorded."""
        files = self._listed()
        if not files:
            return ""
        rank = min(files)
        try:
            status = os.stat(self._path(rank, max(files[rank])), follow_symlinks=False)
        except OSError:
            return ""
        return f"{max(files[rank])}.{status.st_size}"

    def steps(self, rank: int) -> dict[int, _Found]:
        """The recorded steps of a rank. Of one that was taken several times, the last."""
        found: dict[int, _Found] = {}
        for segment in sorted(self._listed().get(rank, [])):
            content = read_small(self._path(rank, segment), _MAX_BYTES)
            author = _author(parse(content[: content.find(b"\n") + 1] or b"") or {})
            if author is not None and author.rank == rank:
                for match in _LINE.finditer(content):
                    found[int(match[1])] = _Found(author, match[0])
        return found


def executed(reader: TimelineReader, ranks: Sequence[int], step: int | None, clocks: Mapping[int, ClockAligned]) -> JsonObject:
    """A step of the ranks of one pipeline, the newest that all of them have recorded if none is named; why there is none, otherwise."""
    rows = [reader.steps(rank) for rank in ranks]
    common = set.intersection(*(set(row) for row in rows)) if rows else set()
    complete = sorted(each for each in common if len({row[each].launch for row in rows}) == 1)
    if not complete:
        return {"reason": "What ranks do in a step is recorded with `watch.timeline = true`."}
    chosen = step if step in complete else complete[-1]
    parsed = [_times(parse(row[chosen].line) or {}) for row in rows]
    authors = [row[chosen].author for row in rows]
    shifts, error = clock_shifts(authors, list(clocks.values()))
    begins = [times.begin + shifts[author] for times, author in zip(parsed, authors, strict=True)]
    origin = min((begin for begin in begins if math.isfinite(begin)), default=0.0)
    shifted = [
        times.shifted(begin - origin if math.isfinite(begin) else 0.0) for times, begin in zip(parsed, begins, strict=True)
    ]
    return {
        "step": chosen, "first": complete[0], "last": complete[-1], "steps": len(complete), "ranks": list(ranks), "rows": [times.drawn() for times in shifted],
        "bubble": _bubble(shifted), "clock_error": error,
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Times:
    """What a rank did in a step, in seconds since its beginning or since that of the first rank."""

    begin: float
    seconds: float
    actions: list[tuple[str, int, int, float, float]]
    others: list[tuple[str, float, float]]
    shift: float = 0.0

    def shifted(self, seconds: float) -> _Times:
        actions = [(kind, stage, batch, start + seconds, stop + seconds) for kind, stage, batch, start, stop in self.actions]
        others = [(name, start + seconds, stop + seconds) for name, start, stop in self.others]
        return _Times(self.begin, self.seconds, actions, others, seconds)

    def drawn(self) -> JsonObject:
        actions: list[Json] = [list(action) for action in self.actions]
        others: list[Json] = [list(other) for other in self.others]
        return {"actions": actions, "others": others, "seconds": known(self.seconds), "shift": self.shift}


def _times(record: Record) -> _Times:
    """What a rank recorded of a step, in seconds since its beginning."""
    actions, others = [], []
    for span in entries(record, "spans", _MAX_SPANS):
        match span:
            case [int() | float() as begin, int() | float() as end, str() as kind, str() as name] if begin <= end:
                start, stop = begin / 1e6, end / 1e6
            case _:
                continue
        if kind == "work" and (action := _ACTION.fullmatch(name)) is not None:
            actions.append((action[2], int(action[1]), int(action[3]), start, stop))
        elif kind == "phase" and name in _OTHERS and end > 0:  # what is before the step belongs to the one before
            others.append((name, start, stop))
    return _Times(number(record, "begin"), number(record, "us") / 1e6, actions, others)


def _bubble(rows: Sequence[_Times]) -> float | None:
    """Fraction of the time between the first action of any rank and the last one of any rank in which a rank computed nothing."""
    spans = [(start, stop) for row in rows for *_, start, stop in row.actions]
    if not spans:
        return None
    whole_time = max(stop for _, stop in spans) - min(start for start, _ in spans)
    busy = sum(stop - start for start, stop in spans)
    return known(1 - busy / (len(rows) * whole_time)) if whole_time > 0 else None


def _author(record: Record) -> Author | None:
    if "timeline" not in record:
        return None
    wall, monotonic = number(record, "wall"), number(record, "monotonic")
    rank, ranks, node, generation = (whole(record, name) for name in ("rank", "ranks", "node", "generation"))
    if rank is None or ranks is None or not math.isfinite(wall) or not math.isfinite(monotonic):
        return None
    return Author(
        rank=rank, ranks=ranks, node=node or 0, host=text(record, "host", 200), boot=text(record, "boot", 80), generation=generation or 0,
        launch=text(record, "launch", 80), wall=wall, monotonic=monotonic,
    )  # fmt: skip


def clock_of(record: Record) -> ClockAligned | None:
    """A comparison of a node's clock with that of the controller."""
    offset, error = number(record, "offset"), number(record, "error")
    if not math.isfinite(offset) or not math.isfinite(error):
        return None
    return ClockAligned(node=count(record, "node"), reference=count(record, "reference"), offset=offset, error=error)
