"""Runs in an object store, as the page reads them."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from watch_runs import started, step, write_run

from phalanx.checkpointing.location import Local, open_location
from phalanx.spec.errors import RunError
from phalanx.watch import mirrored_runs
from phalanx.watch.mirrored_runs import Mirror, mirrored


class Counting(Local):
    """A store that counts the bytes that are read of it, and may list names that no file system has."""

    read_bytes = 0
    strange: tuple[str, ...] = ()

    def __truediv__(self, name: str) -> Counting:
        return Counting(self.path / name)

    def entries(self) -> list[str]:
        return [*super().entries(), *Counting.strange]

    def read(self, begin: int = 0, length: int | None = None) -> bytes:
        block = super().read(begin, length)
        Counting.read_bytes += len(block)
        return block


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mirrored_runs, "_REFRESH_SECONDS", 0.05)
    monkeypatch.setattr(Counting, "read_bytes", 0)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def grow(path: Path, *records: dict[str, object]) -> None:
    with (path / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_a_run_is_followed_without_reading_a_byte_twice(tmp_path: Path) -> None:
    run = tmp_path / "bucket" / "run"
    write_run(run, [started(), *(step(number) for number in range(1, 200))])
    with mirrored(Counting(run)) as folder:
        assert folder.names == ["run"] and folder.title == "run"

        def steps() -> int:
            followed = folder.get("run")
            assert followed is not None
            followed.catch_up(1.0)
            return followed.digest.last_step

        until(lambda: steps() == 199)
        for number in range(200, 210):
            grow(run, step(number))
            until(lambda number=number: steps() == number)  # type: ignore[misc]
        sizes = sum(path.stat().st_size for path in run.iterdir() if path.is_file())
        assert sizes <= Counting.read_bytes <= sizes + 11 * 64
        copy = folder.root / "events.jsonl"
        assert copy.read_bytes() == (run / "events.jsonl").read_bytes()
    assert not copy.exists(), "the copy is gone with the page"


@pytest.mark.parametrize("kept", [10, 300], ids=["shorter", "longer"])
def test_an_object_that_is_written_anew_is_read_anew(tmp_path: Path, kept: int) -> None:
    run = tmp_path / "run"
    write_run(run, [started(), *(step(number) for number in range(1, 100))])
    mirror = Mirror(Counting(run), tmp_path / "copy")
    mirror.find()
    mirror.refresh("")
    (run / "events.jsonl").unlink()
    grow(run, started(), *(step(number, loss=9.0) for number in range(1, kept)))
    mirror.refresh("")
    assert (tmp_path / "copy" / "events.jsonl").read_bytes() == (run / "events.jsonl").read_bytes()


def test_runs_below_a_folder_and_names_that_lead_out_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "group/b"):
        write_run(tmp_path / "bucket" / name, [started(), step(1)])
    (tmp_path / "outside").mkdir()
    write_run(tmp_path / "outside" / "x", [started()])
    monkeypatch.setattr(Counting, "strange", ("..", "../outside", "/etc", "", "a\\b"))
    mirror = Mirror(Counting(tmp_path / "bucket"), tmp_path / "copy")
    mirror.find()
    assert sorted(mirror.runs) == ["a", "group/b"]
    monkeypatch.setattr(Counting, "strange", ())
    with mirrored(Counting(tmp_path / "bucket")) as folder:
        assert folder.names == ["a", "group/b"]
        runs = [run for name in folder.names if (run := folder.get(name, glance=True))]
        until(lambda: [run.glance()["step"] for run in runs] == [1, 1])


def test_where_no_run_is(tmp_path: Path) -> None:
    with (
        pytest.raises(RunError, match="there is no run: neither it nor a folder in it has"),
        mirrored(Counting(tmp_path)),
    ):
        pass
    pytest.importorskip("fsspec", reason="fsspec is not installed: no stores without it")
    with (
        pytest.raises(RunError, match="memory://nowhere/run: there is no run"),
        mirrored(open_location("memory://nowhere/run")),
    ):
        pass
