"""Files that are followed while others write, cut, replace or spoil them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from watch_runs import lines, started, step, write_run

from phalanx.watch import follow_lines
from phalanx.watch.follow_lines import LineFollower
from phalanx.watch.followed_run import FollowedRun, RunFolder


def read_all(follower: LineFollower) -> list[bytes]:
    found = []
    while (block := follower.read()) is not None:
        found += [line for line in block.lines if line]
    return found


def test_lines_come_once_and_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = LineFollower(path)
    assert follower.read() is None
    path.write_bytes(b"one\ntw")
    assert read_all(follower) == [b"one"]
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    assert read_all(follower) == [b"two", b"three"]
    assert follower.behind == 0 and read_all(follower) == []


@pytest.mark.parametrize("size", [follow_lines.MAX_LINE + 1, 3 * follow_lines.BLOCK])
def test_a_line_that_is_too_long_is_skipped(tmp_path: Path, size: int) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"before\n" + size * b"x" + b"\nafter\n")
    follower = LineFollower(path)
    assert read_all(follower) == [b"before", b"after"]
    assert follower.too_long == 1


def test_a_long_line_that_is_being_written_is_not_kept_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    follower = LineFollower(path)
    path.write_bytes(2 * follow_lines.MAX_LINE * b"x")
    assert read_all(follower) == [] and follower.offset == 2 * follow_lines.MAX_LINE
    with path.open("ab") as file:
        file.write(b"end\nnext\n")
    assert read_all(follower) == [b"next"]


@pytest.mark.parametrize("how", ["cut", "another file", "written anew"])
def test_a_file_that_is_replaced_is_read_from_its_beginning(tmp_path: Path, how: str) -> None:
    run_dir = write_run(tmp_path / "run", [started(), step(1), step(2), step(3)])
    run, events = FollowedRun("run", run_dir), run_dir / "events.jsonl"
    assert run.catch_up(5.0) and run.digest.last_step == 3
    if how == "cut":
        events.write_bytes(lines([started(), step(7)]))
    elif how == "another file":
        (run_dir / "new").write_bytes(lines([started(), *(step(number) for number in range(1, 8))]))
        os.replace(run_dir / "new", events)
    else:
        events.write_bytes(lines([started(time=5.0), *(step(number, loss=9.0) for number in range(1, 8))]))
    before = run.version
    run._looked = 0.0  # a look is due
    assert run.catch_up(5.0)
    assert run.digest.last_step == 7 and run.version != before
    assert len(run.digest.steps) == (1 if how == "cut" else 7)


def test_a_large_file_is_read_in_two_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow_lines, "BLOCK", 2000)
    monkeypatch.setattr("phalanx.watch.followed_run.BLOCK", 2000)
    ranks = [
        {"event": "worker_started", "time": 1.0, "rank": rank, "host": "h", "pid": rank, "device": "cpu"} for rank in range(60)
    ]
    run = FollowedRun("run", write_run(tmp_path / "run", [started(), *ranks, *(step(number) for number in range(1, 40))]))
    looks = 0
    while not run.catch_up(0.0):
        looks += 1
        if run.digest.last_step == 39 and looks:
            assert not run.ranks_known or len(run.digest.ranks.started) == 60
        else:
            assert run.state == "reading"
    assert looks > 5 and run.progress == 1.0
    assert run.digest.ranks.started["rank"].tolist() == list(range(60)) and run.digest.last_step == 39


def test_links_and_pipes_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    write_run(secret / "run", [started(), step(1)])
    folder = tmp_path / "runs"
    folder.mkdir()
    (folder / "linked").symlink_to(secret / "run")
    (folder / "own").mkdir()
    (folder / "own" / "events.jsonl").symlink_to(secret / "run" / "events.jsonl")
    (folder / "own" / "run.toml").write_text("")
    (folder / "own" / "logs").mkdir()
    (folder / "own" / "logs" / "rank-0.log").symlink_to(secret / "run" / "events.jsonl")
    (folder / "pipe").mkdir()
    (folder / "pipe" / "run.toml").write_text("")
    os.mkfifo(folder / "pipe" / "events.jsonl")
    runs = RunFolder(folder)
    assert runs.names == ["own", "pipe"]
    for name in runs.names:
        run = runs.get(name)
        assert run is not None and run.catch_up(1.0)
        assert not run.digest.kinds and run.log_tail(0) == ""


@pytest.mark.parametrize("name", ["../secret", "..", "/etc", "runs/../../secret", "", ".", "a/../a", "%2e%2e", "\0"])
def test_a_run_is_found_by_its_name_only(tmp_path: Path, name: str) -> None:
    write_run(tmp_path / "secret", [started()])
    write_run(tmp_path / "runs" / "a", [started()])
    assert RunFolder(tmp_path / "runs").get(name) is None
    assert RunFolder(tmp_path / "runs").get("a") is not None


def test_names_that_are_no_text_can_be_asked_for(tmp_path: Path) -> None:
    os.mkdir(os.fsencode(tmp_path) + b"/run-\xff")
    with open(os.fsencode(tmp_path) + b"/run-\xff/events.jsonl", "wb") as file:
        file.write(lines([started(), step(1)]))
    runs = RunFolder(tmp_path)
    (name,) = runs.names
    run = runs.get(name)
    assert name.encode() and run is not None and run.catch_up(1.0) and run.digest.last_step == 1
