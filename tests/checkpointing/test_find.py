from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.checkpointing import disk
from phalanx.checkpointing.disk import DamagedCheckpoint
from phalanx.checkpointing.find import find
from phalanx.spec.errors import RunError


def run_directory(path: Path, *steps: int) -> Path:
    path.mkdir()
    (path / "run.toml").write_text("")
    for step in steps:
        partial = disk.folder(path / "checkpoints", step).with_suffix(disk.PARTIAL)
        partial.mkdir(parents=True)
        (partial / "data").write_text("text")
        disk.commit(partial, {"step": step})
    return path


def test_a_run_stands_for_its_newest_valid_checkpoint_and_a_checkpoint_for_itself(tmp_path: Path) -> None:
    run = run_directory(tmp_path / "run", 1, 2, 3)
    one, two, three = sorted((run / "checkpoints").iterdir())
    assert find(run) == (three, run / "run.toml")
    assert find(one) == (one, run / "run.toml")
    (three / "data").write_text("tixt")
    assert find(run) == (two, run / "run.toml")
    with pytest.raises(DamagedCheckpoint, match="step-00000003 is damaged: its file data does not have the contents"):
        find(three)


def test_what_cannot_be_found_is_said_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a directory: name a checkpoint"):
        find(tmp_path / "nothing")
    with pytest.raises(RunError, match=r"has no checkpoint to load .there is none in .*: train first"):
        find(run_directory(tmp_path / "empty"))
    damaged = run_directory(tmp_path / "damaged", 4)
    (damaged / "checkpoints" / "step-00000004" / "data").unlink()
    with pytest.raises(RunError, match="step-00000004 is damaged: its file data is missing"):
        find(damaged)
    lost = run_directory(tmp_path / "lost", 4)
    (lost / "run.toml").unlink()
    with pytest.raises(RunError, match="has no run file at"):
        find(lost / "checkpoints" / "step-00000004")
