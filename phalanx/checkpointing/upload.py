"""Checkpoints that were saved to a near place, brought to a far one behind training. Driven by a trainer's `Saving`, on all ranks.

Each rank uploads its share of the files in a thread of its own; rank 0 decides which checkpoint is next, and gives it its marker
when all ranks have told that their files are there. One upload at a time: of those that wait the newest goes, the others are
passed over. What is being uploaded, or is about to be, is held: whoever removes checkpoints asks `held` first.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from phalanx.checkpointing import directory, format
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.restore import failure_text
from phalanx.checkpointing.save import Ranks
from phalanx.checkpointing.storage import retry
from phalanx.spec.errors import PhalanxError

_SOON, _LATE = 0.05, 2.0  # seconds between two looks at what rank 0 has decided: short after something happened, then longer


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadOutcome:
    """How it went."""

    step: int
    url: str
    failure: str | None = None
    bytes: int = 0
    seconds: float = 0.0
    skipped: list[int] = field(default_factory=list)


class Uploader:
    """The uploads of one run, on one rank."""

    def __init__(self, near: Location, far: Location, ranks: Ranks, retain: Callable[[Location], None]):
        """`retain`: called by rank 0 with each checkpoint that is complete at the far place."""
        self._near, self._far, self._ranks, self._retain = near, far, ranks, retain
        self._changed = threading.Condition()
        self._waiting: int | None = None
        self._running: int | None = None
        self._skipped: list[int] = []
        self._ended: list[UploadOutcome] = []
        self._closing = self._stopped = False
        # A mesh may have seen the uploads of an earlier trainer. All ranks ask before any of them can begin one.
        self._number = ranks.broadcast_object(ranks.store_add("uploads", 0) if ranks.rank == 0 else None)
        work = self._lead if ranks.rank == 0 else self._follow
        self._thread = threading.Thread(target=work, name="uploads", daemon=True)
        self._thread.start()

    def saved(self, step: int) -> None:
        """On rank 0: a checkpoint is complete at the near place."""
        with self._changed:
            if self._waiting is not None:
                self._skipped.append(self._waiting)
            self._waiting = step
            self._changed.notify_all()

    def expect(self) -> None:
        """A save begins, so there will be something to upload."""
        with self._changed:
            self._changed.notify_all()

    @property
    def held(self) -> set[str]:
        """Names of checkpoints that must stay at the near place for now."""
        with self._changed:
            return {directory.step_dir(self._near, step).name for step in (self._waiting, self._running) if step is not None}

    def ended(self) -> list[UploadOutcome]:
        """What has ended since this was asked last; rank 0 knows."""
        with self._changed:
            told, self._ended = self._ended, []
        return told

    def wait(self) -> list[UploadOutcome]:
        """On rank 0: until nothing is left to upload."""
        with self._changed:
            self._changed.wait_for(lambda: (self._waiting is None and self._running is None) or not self._thread.is_alive())
        return self.ended()

    def close(self) -> None:
        """Give up what is under way: it is at the near place."""
        with self._changed:
            self._closing = self._stopped = True
            self._changed.notify_all()
        self._thread.join(timeout=30)

    def _lead(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting is not None or self._closing)
                if self._closing:
                    return
                step, self._running, self._waiting = self._waiting, self._waiting, None
                skipped, self._skipped = self._skipped, []
            assert step is not None
            ended = self._upload(step, skipped)
            with self._changed:
                self._ended.append(ended)

    def _upload(self, step: int, skipped: list[int]) -> UploadOutcome:
        started = time.perf_counter()
        target = directory.step_dir(self._far, step)
        try:
            folder = directory.begin(self._far, step)
            self._number += 1
            self._ranks.store_set(f"upload-{self._number}", json.dumps(step))
            self._ranks.store_add("uploads", 1)
            size = self._share(step)
            self._wait_for_all(f"upload-{self._number}-done")
            if failed := self._ranks.store_add(f"upload-{self._number}-failed", 0):
                why = [self._ranks.store_get(f"upload-{self._number}-why-{one + 1}") for one in range(failed)]
                raise PhalanxError("; ".join(why))
            size = self._ranks.store_add(f"upload-{self._number}-bytes", 0)
            directory.complete(folder, (directory.step_dir(self._near, step) / directory.MARKER).read())
        except Exception as error:
            return UploadOutcome(step=step, url=str(target), failure=failure_text(error), skipped=skipped)
        try:
            self._retain(target)
        except Exception as error:
            reported = f"it is there, but what it replaces cannot be removed: {failure_text(error)}"
            return UploadOutcome(step=step, url=str(target), failure=reported, skipped=skipped)
        return UploadOutcome(step=step, url=str(target), bytes=size, seconds=time.perf_counter() - started, skipped=skipped)

    def _wait_for_all(self, done: str) -> None:
        pause = _SOON
        while self._ranks.store_add(done, 0) < self._ranks.ranks:
            if self._stopped:
                raise PhalanxError("the run has ended")
            time.sleep(pause)
            pause = min(pause * 1.5, _LATE)

    def _follow(self) -> None:
        """On the other ranks: do what rank 0 has decided."""
        pause = _SOON
        while not self._stopped:
            if self._ranks.store_add("uploads", 0) > self._number:
                self._number += 1
                self._share(json.loads(self._ranks.store_get(f"upload-{self._number}")))
                pause = _SOON
                continue
            with self._changed:
                pause = _SOON if self._changed.wait(pause) else min(pause * 1.5, _LATE)

    def _share(self, step: int) -> int:
        """This rank's files; returns their bytes."""
        key, size = f"upload-{self._number}", 0
        try:
            near = directory.step_dir(self._near, step)
            far = directory.step_dir(self._far, step)
            if far.renames:
                far = far.parent / f"{far.name}{directory.PARTIAL}"
            files = directory.sealed(near)["files"]
            # By turns, in the order of the ranks that wrote them: where as many upload, each its own.
            for name in sorted(name for name in files if format.beside(name) in files)[self._ranks.rank :: self._ranks.ranks]:
                for one in (name, format.beside(name)):
                    self._copy(near / one, far / one, files[one])
                    size += files[one]["bytes"]
        except BaseException as error:
            number = self._ranks.store_add(f"{key}-failed", 1)
            self._ranks.store_set(f"{key}-why-{number}", f"rank {self._ranks.rank}: {failure_text(error)}")
        self._ranks.store_add(f"{key}-bytes", size)
        self._ranks.store_add(f"{key}-done", 1)
        return size

    def _copy(self, near: Location, far: Location, expected: dict[str, int | str]) -> None:
        """Read anew wherever the sending has to begin anew; and what was sent is what was saved."""
        sums = retry(f"{far} cannot be written", lambda: format.write(far, self._blocks(near)))
        if format.whole(sums) != expected["checksum"]:
            raise directory.DamagedCheckpoint(near.parent, f"its file {near.name} does not have the contents that were saved")

    def _blocks(self, file: Location) -> Iterator[bytes]:
        size = file.size() or 0
        for begin in range(0, size, format.BLOCK):
            if self._stopped:
                raise PhalanxError("the run has ended")
            yield file.read(begin, min(format.BLOCK, size - begin))
