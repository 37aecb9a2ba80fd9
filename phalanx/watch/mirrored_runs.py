"""Runs in an object store, for the page: what is new in their events is copied into a folder of this machine, from which the page reads as from any
other. An object is read in ranges, never a byte twice; nothing is asked of the store while nobody looks."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from phalanx.checkpointing.location import Location, Unreachable
from phalanx.events.timeline_files import FOLDER as TIMELINE
from phalanx.spec.errors import RunError
from phalanx.watch.followed_run import FollowedRun, RunFolder

_WHOLE = ("run.toml", "plan.json")
"""Files of a run that are copied as they are."""
_GROWING = "events.jsonl"
_SMALL_FILE = 1 << 20
_UNASKED = 16 << 20
"""Bytes of the events of a run that are copied although nobody has opened it, for the list of runs."""
_BLOCK = 8 << 20
_PROBE = 64
"""Bytes that are read again with the next ones: if they differ, the object is another one than before."""
_REFRESH_SECONDS = 2.0
_FIND_SECONDS = 30.0
_WATCHED_SECONDS = 15.0
"""A run that nobody has asked for in this time is not refreshed."""
_ALIVE_SECONDS = 300.0
"""A store knows no locks: a run whose last record is younger, and does not say that it has ended, counts as running."""
_DEPTH, _MAX_RUNS = 2, 200


class Mirror:
    """Copies runs of a store into a folder. Used by one thread."""

    def __init__(self, source: Location, folder: Path):
        self._source, self._folder = source, folder
        self.runs: dict[str, Location] = {}
        """By their path below the source; "" is the source itself."""
        self._sizes: dict[Path, int] = {}

    def find(self) -> None:
        """Look for runs. Raises Unreachable if the store does not answer."""
        found: dict[str, Location] = {}
        level: list[tuple[str, Location]] = [("", self._source)]
        for _ in range(_DEPTH + 1):
            below: list[tuple[str, Location]] = []
            for name, place in level:
                if _GROWING in (sizes := place.sizes()) or _WHOLE[0] in sizes:
                    found[name] = place
                    if name == "":
                        below = []
                        break
                    continue
                children = [child for child in place.entries() if child not in sizes and _is_plain(child)]
                below += [(f"{name}/{child}".lstrip("/"), place / child) for child in children]
                if len(found) >= _MAX_RUNS:
                    break
            level = below
        self.runs = dict(list(found.items())[:_MAX_RUNS])

    def refresh(self, name: str, *, limit: int | None = None) -> None:
        """Copy what is new of a run. `limit`: leave events alone that are larger."""
        place, target = self.runs[name], self._folder / name
        sizes = place.sizes()
        target.mkdir(parents=True, exist_ok=True)
        if _GROWING in sizes:
            (target / _GROWING).touch()  # a run is known by this file
        for file in _WHOLE:
            if file in sizes and self._sizes.get(target / file) != sizes[file] and sizes[file] <= _SMALL_FILE:
                (target / file).write_bytes((place / file).read())
                self._sizes[target / file] = sizes[file]
        if limit is None and (recorded := (place / TIMELINE).sizes()):
            (target / TIMELINE).mkdir(exist_ok=True)
            for file, size in recorded.items():
                if _is_plain(file):
                    _append(place / TIMELINE / file, target / TIMELINE / file, size)
        if _GROWING in sizes and (limit is None or sizes[_GROWING] <= limit):
            _append(place / _GROWING, target / _GROWING, sizes[_GROWING])


def _is_plain(name: str) -> bool:
    """Whether a name that a store lists may be the name of a file here."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def _append(source: Location, target: Path, size: int) -> None:
    """Copy what an object has more than the file."""
    have = target.stat().st_size if target.exists() else 0
    if size < have:
        target.unlink()  # it was written anew
        have = 0
    while have < size:
        begin = max(0, have - _PROBE)
        block = source.read(begin, min(size - begin, _BLOCK))
        if have and block[: have - begin] != _tail(target, have - begin):
            target.unlink()
            have = 0
            continue
        new = block[have - begin :]
        if not new:
            return  # it has become shorter meanwhile
        with target.open("ab") as file:
            file.write(new)
        have += len(new)


def _tail(path: Path, length: int) -> bytes:
    with path.open("rb") as file:
        file.seek(-length, 2)
        return file.read()


class MirroredFolder(RunFolder):
    """The runs of a store. A thread copies those that somebody looks at."""

    def __init__(self, source: Location, folder: Path):
        """Raises RunError if there is no run, or the store does not answer."""
        super().__init__(folder)
        self._mirror = Mirror(source, self.root)
        self._source_name = source.name
        self._asked: dict[str, float] = {}
        self._looked_at = time.monotonic()
        self._wake, self._closing = threading.Event(), False
        try:
            self._mirror.find()
            if not self._mirror.runs:
                raise RunError(f"{source}: there is no run: neither it nor a folder in it has {_GROWING}.")
            for name in self._mirror.runs:
                self._mirror.refresh(name, limit=0)
        except Unreachable as error:
            raise RunError(str(error)) from None
        self._thread = threading.Thread(target=self._follow, name="mirror", daemon=True)
        self._thread.start()

    @property
    def title(self) -> str:
        return self._source_name

    def get(self, name: str, *, glance: bool = False) -> FollowedRun | None:
        run = super().get(name, glance=glance)
        if run is not None and not glance:
            now = time.monotonic()
            if now - self._asked.get(name, -_WATCHED_SECONDS) >= _WATCHED_SECONDS:
                self._wake.set()  # it is read at once
            self._asked[name] = now
        return run

    def _known(self) -> dict[str, Path]:
        if time.monotonic() - self._looked_at >= _WATCHED_SECONDS:
            self._wake.set()
        self._looked_at = time.monotonic()
        return super()._known()

    def _follow_run(self, name: str, path: Path) -> FollowedRun:
        run = FollowedRun(name, path, lambda: time.time() - run.digest.last_time < _ALIVE_SECONDS)
        return run

    def _follow(self) -> None:
        found = time.monotonic()
        self._refresh_unasked()
        while not self._closing:
            watched = time.monotonic() - self._looked_at < _WATCHED_SECONDS
            self._wake.wait(_REFRESH_SECONDS if watched else None)
            self._wake.clear()
            with contextlib.suppress(OSError):  # the store does not answer now; what is known stays, and it is asked again
                if time.monotonic() - found >= _FIND_SECONDS:
                    self._mirror.find()
                    self._refresh_unasked()
                    found = time.monotonic()
                for name in self._watched():
                    self._mirror.refresh(name)

    def _refresh_unasked(self) -> None:
        """So that the list of runs has something to show. What somebody looks at comes first."""
        for name in self._mirror.runs:
            with contextlib.suppress(OSError):
                for watched in self._watched():
                    self._mirror.refresh(watched)
                self._mirror.refresh(name, limit=_UNASKED)

    def _watched(self) -> list[str]:
        """Runs that somebody looks at, by their name in the store."""
        now = time.monotonic()
        asked = {name for name, when in list(self._asked.items()) if now - when < _WATCHED_SECONDS}
        return [name for name in self._mirror.runs if (name or self.root.name) in asked]

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(timeout=_REFRESH_SECONDS)


@contextlib.contextmanager
def mirrored(source: Location) -> Iterator[MirroredFolder]:
    """The runs of a store, in a folder that is removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="phalanx-watch-", ignore_cleanup_errors=True) as name:
        folder = MirroredFolder(source, Path(name) / (source.name if _is_plain(source.name) else "runs"))
        try:
            yield folder
        finally:
            folder.close()
