from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from checkpoints import flip, values

from phalanx.checkpointing import directory
from phalanx.checkpointing.directory import DamagedCheckpoint
from phalanx.checkpointing.find_checkpoint import (
    checkpoint_locations,
    find,
    is_checkpoint,
    locate,
    path_or_url,
)
from phalanx.checkpointing.format import RunMetadata
from phalanx.checkpointing.location import open_location
from phalanx.checkpointing.offline_writer import StreamedTensor, write_checkpoint
from phalanx.spec.errors import RunError
from phalanx.spec.tensor_slice import Box

WHOLE = torch.arange(12.0).view(3, 4)


def checkpoint(folder: Path, step: int, **metadata: str) -> Path:
    chunk = (Box((0, 0), (3, 4)), lambda: WHOLE)
    tensor = StreamedTensor(name="model/w", shape=(3, 4), dtype=torch.float32, boxes=[chunk])
    return Path(str(write_checkpoint(folder, step, [tensor], RunMetadata(**metadata))))


def run_directory(path: Path, *steps: int, text: str = "# of the directory\n") -> Path:
    path.mkdir()
    (path / "run.toml").write_text(text)
    for step in steps:
        checkpoint(path / "checkpoints", step, run="# of the checkpoint\n")
    return path


def test_find_returns_the_newest_valid_checkpoint_of_a_run(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", 1, 2, 3)
    first, second, third = sorted((run / "checkpoints").iterdir())
    for path, expected in ((run, third), (first, first), (run / "checkpoints", third), (str(second), second)):
        found = find(path)
        assert path_or_url(found.checkpoint) == expected
        assert (found.run, found.source) == ("# of the directory\n", str(run / "run.toml"))
        assert found.tokenizer is None
    (run / "tokenizer").mkdir()
    assert find(run).tokenizer == find(first).tokenizer == run / "tokenizer"
    flip(values(third), -1)
    assert (path_or_url(find(run).checkpoint), find(run).step) == (second, 2)
    assert [bad.path for bad in find(run).damaged] == [str(third)]
    with pytest.raises(DamagedCheckpoint, match=r"step-00000003 is damaged: its file state-.* does not have the contents"):
        find(third)
    # Who checks what they read is given the newest by its marker, and reads nothing twice.
    assert path_or_url(find(run, verify=False).checkpoint) == path_or_url(locate(run).checkpoint) == third
    (third / "commit.json").unlink()
    assert path_or_url(locate(run).checkpoint) == second
    (skipped,) = locate(run).damaged
    assert skipped.path == str(third) and "commit.json" in skipped.reason


def test_a_moved_checkpoint_has_its_run_file_in_the_marker(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", 5)
    lone = Path(shutil.copytree(run / "checkpoints" / "step-00000005", tmp_path / "elsewhere" / "lone"))
    found = find(lone)
    assert (path_or_url(found.checkpoint), found.run, found.tokenizer) == (lone, "# of the checkpoint\n", None)
    assert found.source == str(lone / "commit.json")
    shutil.copytree(lone, tmp_path / "many" / "step-00000005")
    assert path_or_url(find(tmp_path / "many").checkpoint) == tmp_path / "many" / "step-00000005"
    (run / "run.toml").unlink()
    assert find(run).run == "# of the checkpoint\n"


def test_checkpoint_locations_follow_the_run_file(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    checkpoint(kept, 7, run="# of the checkpoint\n")
    run = run_directory(tmp_path / "run", text=f'[checkpoint]\nurl = "{kept}"\n')
    assert checkpoint_locations(open_location(run)) == [open_location(kept)]
    found = find(run)
    assert path_or_url(found.checkpoint) == kept / "step-00000007" and found.source == str(run / "run.toml")
    # Saved near and uploaded: of two of the same step the near one is taken.
    (run / "run.toml").write_text(f'[checkpoint]\nurl = "{kept}"\nlocal_first = true\n')
    near = run / "checkpoints"
    assert path_or_url(find(run).checkpoint) == kept / "step-00000007"
    for step in (6, 7):
        checkpoint(near, step)
    assert checkpoint_locations(open_location(run)) == [open_location(near), open_location(kept)]
    assert [path_or_url(path) for path in directory.list_checkpoints(*checkpoint_locations(open_location(run)))] == [
        near / "step-00000007",
        kept / "step-00000007",
        near / "step-00000006",
    ]
    flip(values(near / "step-00000007"), -1)
    assert path_or_url(find(run).checkpoint) == kept / "step-00000007"
    (run / "run.toml").write_text("no toml = = at all")
    assert checkpoint_locations(open_location(run)) == [open_location(near)]


def test_a_folder_is_a_checkpoint_by_its_name_or_its_marker(tmp_path: Path) -> None:
    made = checkpoint(tmp_path, 3)
    assert is_checkpoint(open_location(made)) and not is_checkpoint(open_location(tmp_path))
    assert is_checkpoint(open_location(made.rename(tmp_path / "best")))
    (tmp_path / "step-00000009").mkdir()
    assert is_checkpoint(open_location(tmp_path / "step-00000009"))


def test_find_errors_name_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a directory: name a checkpoint"):
        find(tmp_path / "nothing")
    for look in (find, locate):
        with pytest.raises(RunError, match=r"has no checkpoint to load .there is none in .*: train first"):
            look(run_directory(tmp_path / look.__name__))
    kept = tmp_path / "kept"
    checkpoint(kept, 7)  # of another run, at the URL of one that saves nothing
    nothing = run_directory(tmp_path / "unsaved", text=f'[checkpoint]\nsave = false\nurl = "{kept}"\n')
    (nothing / "checkpoints").mkdir()
    for place in (nothing, nothing / "checkpoints"):
        with pytest.raises(RunError, match=r"checkpoint.save = false, which has saved no checkpoint: train it again without"):
            find(place)
    damaged = run_directory(tmp_path / "damaged", 4)
    values(damaged / "checkpoints" / "step-00000004").unlink()
    with pytest.raises(RunError, match=r"step-00000004 is damaged: its file state-.* is missing"):
        find(damaged)
    lost = run_directory(tmp_path / "lost")
    (lost / "run.toml").unlink()
    checkpoint(lost / "checkpoints", 4)
    with pytest.raises(RunError, match=r"has no run file at .*run.toml, and its commit.json has none"):
        find(lost / "checkpoints" / "step-00000004")
