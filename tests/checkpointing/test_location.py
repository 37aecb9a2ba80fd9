"""Object stores as places for checkpoints: the same contract as a folder, and a network that fails in the middle."""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from object_store import Store, after, serve, wire
from ranks import run_ranks, tiny_run, tiny_trainer

from phalanx.checkpointing import directory, format, location
from phalanx.checkpointing.location import Local, Location, Remote, open_location
from phalanx.events.records import CheckpointDamaged, Event, Finished, Restored, Saved, Step, Uploaded, UploadFailed
from phalanx.parallel.mesh import Mesh
from phalanx.spec.tensor_slice import Box

SMALLEST = 5 << 20  # that S3 takes as a part
BYTES = os.urandom(1 << 20) * 13


@pytest.fixture(scope="module")
def store() -> Iterator[Store]:
    with serve() as server:
        yield server


@pytest.fixture
def s3(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """This process finds the server."""
    for key, value in store.env().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(location, "PART", SMALLEST)
    _forget()
    yield store
    _forget()


def _forget() -> None:
    import s3fs

    location._filesystem.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture(params=["file", "memory", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    if request.param == "file":
        (tmp_path / "here").mkdir()
        return open_location(f"file://{tmp_path}/here")
    if request.param == "memory":
        return open_location(f"memory://{uuid.uuid4().hex}/here")
    store: Store = request.getfixturevalue("s3")
    return open_location(f"s3://{store.bucket()}/over/here")


def test_every_location_implements_the_contract(place: Location) -> None:
    assert place.entries() == [] and place.sizes() == {} and place.unfinished() == []
    folder = place / "a"
    folder.make()
    sums = format.write_file(folder / "large", [BYTES[: 7 << 20], BYTES[7 << 20 :]])
    format.write_file(folder / "empty", [])
    format.write_file(place / "ab", [b"a neighbour whose name begins alike"])
    assert format.file_checksum(sums) == format.checksum_of(BYTES) and format.read_block_sums(folder / "large") == sums
    assert (place.entries(), folder.entries()) == (["a", "ab"], ["empty", "large"])
    assert folder.sizes() == {"large": len(BYTES), "empty": 0}
    assert place.sizes() == {"ab": 35}
    assert (folder.is_folder(), (place / "none").is_folder()) == (True, False)
    assert ((folder / "large").size(), folder.size(), (folder / "none").size()) == (len(BYTES), None, None)
    file = folder / "large"
    assert file.read() == BYTES
    assert file.read(10, 20) == BYTES[10:30]
    assert file.read(len(BYTES) - 3) == file.read(len(BYTES) - 3, 100) == BYTES[-3:]
    assert file.read(len(BYTES) + 5, 10) == b""
    with pytest.raises(FileNotFoundError):
        (folder / "none").read()
    format.write_file(file, [b"again"])
    assert (file.read(), folder.sizes()["large"]) == (b"again", 5)
    assert (file.name, file.parent.name, str(file.parent)) == ("large", "a", str(folder))
    assert pickle.loads(pickle.dumps(file)) == file
    (folder / "none").remove()
    file.remove()
    assert folder.entries() == ["empty"]
    folder.remove()
    assert place.entries() == ["ab"]


def test_an_aborted_file_does_not_exist(place: Location) -> None:
    def chunks() -> Iterator[bytes]:
        yield BYTES
        raise RuntimeError("the run ended")

    place.make()
    with pytest.raises(RuntimeError, match="the run ended"):
        (place / "half").write(chunks())
    if not place.can_rename:
        assert place.entries() == [] and place.unfinished() == []


def test_a_file_url_opens_a_local_location(tmp_path: Path) -> None:
    assert open_location(f"file://{tmp_path}/x") == Local(tmp_path / "x")


def written(place: Location, step: int, value: int) -> Location:
    """A checkpoint of one tensor, written by hand."""
    folder = directory.begin(place, step)
    boxes = [format.SavedBox("t", "U8", (64,), Box((0,), (64,)))]
    format.write_rank_file(folder, format.RankFile(0, 1, boxes, names={"t": 64}), lambda: [bytes([value]) * 64])
    return directory.commit(folder, step, format.RunMetadata())


def test_in_a_store_only_a_marker_makes_a_checkpoint(s3: Store) -> None:
    place = open_location(f"s3://{s3.bucket()}/run")
    format.write_file(directory.begin(place, 1) / format.rank_file_name(0, 1), [b"half"])
    assert directory.newest(place) == (None, []), "a first save that was killed is no checkpoint: the run begins again"
    for step in (1, 2, 3):
        written(place, step, step)
    interrupted = directory.begin(place, 2)  # a step that is taken again, and killed
    format.write_file(interrupted / format.rank_file_name(0, 1), [b"half"])
    unseen = Remote(str(directory.begin(place, 4) / "file"))  # killed while the first parts were on their way
    bucket, key, _ = unseen._fs.split_path(unseen._path)
    upload = unseen._fs.call_s3("create_multipart_upload", Bucket=bucket, Key=key)["UploadId"]
    unseen._fs.call_s3("upload_part", Bucket=bucket, Key=key, UploadId=upload, PartNumber=1, Body=BYTES)
    newest, damaged = directory.newest(place, check=directory.verify)
    assert newest == directory.step_dir(place, 3) and damaged == []
    assert place.unfinished() == ["step-00000004"]
    saved = written(place, 5, 5)
    assert directory.prune(place, 2, saved) == ["step-00000001"]
    assert place.entries() == ["step-00000003", "step-00000005"]
    assert place.unfinished() == []


def test_a_damaged_object_is_named_and_skipped(s3: Store) -> None:
    place = open_location(f"s3://{s3.bucket()}/run")
    good, bad = written(place, 1, 1), written(place, 2, 2)
    file = bad / format.rank_file_name(0, 1)
    contents = bytearray(file.read())
    contents[-1] ^= 1
    format.write_file(file, [bytes(contents)])
    newest, damaged = directory.newest(place, check=directory.verify)
    assert newest == good
    assert [(one.path, format.rank_file_name(0, 1) in one.reason) for one in damaged] == [(str(bad), True)]


def test_uploads_survive_cut_connections(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = s3.bucket()
    with wire(s3.port, after(2 << 20, 8 << 20, 9 << 20, 17 << 20)) as cut:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{cut.port}")
        _forget()
        file = open_location(f"s3://{bucket}/file")
        format.write_file(file, [BYTES])
        format.write_file(open_location(f"s3://{bucket}/small"), [BYTES[: 3 << 20]])
        assert cut.cuts == 4
        assert file.read() == BYTES
        assert open_location(f"s3://{bucket}/small").size() == 3 << 20
        assert open_location(f"s3://{bucket}").unfinished() == []


def test_an_unreachable_store_is_not_damage(s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    place = open_location(f"s3://{s3.bucket()}/run")
    written(place, 1, 1)
    monkeypatch.setattr(location, "PAUSES", (0.01,))
    with wire(s3.port, lambda sent, data: True) as cut:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{cut.port}")
        _forget()
        with pytest.raises(location.Unreachable, match=r"step-00000001.* cannot be read"):
            directory.read_marker(directory.step_dir(place, 1))
        assert isinstance(pickle.loads(pickle.dumps(location.Unreachable("x"))), OSError)


def test_retry_repeats_temporary_errors_only() -> None:
    asked = []

    def refuse(error: Exception) -> None:
        asked.append(error)
        raise error

    with pytest.raises(location.Unreachable, match="x: no way"):
        location.retry("x", lambda: refuse(PermissionError("no way")), (0.0, 0.0))
    assert len(asked) == 1
    with pytest.raises(location.Unreachable, match="x: later"):
        location.retry("x", lambda: refuse(TimeoutError("later")), (0.0, 0.0))
    assert len(asked) == 4


def trained(mesh: Mesh, url: str, folder: Path, local_first: bool, steps: int) -> list[Event]:
    run = tiny_run(
        "train.steps=6", "checkpoint.every=2", "checkpoint.keep_last=2", f"checkpoint.url={url}",
        f"checkpoint.local_first={str(local_first).lower()}",
    )  # fmt: skip
    trainer = tiny_trainer(mesh, run, folder)
    found = list(trainer.restore())
    for event in trainer.events():
        found.append(event)
        if isinstance(event, Step) and event.step == steps and steps < 6:
            trainer.stop("enough")
    return found


def losses(events: list[Event]) -> dict[int, tuple[float, str]]:
    return {event.step: (event.loss, event.batch_digest) for event in events if isinstance(event, Step)}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[float, str]]:
    folder = tmp_path_factory.mktemp("unbroken")
    return losses(run_ranks(trained, 2, str(folder / "there"), folder / "here", False, 6)[0])


@pytest.mark.parametrize("local_first", [False, True])
def test_two_ranks_save_to_a_store_and_resume_from_it(
    s3: Store, tmp_path: Path, unbroken: dict[int, tuple[float, str]], local_first: bool
) -> None:
    url = f"s3://{s3.bucket()}/runs/x"
    first = run_ranks(trained, 2, url, tmp_path / "b", local_first, 3)[0]
    # Elsewhere: there is nothing but what lies at the URL.
    second = run_ranks(trained, 2, url, tmp_path / "c", local_first, 6)[0]
    (restored,) = [event for event in second if isinstance(event, Restored)]
    assert (restored.step, restored.path) == (3, f"{url}/step-00000003")
    assert losses(first) | losses(second) == unbroken
    assert isinstance(second[-1], Finished)
    assert open_location(url).entries() == ["step-00000004", "step-00000006"]
    near = (tmp_path / "c").is_dir() and sorted(os.listdir(tmp_path / "c"))
    assert near == (["step-00000004", "step-00000006"] if local_first else False)
    uploads = [event for event in second if isinstance(event, Uploaded)]
    assert [event.step for event in uploads][-1:] == ([6] if local_first else [])
    directory.verify(directory.step_dir(open_location(url), 6))


def test_local_damage_is_restored_from_the_store(s3: Store, tmp_path: Path) -> None:
    url = f"s3://{s3.bucket()}/run"
    (first,) = run_ranks(trained, 1, url, tmp_path / "near", True, 3)
    (saved,) = [event for event in first if isinstance(event, Saved) and event.step == 3]
    file = Path(saved.path) / format.rank_file_name(0, 1)
    contents = bytearray(file.read_bytes())
    contents[-1] ^= 1
    file.write_bytes(contents)
    (second,) = run_ranks(trained, 1, url, tmp_path / "near", True, 6)
    damaged = [event.path for event in second if isinstance(event, CheckpointDamaged)]
    assert damaged == [saved.path]
    assert [event.path for event in second if isinstance(event, Restored)] == [f"{url}/step-00000003"]


def test_a_failing_store_is_reported_and_training_continues(s3: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"s3://{s3.bucket()}/run"
    monkeypatch.setattr(location, "PAUSES", (0.01,))
    with wire(s3.port, lambda sent, data: sent > 100_000) as bad:  # nothing large gets through, ever
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{bad.port}")
        _forget()
        found = run_ranks(trained, 2, url, tmp_path / "near", True, 6)[0]
    assert isinstance(found[-1], Finished)
    failures = [event for event in found if isinstance(event, UploadFailed)]
    assert failures and failures[-1].step == 6 and "cannot be" in failures[-1].reason
    assert [event.step for event in found if isinstance(event, Saved)] == [2, 4, 6]
    assert isinstance(open_location(url), Remote)
