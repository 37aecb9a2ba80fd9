from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import flip

from phalanx.checkpointing import directory, format
from phalanx.checkpointing.directory import (
    DamagedCheckpoint,
    commit,
    list_checkpoints,
    newest,
    prune,
    read_marker,
    verify,
)
from phalanx.checkpointing.format import RunMetadata
from phalanx.checkpointing.location import Local, open_location
from phalanx.spec.errors import PhalanxError

DATA, LATER = format.rank_file_name(0, 2), format.rank_file_name(1, 2)
ABOUT = format.sidecar_name(DATA)
VALUES = {DATA: bytes(range(256)) * 5, LATER: b"a few bytes"}
METADATA = RunMetadata(progress={"step": 3, "samples": 24}, version="1.2", extra={"rate": 0.1, "small": 1e-05, "said": "naïve"})


def write(checkpoints: Path, step: int, metadata: RunMetadata = METADATA) -> Path:
    """A checkpoint, made the way saving makes it; its files hold no tensors, which nobody asks here."""
    partial = directory.begin(checkpoints, step)
    for stage, (name, data) in enumerate(VALUES.items()):
        sums = format.write_file(partial / name, [data])
        sidecar = format.Sidecar(
            file=name, size=len(data), tensors=len(data), crc32=sums, stage=stage, names={f"tensor {stage}": len(data)}
        )
        format.write_file(partial / format.sidecar_name(name), [sidecar.to_json()])
    return Path(str(commit(partial, step, metadata, 2)))


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


def test_commit_writes_marker_files_and_name(tmp_path: Path) -> None:
    path = write(tmp_path, 12)
    assert path == tmp_path / "step-00000012"
    assert names(tmp_path) == ["step-00000012"]
    verify(path)
    marker = read_marker(path)
    assert (marker.run, marker.step) == (METADATA, 12)
    files = {name: file.bytes for name, file in marker.files.items()}
    assert files == {file.name: file.stat().st_size for file in path.iterdir() if file.name != directory.MARKER}
    assert files.keys() == {DATA, LATER, ABOUT, format.sidecar_name(LATER)}
    assert {name: (path / name).read_bytes() for name in VALUES} == VALUES
    assert marker.names == [["tensor 0"], ["tensor 1"]]
    for name, file in marker.files.items():  # as anybody can find them out: these are of one block
        crc = zlib.crc32((path / name).read_bytes())
        assert file.checksum == hashlib.sha256(crc.to_bytes(4, "little")).hexdigest()


def test_newest_checkpoint_is_chosen_by_step_number(tmp_path: Path) -> None:
    assert newest(tmp_path / "none", check=verify) == (None, [])
    assert newest(tmp_path, check=verify) == (None, [])
    for step in (99, 1234567890, 100, 7):  # one has outgrown its eight digits
        write(tmp_path, step)
    assert [path.name for path in list_checkpoints(tmp_path)] == [
        "step-1234567890",
        "step-00000100",
        "step-00000099",
        "step-00000007",
    ]
    assert newest(tmp_path, check=verify) == newest(tmp_path) == (open_location(tmp_path / "step-1234567890"), [])


def no_marker(path: Path) -> None:
    (path / directory.MARKER).unlink()


