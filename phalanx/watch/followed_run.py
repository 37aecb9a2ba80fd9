"""A run directory that is followed: reads what is new in its events, and knows whether the run is going on. Reads only, and follows no link."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import threading
import time
import tomllib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.events.rundir import RunDir
from phalanx.spec.json_value import JsonObject
from phalanx.watch.executed_step import TimelineReader
from phalanx.watch.follow_lines import BLOCK, LineFollower, read_small
from phalanx.watch.record_values import known, number, parse, text, whole
from phalanx.watch.run_digest import ENDINGS, Digest

_SMALL_FILE = 1 << 20
"""Bytes of a run file or plan that are read."""
_LOOK_SECONDS = 0.2
"""Between two looks at the events: requests within it are answered from what is known."""
_STATE_SECONDS = 1.0
_FOLDER_SECONDS = 2.0
_DEPTH, _MAX_RUNS, _MAX_ENTRIES = 3, 2000, 20_000
_MEMORY = 256 << 20
"""Bytes of digests that are kept; the least recently used are dropped and read again when asked for."""
_GLANCE = 1 << 16
MAX_RECENT = 50
_RECENT_SECONDS = 86400.0
"""A run whose events have not changed for so long is not recent."""


@dataclass(slots=True)
class Ends:
    """A run as far as its first and its last records tell."""

    planned: int | None = None
    step: int = 0
    loss: float = math.nan
    eval_loss: float = math.nan
    time: float = math.nan
    state: str | None = None
    """How it has ended; None if it has not said so."""


class FollowedRun:
    """One run. Its methods may be called by several threads."""

    def __init__(self, name: str, path: Path, is_running: Callable[[], bool] | None = None):
        """`is_running`: whether a run goes on that has not said that it has ended; None: the directory tells."""
        self.name = name
        self.rundir = RunDir(path)
        self._is_running = is_running or (lambda: self.rundir.is_running)
        self.lock = threading.Lock()
        self.digest = Digest()
        self.timeline = TimelineReader(path)
        self.restarts = 0
        """Times that the events were another file than before."""
        self._lines = LineFollower(self.rundir.events_file)
        self._deferred: list[tuple[int, int]] = []
        self._deferred_bytes = 0
        self._looked = 0.0
        self._caught_up = False
        """Everything but the records of ranks was read once: the last record says what the state is."""
        self._state: tuple[float, str] = (0.0, "interrupted")
        self._glanced: tuple[tuple[int, int, int], Ends] | None = None

    @property
    def version(self) -> str:
        """Changes with everything that a view shows."""
        return f"{self.restarts}.{self.digest.version}.{self.state}"

    @property
    def progress(self) -> float:
        """Fraction of the events that is read."""
        size = self._lines.size
        return 1.0 if not size else (self._lines.offset - 0.5 * self._deferred_bytes) / size

    @property
    def unreadable(self) -> int:
        """Lines that are broken or too long."""
        return self.digest.broken + self._lines.too_long

    @property
    def ranks_known(self) -> bool:
        """Whether the records of ranks are read; they come last."""
        return not self._deferred

    def catch_up(self, seconds: float) -> bool:
        """Read what is new, for about so long. Returns whether all is read. First everything but the records of single ranks is read, of
        which a large run has most, so that there is a picture at once."""
        deadline = time.monotonic() + seconds
        while True:
            with self.lock:
                now = time.monotonic()
                if now - self._looked >= _LOOK_SECONDS or self._lines.behind:
                    done = not self._read_block()
                    if done:
                        self._looked, self._caught_up = now, True
                else:
                    done = True
                if done and self._deferred:
                    self._read_deferred()
                    done = not self._deferred
            if done or time.monotonic() >= deadline:
                return done

    def _read_block(self) -> bool:
        block = self._lines.read()
        if block is None:
            return False
        if block.replaced:
            self.digest, self._deferred, self._deferred_bytes, self._caught_up = Digest(), [], 0, False
            self.restarts += 1
            return True
        later = bool(self._deferred) or self._lines.behind >= BLOCK
        self.digest.feed(block.lines, ranks=not later)
        if later:
            self._deferred.append((block.begin, block.end))
            self._deferred_bytes += block.end - block.begin
        return True

    def _read_deferred(self) -> None:
        begin, end = self._deferred.pop(0)
        self._deferred_bytes -= end - begin
        self.digest.feed_ranks(self._lines.reread(begin, end))

    @property
    def state(self) -> str:
        """ "running", "stopped", "finished", "failed", or "interrupted": ended without saying so. "reading" until all is read."""
        if not self._caught_up and self._lines.size:
            return "reading"
        if self.digest.ended is not None:
            return str(self.digest.ended["state"])
        then, state = self._state
        if time.monotonic() - then > _STATE_SECONDS:
            state = "running" if self._is_running() else "interrupted"
            self._state = (time.monotonic(), state)
        return state

    def run_file(self) -> JsonObject:
        """The tables of the run file; empty if it cannot be read."""
        try:
            return tomllib.loads(read_small(self.rundir.run_file, _SMALL_FILE).decode())
        except (ValueError, RecursionError):
            return {}

    def plan(self) -> JsonObject:
        """plan.json; empty if it cannot be read."""
        return parse(read_small(self.rundir.plan_file, _SMALL_FILE)) or {}

    def log_tail(self, rank: int, limit: int = 1 << 14) -> str:
        """The last output of a rank."""
        return read_small(self.rundir.rank_log(rank), limit, end=True).decode("utf-8", "replace")

    def glance(self) -> JsonObject:
        """A line of a list of runs. Of a run whose events are not read, only the first and the last of them are looked at."""
        with self.lock:
            if len(self.digest.launches) or self.digest.kinds:
                last = self.digest.steps.rows(len(self.digest.steps) - 1) if len(self.digest.steps) else None
                evaluated = self.digest.evaluations[-1]["loss"] if self.digest.evaluations else None
                loss = float(last[0]["loss"]) if last is not None else math.nan
                line = self._line(whole(self.digest.launch, "steps"), self.digest.last_step, loss, self.digest.last_time)
                return line | {"eval_loss": evaluated}
        ends = self._ends()
        line = self._line(ends.planned, ends.step, ends.loss, ends.time)
        return line | {"eval_loss": known(ends.eval_loss), **({"state": ends.state} if ends.state else {})}

    def _ends(self) -> Ends:
        """What the first and the last records say. They are read again only if there are more."""
        try:
            status = os.stat(self.rundir.events_file, follow_symlinks=False)
        except OSError:
            return Ends()
        key = (status.st_ino, status.st_size, status.st_mtime_ns)
        if self._glanced is None or self._glanced[0] != key:
            first, newest = (read_small(self.rundir.events_file, _GLANCE, end=end).split(b"\n") for end in (False, True))
            self._glanced = (key, _summarized((*first, *newest)))
        return self._glanced[1]

    def _line(self, planned: int | None, step: int, loss: float, when: float) -> JsonObject:
        return {
            "name": self.name,
            "state": self.state,
            "steps": planned,
            "step": step,
            "loss": known(loss),
            "time": known(when),
        }

    @property
    def memory(self) -> int:
        """Memory of the numbers, nearly."""
        digest = self.digest
        columns = (digest.steps, digest.undone, digest.progress, digest.copies, digest.ranks, digest.experts)
        return sum(each.memory for each in columns)


def _summarized(lines: Iterable[bytes]) -> Ends:
    ends = Ends()
    for record in filter(None, map(parse, lines)):
        kind = text(record, "event", 40)
        ends.time = number(record, "time")
        if kind == "run_started":
            ends.planned, ends.state = whole(record, "steps"), None
        elif kind in ENDINGS:
            ends.state = ENDINGS[kind]
        elif kind == "step":
            ends.step, ends.loss = whole(record, "step") or 0, number(record, "loss")
        elif kind == "evaluated":
            ends.eval_loss = number(record, "loss")
    return ends


class RunFolder:
    """The runs below a folder, or the one whose directory it is. A run is found by its name in a list, never by a path that somebody sends."""

    def __init__(self, root: Path):
        self.root = root.resolve()
        self._lock = threading.Lock()
        self._runs: OrderedDict[str, FollowedRun] = OrderedDict()
        self._paths: dict[str, Path] = {}
        self._looked = -_FOLDER_SECONDS

    @property
    def names(self) -> list[str]:
        """All runs, by name."""
        with self._lock:
            return list(self._known())

    def recent(self) -> list[str]:
        """Names of the runs that are not long over, newest first, at most `MAX_RECENT`; the one whose directory this is in any case."""
        with self._lock:
            paths = dict(self._known())
        if len(paths) == 1:
            return list(paths)
        changed: dict[str, float] = {}
        for name, path in paths.items():
            with contextlib.suppress(OSError):
                changed[name] = os.stat(RunDir(path).events_file, follow_symlinks=False).st_mtime
        since = time.time() - _RECENT_SECONDS
        return sorted((name for name, when in changed.items() if when >= since), key=lambda name: -changed[name])[:MAX_RECENT]

    def get(self, name: str, *, glance: bool = False) -> FollowedRun | None:
        """The run of a name. `glance`: for a line in a list, not to be read."""
        with self._lock:
            path = self._known().get(name)
            if path is None:
                return None
            run = self._runs.pop(name, None) or self._follow_run(name, path)
            self._runs[name] = run
            total = sum(each.memory for each in self._runs.values())
            while len(self._runs) > 1 and total > _MEMORY:
                total -= self._runs.popitem(last=False)[1].memory
            return run

    def _follow_run(self, name: str, path: Path) -> FollowedRun:
        return FollowedRun(name, path)

    @property
    def title(self) -> str:
        """What the page calls it."""
        return self.root.name

    def _known(self) -> dict[str, Path]:
        if time.monotonic() - self._looked >= _FOLDER_SECONDS:
            self._paths = {}
            for path in _run_directories(self.root):
                self._paths.setdefault(_name(path, self.root), path)
                if len(self._paths) >= _MAX_RUNS:
                    break
            for name in [name for name in self._runs if name not in self._paths]:
                del self._runs[name]
            self._looked = time.monotonic()
        return self._paths


def _run_directories(root: Path) -> Iterator[Path]:
    """Folders with events, or with a run file of a run that is about to start."""
    if _is_run(root):
        yield root
        return
    level, seen = [root], 0
    for _ in range(_DEPTH):
        below: list[Path] = []
        for folder in level:
            try:
                children = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
            except OSError:
                continue
            for child in children:
                seen += 1
                if seen > _MAX_ENTRIES:
                    return
                if _is_run(folder / child):
                    yield folder / child
                else:
                    below.append(folder / child)
        level = below


def _is_run(path: Path) -> bool:
    rundir = RunDir(path)
    return any(file.is_file() and not file.is_symlink() for file in (rundir.events_file, rundir.run_file))


def _name(path: Path, root: Path) -> str:
    """The path below the root; of a name that is no text, one that an address can hold."""
    name = path.name if path == root else path.relative_to(root).as_posix()
    try:
        name.encode()
    except UnicodeEncodeError:
        raw = os.fsencode(name)
        return f"{raw.decode('ascii', 'replace')}-{hashlib.sha256(raw).hexdigest()[:8]}"
    return name
