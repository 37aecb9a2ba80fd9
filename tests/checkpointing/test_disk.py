from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from phalanx.checkpointing import disk
from phalanx.checkpointing.disk import DamagedCheckpoint, commit, folder, listed, newest_valid, prune, read_marker, verify

FILES = {"data": bytes(range(256)) * 5, "index": b"a few bytes", ".hidden": b"x", "empty": b""}
CONTENTS = {"progress": {"step": 3, "samples": 24}, "version": "1.2", "rate": 0.1}


def write(checkpoints: Path, step: int) -> Path:
    """A checkpoint, made the way saving makes it."""
    partial = folder(checkpoints, step).with_suffix(disk.PARTIAL)
    partial.mkdir(parents=True)
    for name, data in FILES.items():
        (partial / name).write_bytes(data)
    return commit(partial, CONTENTS | {"step": step})


def flip(file: Path, place: int, bit: int = 0) -> None:
    data = bytearray(file.read_bytes())
    data[place] ^= 1 << bit
    file.write_bytes(data)


def names(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.iterdir())


def test_a_committed_directory_has_its_name_its_files_and_its_contents(tmp_path: Path) -> None:
    path = write(tmp_path, 12)
    assert path == tmp_path / "step-00000012"
    assert names(tmp_path) == ["step-00000012"]
    verify(path)
    marker = read_marker(path)
    assert {key: marker[key] for key in CONTENTS} == CONTENTS
    assert marker["step"] == 12
    assert {name: file["bytes"] for name, file in marker["files"].items()} == {name: len(data) for name, data in FILES.items()}
    assert {name: (path / name).read_bytes() for name in FILES} == FILES


def test_the_newest_by_number_is_found_not_by_name_or_time(tmp_path: Path) -> None:
    assert newest_valid(tmp_path / "none") == (None, [])
    assert newest_valid(tmp_path) == (None, [])
    for step in (99, 1234567890, 100, 7):  # one has outgrown its eight digits
        write(tmp_path, step)
    assert [path.name for path in listed(tmp_path)] == ["step-1234567890", "step-00000100", "step-00000099", "step-00000007"]
    assert newest_valid(tmp_path) == (tmp_path / "step-1234567890", [])


def no_marker(path: Path) -> None:
    (path / disk.MARKER).unlink()


