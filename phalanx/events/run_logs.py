"""The logs of a run's ranks and nodes as one stream, in the order of time.

Programs and libraries write to a log as they like, without times. So the agent of a node looks at the logs of its ranks twice a second, and notes
in `logs/times/NAME` how long each is, and when: lines of "bytes seconds-since-1970".
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from phalanx.events.rundir import RunDir

_NAME = re.compile(r"(rank|node|replicas)-([0-9]+)\.log")


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of a log."""

    time: float
    """When it was seen in the log, to half a second; of a log that nobody watched, when it was last written."""
    source: str
    """Such as "rank 3" or "node 0"."""
    text: str


def note_size(log: Path, size: int, time: float) -> None:
    """Note that a log has this many bytes now."""
    folder = log.parent / "times"
    folder.mkdir(exist_ok=True)
    with (folder / log.name).open("a") as file:
        file.write(f"{size} {time:.3f}\n")


class LogReader:
    """Reads the logs of a run as they are written."""

    def __init__(self, rundir: RunDir, files: str = "*.log", *, from_end: bool = False):
        """`files`: which logs, as a pattern. `from_end`: only what is written from now on."""
        self._folder, self._files = rundir.logs, files
        self._read = {path.name: path.stat().st_size for path in self._folder.glob(files)} if from_end else dict[str, int]()

    def new(self) -> list[LogLine]:
        """Lines completed since the last call, in the order of time."""
        lines = [line for path in sorted(self._folder.glob(self._files)) for line in self._new_of(path)]
        return sorted(lines, key=lambda line: line.time)

    def _new_of(self, path: Path) -> Iterator[LogLine]:
        begin = self._read.get(path.name, 0)
        with contextlib.suppress(OSError), path.open("rb") as file:
            file.seek(begin)
            block = file.read()
            written = path.stat().st_mtime
            sizes, times = _times(path)
            end = begin
            for line in block[: block.rfind(b"\n") + 1].splitlines(keepends=True):
                end += len(line)
                index = bisect_left(sizes, end)
                time = times[index] if index < len(times) else written
                yield LogLine(time, _source(path.name), line.decode(errors="replace").rstrip("\r\n"))
            self._read[path.name] = end


def _source(name: str) -> str:
    match = _NAME.fullmatch(name)
    return f"{match[1]} {match[2]}" if match else name.removesuffix(".log")


def _times(log: Path) -> tuple[list[int], list[float]]:
    """Sizes of a log in increasing order, and when it had them."""
    sizes: list[int] = []
    times: list[float] = []
    with contextlib.suppress(OSError):
        for line in (log.parent / "times" / log.name).read_text().splitlines():
            size, _, time = line.partition(" ")
            if not sizes or int(size) > sizes[-1]:
                sizes.append(int(size))
                times.append(float(time))
    return sizes, times
