"""Uploads behind training: the newest goes first, what is under way is held, and only what was saved arrives."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from ranks import ALONE

from phalanx.checkpointing import directory, format, upload
from phalanx.checkpointing.location import Location, open_location
from phalanx.checkpointing.upload import Uploader
from phalanx.events.records import Uploaded, UploadFailed
from phalanx.spec.tensor_slice import Box


def written(place: Location, step: int) -> Location:
    """A checkpoint of one tensor, written by hand."""
    folder = directory.begin(place, step)
    boxes = [format.SavedBox("t", "U8", (64,), Box((0,), (64,)))]
    format.write_rank_file(folder, format.RankFile(0, 1, boxes, names={"t": 64}), lambda: [bytes([step]) * 64])
    return directory.commit(folder, step, format.RunMetadata())


@pytest.fixture
def near(tmp_path: Path) -> Location:
    return open_location(tmp_path / "near")


@pytest.fixture(params=["folder", "store"])
def far(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    return open_location(tmp_path / "far") if request.param == "folder" else open_location(f"memory://{uuid.uuid4().hex}/far")


@pytest.fixture
def uploader(near: Location, far: Location) -> Iterator[Uploader]:
    made = Uploader(near, far, ALONE, lambda saved: None)
    yield made
    made.close()


def test_an_uploaded_checkpoint_equals_its_source(uploader: Uploader, near: Location, far: Location) -> None:
    saved = written(near, 7)
    uploader.on_saved(directory.step_dir(near, 7))
    (upload,) = uploader.wait()
    assert isinstance(upload, Uploaded) and (upload.step, upload.url) == (7, str(directory.step_dir(far, 7)))
    arrived = directory.step_dir(far, 7)
    assert {name: (arrived / name).read() for name in arrived.entries()} == {
        name: (saved / name).read() for name in saved.entries()
    }
    assert upload.bytes == sum(size for name, size in saved.sizes().items() if name != directory.MARKER)
    directory.verify(arrived)


def test_the_newest_waiting_checkpoint_is_uploaded_next(
    uploader: Uploader, near: Location, far: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2, 3):
        written(near, step)
    begun, go_on = threading.Event(), threading.Event()
    write = format.write_file

    def held_up(*given: object) -> list[int]:
        begun.set()
        assert go_on.wait(20)
        return write(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(upload, "write_file", held_up)
    uploader.on_saved(directory.step_dir(near, 1))
    assert begun.wait(20)
    uploader.on_saved(directory.step_dir(near, 2))
    uploader.on_saved(directory.step_dir(near, 3))
    assert uploader.in_use == {"step-00000001", "step-00000003"}
    go_on.set()
    assert [(upload.step, upload.skipped) for upload in uploader.wait() if isinstance(upload, Uploaded)] == [(1, []), (3, [2])]
    assert uploader.in_use == set()
    assert [path.name for path in directory.list_checkpoints(far)] == ["step-00000003", "step-00000001"]


def test_damaged_files_are_not_uploaded(uploader: Uploader, near: Location, far: Location) -> None:
    saved = written(near, 4)
    file = saved / format.rank_file_name(0, 1)
    contents = bytearray(file.read())
    contents[-1] ^= 1
    format.write_file(file, [bytes(contents)])
    uploader.on_saved(directory.step_dir(near, 4))
    (upload,) = uploader.wait()
    assert isinstance(upload, UploadFailed) and format.rank_file_name(0, 1) in upload.reason
    assert directory.newest(far)[0] is None