def broken_marker(path: Path) -> None:
    text = (path / disk.MARKER).read_text()
    (path / disk.MARKER).write_text(text[: len(text) // 2])


def empty_marker(path: Path) -> None:
    (path / disk.MARKER).write_text("")


def other_marker(path: Path) -> None:
    (path / disk.MARKER).write_text("[1, 2]")


def null_marker(path: Path) -> None:
    (path / disk.MARKER).write_text("null")


def marker_of_other_keys(path: Path) -> None:
    (path / disk.MARKER).write_text('{"files": {"data": {"size": 1}}}')


def marker_not_text(path: Path) -> None:
    (path / disk.MARKER).write_bytes(b"\xff\xfe\x00")


def marker_a_folder(path: Path) -> None:
    (path / disk.MARKER).unlink()
    (path / disk.MARKER).mkdir()


def missing_file(path: Path) -> None:
    (path / "data").unlink()


def missing_hidden_file(path: Path) -> None:
    (path / ".hidden").unlink()


def truncated_file(path: Path) -> None:
    os.truncate(path / "data", len(FILES["data"]) - 1)


def longer_file(path: Path) -> None:
    with (path / "index").open("ab") as file:
        file.write(b"!")


def first_bit(path: Path) -> None:
    flip(path / "data", 0)


def last_bit(path: Path) -> None:
    flip(path / "data", len(FILES["data"]) - 1, 7)


def bit_of_a_small_file(path: Path) -> None:
    flip(path / "index", 4, 3)


def bit_of_a_hidden_file(path: Path) -> None:
    flip(path / ".hidden", 0)


def not_a_folder(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("a file of that name")


DAMAGES: dict[Callable[[Path], None], str] = {
    no_marker: "no commit.json",
    broken_marker: "commit.json cannot be read",
    empty_marker: "commit.json cannot be read",
    other_marker: "commit.json does not have the contents",
    null_marker: "commit.json does not have the contents",
    marker_of_other_keys: "commit.json does not have the contents",
    marker_not_text: "commit.json cannot be read",
    marker_a_folder: "commit.json cannot be read",
    missing_file: "file data is missing",
    missing_hidden_file: "file .hidden is missing",
    truncated_file: "file data has 1279 bytes instead of 1280",
    longer_file: "file index has 12 bytes instead of 11",
    first_bit: "file data does not have the contents",
    last_bit: "file data does not have the contents",
    bit_of_a_small_file: "file index does not have the contents",
    bit_of_a_hidden_file: "file .hidden does not have the contents",
    not_a_folder: "commit.json cannot be read",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_named_and_passed_over(damage: Callable[[Path], None], tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        write(tmp_path, step)
    damage(tmp_path / "step-00000003")
    damage(tmp_path / "step-00000004")
    found, damaged = newest_valid(tmp_path)
    assert found == tmp_path / "step-00000002"
    assert [bad.path.name for bad in damaged] == ["step-00000004", "step-00000003"]
    for bad in damaged:
        assert DAMAGES[damage] in bad.reason
        assert str(bad) == f"{bad.path} is damaged: {bad.reason}"
        with pytest.raises(DamagedCheckpoint, match="is damaged"):
            verify(bad.path)


def test_without_any_valid_one_all_are_named(tmp_path: Path) -> None:
    for step in (1, 2):
        truncated_file(write(tmp_path, step))
    found, damaged = newest_valid(tmp_path)
    assert found is None
    assert [bad.path.name for bad in damaged] == ["step-00000002", "step-00000001"]


def test_no_bit_of_the_marker_can_change_what_is_restored(tmp_path: Path) -> None:
    # It holds the position in the data: a wrong digit there would go on silently on other samples.
    path = write(tmp_path, 3)
    whole, marker = (path / disk.MARKER).read_bytes(), read_marker(path)
    dice = random.Random(0)
    caught = 0
    for place in range(len(whole)):
        flip(path / disk.MARKER, place, dice.randrange(8))
        try:
            verify(path)
        except DamagedCheckpoint:
            caught += 1
        else:
            assert read_marker(path) == marker, place
        (path / disk.MARKER).write_bytes(whole)
    assert caught > len(whole) / 2


def test_a_damage_passes_from_one_rank_to_another(tmp_path: Path) -> None:
    bad = DamagedCheckpoint(tmp_path, "because")
    again = pickle.loads(pickle.dumps(bad))
    assert (type(again), again.path, again.reason, str(again)) == (DamagedCheckpoint, tmp_path, "because", str(bad))


def test_what_is_not_finished_is_never_looked_at(tmp_path: Path) -> None:
    write(tmp_path, 1)
    for name in ("step-00000009.partial", "step-00000008.replaced.partial", "step-x", "other", "step-00000007.bak"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    assert newest_valid(tmp_path) == (tmp_path / "step-00000001", [])
    assert listed(tmp_path) == [tmp_path / "step-00000001"]


def test_pruning_keeps_the_newest_whole_ones_and_removes_what_was_interrupted(tmp_path: Path) -> None:
    for step in range(1, 7):
        write(tmp_path, step)
    truncated_file(tmp_path / "step-00000003")
    no_marker(tmp_path / "step-00000005")
    for name in ("step-00000007.partial", "step-00000004.replaced.partial"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    (tmp_path / "notes").mkdir()
    newest = tmp_path / "step-00000006"
    prune(tmp_path, 2, newest)
    # Damaged ones are left for a person to look at, and do not count.
    assert names(tmp_path) == ["notes", "step-00000003", "step-00000004", "step-00000005", "step-00000006"]
    prune(tmp_path, 1, newest)
    assert names(tmp_path) == ["notes", "step-00000003", "step-00000005", "step-00000006"]


def test_pruning_never_removes_what_was_just_saved(tmp_path: Path) -> None:
    # The newest was passed over when the run resumed, but its files have their sizes: only reading them through shows it.
    for step in (2, 4, 6):
        write(tmp_path, step)
    first_bit(tmp_path / "step-00000006")
    newest = write(tmp_path, 5)
    prune(tmp_path, 1, newest)
    assert names(tmp_path) == ["step-00000005", "step-00000006"]
    assert newest_valid(tmp_path)[0] == newest


def test_the_same_step_again_replaces_the_one_that_is_there(tmp_path: Path) -> None:
    first_bit(write(tmp_path, 5))
    with pytest.raises(DamagedCheckpoint):
        verify(tmp_path / "step-00000005")
    for _ in range(3):  # also where an earlier replacement was killed before it was tidied up
        verify(write(tmp_path, 5))
        assert newest_valid(tmp_path) == (tmp_path / "step-00000005", [])
    prune(tmp_path, 2, tmp_path / "step-00000005")
    assert names(tmp_path) == ["step-00000005"]


def test_the_marker_is_plain_json(tmp_path: Path) -> None:
    assert json.loads((write(tmp_path, 1) / "commit.json").read_text())["progress"] == {"step": 3, "samples": 24}
