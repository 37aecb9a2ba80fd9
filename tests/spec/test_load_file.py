"""Run files as files: read, missing, a folder, not text."""

from __future__ import annotations

from pathlib import Path

import pytest
from sentences import assert_one_sentence

from phalanx.spec.errors import RunError
from phalanx.spec.load import load, loads

GOOD = "[train]\nbatch = 8\nsteps = 10\n"


def test_load_reads_a_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xef\xbb\xbf" + GOOD.replace("\n", "\r\n").encode())
    assert load(path, ["train.seed=3"]) == loads(GOOD + "seed = 3\n")
    assert load(str(path)) == loads(GOOD)


def file_problems(path: Path, *overrides: str) -> tuple[str, ...]:
    with pytest.raises(RunError) as caught:
        load(path, overrides)
    for problem in caught.value.problems:
        assert_one_sentence(problem)
    return caught.value.problems


def test_missing_file(tmp_path: Path) -> None:
    missing = tmp_path / "absent" / "run.toml"
    assert file_problems(missing)[0].startswith(f"{missing}: there is no such file: check the path")
    (tmp_path / "run.toml").write_text(GOOD)
    near, override = file_problems(tmp_path / "run.tml", "train.stps=1")
    assert near.endswith(f"did you mean {tmp_path / 'run.toml'}?")
    assert override.startswith("command line: train.stps=1: ")


def test_folder_for_a_file(tmp_path: Path) -> None:
    assert file_problems(tmp_path) == (f"{tmp_path}: this is a folder, but a run file is expected: name the TOML file to run.",)
    (tmp_path / "run.toml").write_text(GOOD)
    assert file_problems(tmp_path)[0].endswith(f"did you mean {tmp_path / 'run.toml'}?")


def test_a_file_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (problem,) = file_problems(tmp_path / "file" / "run.toml")
    assert "cannot be read (Not a directory)" in problem


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"[train]\nsteps = 3 # \xe9t\xe9\n")
    assert file_problems(path) == (f"{path}:2: byte 0xe9 is not UTF-8: save the run file in that encoding.",)
