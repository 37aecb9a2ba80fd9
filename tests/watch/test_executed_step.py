"""Executed steps of a pipeline as the page shows them, from timelines written here."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from watch_runs import serving, started, step, write_run

from phalanx.events.timeline_files import Author, RankStep, Span, TimelineWriter

LAYOUT = started()["layout"] | {"pipeline": 2, "data": 2, "tensor": 1}
MONOTONIC = {0: 1000.0, 1: 5000.0}
"""What the clocks of two nodes show when step 1 begins."""


def spans(stage: int, late: float = 0.0) -> list[Span]:
    """Two micro-batches; the second stage begins later."""
    at = stage * 0.1 + late
    return [
        Span(-0.5, -0.001, "phase", "other"),
        Span(-0.00001, 0.01, "phase", "loading"),
        Span(0.01 + at, 0.11 + at, "work", f"{stage}F0"),
        Span(0.11 + at, 0.21 + at, "work", f"{stage}F1"),
        Span(0.21 + at, 0.41 + at, "work", f"{stage}B0"),
        Span(0.41 + at, 0.61 + at, "work", f"{stage}B1"),
        Span(0.01, 0.8, "phase", "compute"),
        Span(0.8, 0.9, "work", "optimizer"),
        Span(0.8, 0.9, "phase", "optimizer"),
    ]


def write_timeline(run: Path, rank: int, steps: range, *, generation: int = 0, late: float = 0.0) -> None:
    """Stage and node are the same: the pipeline of rank r is r and r + 2."""
    node = rank // 2
    author = Author(
        rank=rank, ranks=4, node=node, host=f"node-{node}", boot=f"boot-{node}", generation=generation, launch="one", wall=1e9, monotonic=MONOTONIC[node]
    )  # fmt: skip
    writer = TimelineWriter(run, author, keep=100)
    for number in steps:
        begin = MONOTONIC[node] + number + 0.001 * rank
        writer.add(partial(RankStep, step=number, begin=begin, seconds=0.95, spans=spans(node, late), calls=[]))
    writer.close()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    clock = {"event": "clock_aligned", "time": 1.0, "node": 1, "reference": 0, "offset": -4000.0 + 0.25, "error": 0.0003}
    records = [started(layout=LAYOUT, accumulation=2), clock, *(step(number) for number in range(1, 13))]
    path = write_run(tmp_path / "runs" / "run", records)
    for rank in range(4):
        write_timeline(path, rank, range(1, 12 if rank == 3 else 13))
    return path


def test_a_step_is_shown_on_the_clock_of_all_ranks(run: Path) -> None:
    with serving(run.parent) as client:
        shown = client.view("run", "pipeline")["executed"]
        assert (shown["ranks"], shown["step"], shown["first"], shown["last"]) == ([0, 2], 12, 1, 12)
        assert (shown["copies"], shown["copy"], shown["clock_error"]) == (2, 0, 0.0003)
        first, second = shown["rows"]
        # Rank 2 begins 0.002 s after rank 0 by its own clock, which is 0.25 s late when 4000 s are taken off.
        assert first["shift"] == 0 and second["shift"] == pytest.approx(0.252)
        assert [action[:3] for action in second["actions"]] == [["F", 1, 0], ["F", 1, 1], ["B", 1, 0], ["B", 1, 1]]
        assert second["actions"][0][3:] == pytest.approx([0.252 + 0.11, 0.252 + 0.21], abs=2e-6)
        assert [name for name, *_ in first["others"]] == ["loading", "optimizer"]
        # Each rank works 0.6 s between 0.01 s and 0.252 + 0.71 s.
        assert shown["bubble"] == pytest.approx(1 - 1.2 / (2 * 0.952), abs=1e-5)
        other = client.view("run", "pipeline", step=5, copy=1)["executed"]
        assert (other["ranks"], other["step"], other["last"]) == ([1, 3], 5, 11), "rank 3 has not recorded step 12"
        assert client.view("run", "pipeline", step=99)["executed"]["step"] == 12
        assert client.view("run", "pipeline", copy=99)["executed"]["copy"] == 1
        assert client.get("/api/view?run=run&view=pipeline&step=../1").status == 400


def test_a_step_that_was_repeated_is_shown_as_it_was_taken_last(run: Path) -> None:
    for rank in (0, 2):
        write_timeline(run, rank, range(10, 12), generation=1, late=0.05)
    with serving(run.parent) as client:
        shown = client.view("run", "pipeline", step=10)["executed"]
        assert shown["rows"][0]["actions"][0][3] == pytest.approx(0.06, abs=2e-6)
    write_timeline(run, 0, range(12, 13), generation=1)  # rank 2 died before it
    with serving(run.parent) as client:
        assert client.view("run", "pipeline")["executed"]["last"] == 11


def test_what_is_recorded_later_appears(run: Path) -> None:
    with serving(run.parent) as client:
        before = client.get("/api/view?run=run&view=pipeline")
        again = client.get("/api/view?run=run&view=pipeline", If_None_Match=before.headers["etag"])
        assert again.status == 304
        for rank in (0, 2):
            write_timeline(run, rank, range(13, 15))
        for _ in range(100):
            if client.view("run", "pipeline")["executed"]["last"] == 14:
                break
            time.sleep(0.05)
        assert client.view("run", "pipeline")["executed"]["last"] == 14


def test_without_a_timeline_the_page_says_how_to_get_one(tmp_path: Path) -> None:
    write_run(tmp_path / "run", [started(layout=LAYOUT, accumulation=2), step(1)])
    with serving(tmp_path) as client:
        shown: Any = client.view("run", "pipeline")
        assert "watch.timeline = true" in shown["executed"]["reason"] and len(shown["rows"]) == 2


@pytest.mark.parametrize("damage", ["link", "pipe", "binary", "numbers", "deep", "folder"])
def test_damaged_timelines_break_nothing(run: Path, damage: str, tmp_path: Path) -> None:
    for path in (run / "timeline").glob("rank-2.*"):
        content = path.read_text()
        path.unlink()
        match damage:
            case "link":
                (tmp_path / path.name).write_text(content)
                path.symlink_to(tmp_path / path.name)
            case "pipe":
                os.mkfifo(path)
            case "binary":
                path.write_bytes(b"\x00\xff" * 5000)
            case "numbers":
                path.write_text(content.replace('"spans":[[', '"spans":[[1e999,null,{},[]],[5,3,"work","0F0"],["x",1,2],['))
            case "deep":
                path.write_text(content + '{"step":12,' + 50_000 * "[" + "\n")
            case "folder":
                path.mkdir()
    with serving(run.parent) as client:
        shown = client.view("run", "pipeline")["executed"]
        match damage:
            case "deep":
                assert shown["step"] == 12 and shown["rows"][1]["actions"] == []
            case "numbers":
                assert len(shown["rows"][1]["actions"]) == 4
            case _:
                assert "watch.timeline" in shown["reason"]
