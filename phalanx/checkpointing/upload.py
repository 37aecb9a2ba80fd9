"""Uploads checkpoints from the run directory to `checkpoint.url` in the background, each rank its share of the files. Rank 0 decides which
checkpoint is next, and writes its marker when all ranks have uploaded. One upload runs at a time; of the checkpoints that wait, the newest is
next and older ones are skipped."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from phalanx.checkpointing import directory
from phalanx.checkpointing.format import BLOCK, FileRecord, file_checksum, sidecar_name, write_file
from phalanx.checkpointing.location import Location, retry
from phalanx.checkpointing.save import Ballot, Ranks, failure_text
from phalanx.events.records import Event, Uploaded, UploadFailed
from phalanx.spec.errors import PhalanxError

_SHORT_POLL, _LONG_POLL = 0.05, 2.0  # seconds between two looks at rank 0's decisions: soon after an event, and later


@dataclass(frozen=True)
class Job:
    """What is done in the background with a complete checkpoint."""

    checkpoint: Location

    @property
    def step(self) -> int:
        return directory.step_of(self.checkpoint) or 0


J = TypeVar("J", bound=Job)


class NewestFirst(Generic[J]):
    """Jobs in a thread, one at a time. Of those that wait, the newest is next and older ones are skipped. A subclass starts the thread."""

    def __init__(self, name: str):
        self._changed = threading.Condition()
        self._waiting: J | None = None
        self._running: J | None = None
        self._ended: list[Event] = []
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)

    def _do(self, job: J) -> Event:
        raise NotImplementedError

    def _skip(self, older: J, newer: J) -> None:
        """`newer` takes the place of a job that waits. Called with the lock taken."""

    def _put(self, job: J) -> None:
        with self._changed:
            if self._waiting is not None:
                self._skip(self._waiting, job)
            self._waiting = job
            self._changed.notify_all()

    @property
    def in_use(self) -> set[str]:
        """Names of checkpoints that must stay for now."""
        with self._changed:
            return {job.checkpoint.name for job in (self._waiting, self._running) if job is not None}

    def ended(self) -> list[Event]:
        """What has ended since the last call; known on rank 0."""
        with self._changed:
            ended, self._ended = self._ended, []
        return ended

    def wait(self) -> list[Event]:
        """On rank 0: wait until nothing is left to do."""
        with self._changed:
            self._changed.wait_for(lambda: (self._waiting is None and self._running is None) or not self._thread.is_alive())
        return self.ended()

    def close(self) -> None:
        """Give up what is in progress: the checkpoint remains."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _serve(self) -> None:
        """The thread."""
        while (job := self._next()) is not None:
            event = self._do(job)
            with self._changed:
                self._ended.append(event)

    def _next(self) -> J | None:
        with self._changed:
            self._running = None
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting is not None or self._closing)
            if not self._closing:
                self._running, self._waiting = self._waiting, None
            return self._running


@dataclass(frozen=True)
class _Upload(Job):
    skipped: list[int] = field(default_factory=list)
    """Steps that are not uploaded because this one was saved before their turn had come."""


class Uploader(NewestFirst[_Upload]):
    """The uploads of one run, on one rank."""

    def __init__(self, source: Location, target: Location, ranks: Ranks, retain: Callable[[Location], None]):
        """`retain`: called by rank 0 with each checkpoint that is complete at the target, to remove older ones."""
        super().__init__("uploads")
        self._source, self._target, self._ranks, self._retain = source, target, ranks, retain
        # The store may have counted uploads of an earlier trainer. All ranks ask before any of them can start one.
        self._number = ranks.broadcast_object(ranks.store_add("uploads", 0) if ranks.rank == 0 else None)
        self._thread.start()

    def on_saved(self, checkpoint: Location) -> None:
        """On rank 0: a checkpoint is complete at the source."""
        self._put(_Upload(checkpoint))

    def _skip(self, older: _Upload, newer: _Upload) -> None:
        newer.skipped.extend((*older.skipped, older.step))

    def expect(self) -> None:
        """A save begins, so an upload will follow."""
        with self._changed:
            self._changed.notify_all()

    def _do(self, job: _Upload) -> Uploaded | UploadFailed:
        started, step, target = time.perf_counter(), job.step, directory.step_dir(self._target, job.step)
        try:
            folder = directory.begin(self._target, step)
            self._number += 1
            self._ranks.store_set(f"upload-{self._number}", json.dumps(step))
            self._ranks.store_add("uploads", 1)
            ballot = self._upload_share(step)
            if not ballot.wait(lambda: self._closing, _LONG_POLL):
                raise PhalanxError("the run has ended")
            if (failures := ballot.failures()) is not None:
                raise PhalanxError(failures)
            directory.publish(folder, (job.checkpoint / directory.MARKER).read())
        except Exception as error:
            return UploadFailed(step=step, url=str(target), reason=failure_text(error))
        try:
            self._retain(target)
        except Exception as error:
            reason = f"it is complete, but what it replaces cannot be removed: {failure_text(error)}"
            return UploadFailed(step=step, url=str(target), reason=reason)
        seconds = time.perf_counter() - started
        return Uploaded(step=step, url=str(target), bytes=ballot.bytes, seconds=seconds, skipped=job.skipped)

    def _serve(self) -> None:
        """On other ranks than 0, does what rank 0 has decided."""
        if self._ranks.rank == 0:
            return super()._serve()
        pause = _SHORT_POLL
        while not self._closing:
            if self._ranks.store_add("uploads", 0) > self._number:
                self._number += 1
                self._upload_share(json.loads(self._ranks.store_get(f"upload-{self._number}")))
                pause = _SHORT_POLL
                continue
            with self._changed:
                pause = _SHORT_POLL if self._changed.wait(pause) else min(pause * 1.5, _LONG_POLL)

    def _upload_share(self, step: int) -> Ballot:
        """Upload this rank's files."""
        ballot, size = Ballot(self._ranks, f"upload-{self._number}"), 0
        try:
            source, target = directory.step_dir(self._source, step), directory.partial_dir(self._target, step)
            marker = directory.parse_marker(source)
            # Round robin in the order of the ranks that wrote them: with as many ranks now, each uploads its own.
            for name in sorted(marker.rank_files)[self._ranks.rank :: self._ranks.ranks]:
                for file in (name, sidecar_name(name)):
                    self._copy(source / file, target / file, marker.files[file])
                    size += marker.files[file].bytes
        except BaseException as error:
            ballot.fail(failure_text(error))
        ballot.done(size)
        return ballot

    def _copy(self, source: Location, target: Location, record: FileRecord) -> None:
        """Copy a file, read again for every attempt to send it, and check that what was sent is what was saved."""
        sums = retry(f"{target} cannot be written", lambda: write_file(target, self._blocks(source)))
        if file_checksum(sums) != record.checksum:
            raise directory.DamagedCheckpoint(
                source.parent, f"its file {source.name} does not have the contents that were saved"
            )

    def _blocks(self, file: Location) -> Iterator[bytes]:
        size = file.size() or 0
        for begin in range(0, size, BLOCK):
            if self._closing:
                raise PhalanxError("the run has ended")
            yield file.read(begin, min(BLOCK, size - begin))