def broken_marker(path: Path) -> None:
    text = (path / directory.MARKER).read_text()
    (path / directory.MARKER).write_text(text[: len(text) // 2])


def empty_marker(path: Path) -> None:
    (path / directory.MARKER).write_text("")


def other_marker(path: Path) -> None:
    (path / directory.MARKER).write_text("[1, 2]")


def null_marker(path: Path) -> None:
    (path / directory.MARKER).write_text("null")


def marker_of_other_keys(path: Path) -> None:
    (path / directory.MARKER).write_text('{"files": {"data": {"size": 1}}}')


def marker_not_text(path: Path) -> None:
    (path / directory.MARKER).write_bytes(b"\xff\xfe\x00")


def marker_a_folder(path: Path) -> None:
    (path / directory.MARKER).unlink()
    (path / directory.MARKER).mkdir()


def missing_file(path: Path) -> None:
    (path / DATA).unlink()


def missing_later_file(path: Path) -> None:
    (path / LATER).unlink()


def truncated_file(path: Path) -> None:
    os.truncate(path / DATA, len(VALUES[DATA]) - 1)


def longer_file(path: Path) -> None:
    with (path / ABOUT).open("ab") as file:
        file.write(b"!")


def first_bit(path: Path) -> None:
    flip(path / DATA, 0)


def last_bit(path: Path) -> None:
    flip(path / DATA, len(VALUES[DATA]) - 1, 7)


def bit_of_a_small_file(path: Path) -> None:
    flip(path / ABOUT, 4, 3)


def bit_of_a_later_file(path: Path) -> None:
    flip(path / LATER, 0)


def not_a_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file of that name")


def of_another_format(path: Path) -> None:
    marker = json.loads((path / directory.MARKER).read_text())
    del marker["sha256"]
    marker["format"] = 1
    seal = hashlib.sha256(json.dumps(marker, sort_keys=True).encode()).hexdigest()
    (path / directory.MARKER).write_text(json.dumps(marker | {"sha256": seal}, indent=2) + "\n")


DAMAGES: dict[Callable[[Path], None], str] = {
    no_marker: "no commit.json",
    broken_marker: "commit.json cannot be read",
    empty_marker: "commit.json cannot be read",
    other_marker: "commit.json does not have the contents",
    null_marker: "commit.json does not have the contents",
    marker_of_other_keys: "commit.json does not have the contents",
    marker_not_text: "commit.json cannot be read",
    marker_a_folder: "commit.json cannot be read",
    missing_file: f"file {DATA} is missing",
    missing_later_file: f"file {LATER} is missing",
    truncated_file: f"file {DATA} has 1279 bytes instead of 1280",
    longer_file: f"file {ABOUT} has",
    first_bit: f"file {DATA} does not have the contents",
    last_bit: f"file {DATA} does not have the contents",
    bit_of_a_small_file: f"file {ABOUT} does not have the contents",
    bit_of_a_later_file: f"file {LATER} does not have the contents",
    of_another_format: "format 1, this version reads format 2",
    not_a_folder: "commit.json cannot be read",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_skipped(damage: Callable[[Path], None], tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    damage(tmp_path / "step-00000003")
    damage(tmp_path / "step-00000004")
    found, damaged = newest(tmp_path, check=verify)
    assert found == open_location(tmp_path / "step-00000002")
    assert [Path(bad.path).name for bad in damaged] == ["step-00000004", "step-00000003"]
    for bad in damaged:
        assert DAMAGES[damage] in bad.reason
        assert str(bad) == f"{bad.path} is damaged: {bad.reason}"
        with pytest.raises(DamagedCheckpoint, match="is damaged"):
            verify(Path(bad.path))


def test_all_damaged_checkpoints_are_named_if_none_is_valid(tmp_path: Path) -> None:
    for step in (1, 2):
        truncated_file(write(tmp_path, step))
    found, damaged = newest(tmp_path, check=verify)
    assert found is None
    assert [Path(bad.path).name for bad in damaged] == ["step-00000002", "step-00000001"]


def test_every_flipped_bit_of_the_marker_is_detected(tmp_path: Path) -> None:
    # It holds the position in the data: a wrong digit there would go on silently on other samples.
    path = write(tmp_path, 3)
    whole = (path / directory.MARKER).read_bytes()
    dice = random.Random(0)
    for place in range(len(whole)):
        bits = range(8) if chr(whole[place]) in "eE" else [dice.randrange(8)]  # of which numbers are written in two ways
        for bit in bits:
            flip(path / directory.MARKER, place, bit)
            with pytest.raises(DamagedCheckpoint, match=directory.MARKER):
                verify(path)
            (path / directory.MARKER).write_bytes(whole)
    verify(path)


def test_damaged_checkpoint_error_can_be_pickled(tmp_path: Path) -> None:
    bad = DamagedCheckpoint(tmp_path, "because")
    again = pickle.loads(pickle.dumps(bad))
    assert (type(again), again.path, again.reason, str(again)) == (DamagedCheckpoint, str(tmp_path), "because", str(bad))


def test_unfinished_folders_are_ignored(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for name in ("step-00000009.partial", "step-00000008.replaced.partial", "step-x", "other", "step-00000007.bak"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    assert newest(tmp_path, check=verify) == (open_location(tmp_path / "step-00000001"), [])
    assert list_checkpoints(tmp_path) == [open_location(tmp_path / "step-00000001")]


def test_prune_keeps_the_newest_valid_checkpoints_and_removes_leftovers(tmp_path: Path) -> None:
    for step in range(1, 7):
        write(tmp_path, step)
    truncated_file(tmp_path / "step-00000003")
    no_marker(tmp_path / "step-00000005")
    for name in ("step-00000007.partial", "step-00000004.replaced.partial"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    (tmp_path / "notes").mkdir()
    last = open_location(tmp_path / "step-00000006")
    assert prune(tmp_path, 2, last) == ["step-00000002", "step-00000001"]
    # Damaged ones are left for a person to look at, and do not count.
    assert names(tmp_path) == ["notes", "step-00000003", "step-00000004", "step-00000005", "step-00000006"]
    prune(tmp_path, 1, last)
    assert names(tmp_path) == ["notes", "step-00000003", "step-00000005", "step-00000006"]


@pytest.mark.parametrize(
    ("last", "every", "kept"), [(2, 4, [4, 8, 9, 10]), (1, 5, [5, 10]), (1, None, [10]), (3, 1, range(1, 11))]
)
def test_prune_keeps_every_nth_step(last: int, every: int | None, kept: Iterable[int], tmp_path: Path) -> None:
    for step in range(1, 11):  # as a run does, after each save
        prune(tmp_path, last, open_location(write(tmp_path, step)), every)
    assert names(tmp_path) == [f"step-{step:08d}" for step in kept]


def test_an_interrupted_removal_is_completed_by_the_next(tmp_path: Path, monkeypatch: Any) -> None:
    for step in (1, 2):
        write(tmp_path, step)
    with monkeypatch.context() as patched:
        patched.setattr(Local, "remove", lambda self: None)  # killed before a file of it is gone
        prune(tmp_path, 1, open_location(tmp_path / "step-00000002"))
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000002"]
    prune(tmp_path, 1, open_location(tmp_path / "step-00000002"))
    assert names(tmp_path) == ["step-00000002"]


def test_prune_never_removes_the_checkpoint_just_saved(tmp_path: Path) -> None:
    # The newest was passed over when the run resumed, but its files have their sizes: only reading them through shows it.
    for step in (2, 4, 6):
        write(tmp_path, step)
    first_bit(tmp_path / "step-00000006")
    last = open_location(write(tmp_path, 5))
    prune(tmp_path, 1, last)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]
    assert newest(tmp_path, check=verify)[0] == last


def test_saving_a_step_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    first_bit(write(tmp_path, 5))
    with pytest.raises(DamagedCheckpoint):
        verify(tmp_path / "step-00000005")
    for _ in range(3):  # also where an earlier replacement was killed before it was tidied up
        verify(write(tmp_path, 5))
        assert newest(tmp_path, check=verify) == (open_location(tmp_path / "step-00000005"), [])
    prune(tmp_path, 2, open_location(tmp_path / "step-00000005"))
    assert names(tmp_path) == ["step-00000005"]


def test_a_file_named_like_a_checkpoint_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "step-00000002").write_text("what has this name is passed over, and does not keep the next save from it")
    found, damaged = newest(tmp_path)
    assert (found, [bad.path for bad in damaged]) == (None, [str(tmp_path / "step-00000002")])
    verify(write(tmp_path, 2))


def test_a_checkpoint_renamed_to_a_later_step_is_damaged(tmp_path: Path) -> None:
    shutil.copytree(write(tmp_path, 2), tmp_path / "step-00000099")
    path = write(tmp_path, 4)
    found, damaged = newest(tmp_path, check=verify)
    assert found == open_location(path)
    assert [str(bad) for bad in damaged] == [
        f"{tmp_path / 'step-00000099'} is damaged: its commit.json is that of step 2: it was copied or renamed"
    ]
    shutil.copytree(path, tmp_path / "before the change")
    verify(tmp_path / "before the change")  # a name of one's own says nothing about the step


def test_the_marker_is_plain_json(tmp_path: Path) -> None:
    assert json.loads((write(tmp_path, 1) / "commit.json").read_text())["progress"] == {"step": 3, "samples": 24}


def test_commit_fails_if_tensor_bytes_do_not_add_up(tmp_path: Path) -> None:
    write(tmp_path, 1)
    partial = Path(str(directory.begin(tmp_path, 2)))
    shutil.copytree(tmp_path / "step-00000001", partial, dirs_exist_ok=True, ignore=shutil.ignore_patterns(directory.MARKER))
    about = json.loads((partial / ABOUT).read_text())
    (partial / ABOUT).write_text(json.dumps(about | {"names": {"tensor 0": 1279}}))  # a byte of it would be there twice
    with pytest.raises(PhalanxError, match=r"has 1291 bytes of tensors that have 1290 bytes"):
        commit(partial, 2, METADATA, 2)
    (partial / ABOUT).unlink()
    with pytest.raises(FileNotFoundError, match=ABOUT):
        commit(partial, 2, METADATA, 2)
    assert newest(tmp_path, check=verify) == (open_location(tmp_path / "step-00000001"), [])
