"""Saved in the run directory, then uploaded: the events and the retention of `checkpoint.local_first`. Used by `Saving`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from phalanx.checkpointing import directory
from phalanx.checkpointing.location import Location
from phalanx.checkpointing.storage import open_location
from phalanx.checkpointing.upload import Uploader, UploadOutcome
from phalanx.events.records import Event, Uploaded, UploadFailed
from phalanx.parallel.mesh import Mesh
from phalanx.spec.run import Run


class Uploads:
    """The uploads of one run, on one rank; nothing where none are asked for."""

    def __init__(self, run: Run, mesh: Mesh, near: Location):
        self._kept, self._mesh, self._near = run.checkpoint, mesh, near
        self.exporting: Callable[[], set[str]] = set
        """Names of checkpoints that an export still reads, at the URL perhaps: they stay there too for now."""
        self._kept_for: Location | None = None
        self.far: Location | None = None
        self._uploader: Uploader | None = None
        if run.checkpoint.local_first and run.checkpoint.url is not None:
            self.far = open_location(run.checkpoint.url)
            self._uploader = Uploader(near, self.far, mesh, self._retain)

    @property
    def wanted(self) -> bool:
        return self._uploader is not None

    @property
    def held(self) -> set[str]:
        """Names of checkpoints that must stay in the run directory for now."""
        return self._uploader.held if self._uploader is not None else set()

    def expect(self) -> None:
        """A save begins."""
        if self._uploader is not None:
            self._uploader.expect()

    def saved(self, checkpoint: Location) -> None:
        """On rank 0: it is complete in the run directory."""
        step = directory.step_of(checkpoint)
        if self._uploader is not None and step is not None:
            self._uploader.saved(step)

    def restored(self, checkpoint: Location) -> None:
        """On rank 0: the run goes on from this one. Whoever saved it may have been gone before it was uploaded."""
        if self.far is None or checkpoint.parent != self._near:
            return
        if directory.MARKER not in (self.far / checkpoint.name).entries():
            self.saved(checkpoint)

    def ended(self) -> list[Event]:
        """What has ended since this was asked last; rank 0 tells."""
        return [_event(upload) for upload in self._uploader.ended()] if self._uploader is not None else []

    def wait(self) -> list[Event]:
        """On rank 0: until nothing is left to upload."""
        if self._uploader is None or self._mesh.rank:
            return []
        ended = [_event(upload) for upload in self._uploader.wait()]
        if self._kept_for is not None:
            with suppress(OSError):  # then the next run removes it
                self._retain(self._kept_for)
        return ended

    def _retain(self, uploaded: Location) -> None:
        assert self.far is not None
        held = self.exporting()
        self._kept_for = uploaded if held else None
        directory.prune(self.far, self._kept.keep_last, uploaded, self._kept.keep_every, held)

    def close(self) -> None:
        if self._uploader is not None:
            self._uploader.close()


def _event(upload: UploadOutcome) -> Event:
    if upload.failure is not None:
        return UploadFailed(step=upload.step, url=upload.url, reason=upload.failure)
    return Uploaded(step=upload.step, url=upload.url, bytes=upload.bytes, seconds=upload.seconds, skipped=upload.skipped)
