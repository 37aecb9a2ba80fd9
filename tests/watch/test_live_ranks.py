"""The ranks of `phalanx top`: who is waited for, what a broken file shows, and what fits on a screen."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from watch_runs import started, step, write_run

from phalanx.events.rundir import RunDir
from phalanx.watch.followed_run import FollowedRun
from phalanx.watch.live_ranks import LiveRank, LiveRanks, parse_beats, place, waited_for
from phalanx.watch.top_view import Screen, top_json, top_view


def beats(ranks: int, **changes: list[Any]) -> bytes:
    """A beats.json of equal ranks, two on each node. `changes`: "r3" to the beat of rank 3."""
    each: dict[str, Any] = {str(rank): [7, "computing", 0.1, 1.0, 0.5] for rank in range(ranks)}
    each |= {name.removeprefix("r"): beat for name, beat in changes.items()}
    nodes = [[node, 2] for node in range(ranks // 2)]
    return json.dumps({"time": 1.0, "generation": 0, "ranks": ranks, "nodes": nodes, "dead": [], "beats": each}).encode()


def live(content: bytes) -> list[LiveRank]:
    found = parse_beats(content)
    assert found is not None
    return found


def order(content: bytes) -> list[int]:
    return [rank.rank for rank in waited_for(live(content))]


def test_the_rank_that_computes_longest_is_waited_for() -> None:
    found = live(beats(4, r2=[7, "computing", 0.1, 1.0, 0.9], r1=[6, "data", 0.1, 1.0, 0.7]))
    assert [rank.rank for rank in waited_for(found)] == [2, 1, 0, 3]
    assert (found[2].node, found[2].computing, found[1].phase, found[1].step) == (1, 0.9, "data", 6)


def test_ranks_without_a_heartbeat_come_first() -> None:
    content = json.loads(beats(4))
    del content["beats"]["3"]
    content["dead"] = [1]
    found = live(json.dumps(content).encode())
    assert [(rank.rank, rank.phase) for rank in waited_for(found)][:2] == [(1, "lost"), (3, "no heartbeat")]


def test_of_ranks_that_stand_still_the_one_that_is_behind_or_does_something_else_is_waited_for() -> None:
    standing = [7, "computing", 60.0, 1.0, 0.9]
    still = {f"r{rank}": standing for rank in range(4)}
    assert order(beats(4, **still | {"r3": [6, "computing", 61.0, 1.0, 0.1]}))[0] == 3
    assert order(beats(4, **still | {"r2": [7, "saving", 60.0, 1.0, 0.1]}))[0] == 2
    assert order(beats(4, **still | {"r2": [8, "saving", 0.1, 1.0, 0.1]}))[0] == 0, (
        "while one makes progress, nobody stands still"
    )


def test_places_follow_the_order_of_the_layout() -> None:
    layout = {"pipeline": 2, "data": 3, "shard": 1, "context": 1, "tensor": 2}
    assert [place(rank, layout, 12) for rank in (0, 1, 2, 6, 11)] == [
        {"pipeline": 0, "data": 0, "tensor": 0},
        {"pipeline": 0, "data": 0, "tensor": 1},
        {"pipeline": 0, "data": 1, "tensor": 0},
        {"pipeline": 1, "data": 0, "tensor": 0},
        {"pipeline": 1, "data": 2, "tensor": 1},
    ]
    assert place(0, layout, 8) == {}, "after a loss of ranks the layout is another one"


@pytest.mark.parametrize(
    "content",
    [
        b"", b"[]", b"{", b"\xff\xfe", b'{"ranks": "many"}', b'{"ranks": 2, "beats": []}', b"[" * 5000,
        b'{"ranks": 2, "nodes": [[0, -5], [1e9, 2], "x", [0, 99999999999]], "dead": [[], "1", {}], "beats": {"0": 1, "1": [1, [], {}, 2, 3]}}',
        b'{"ranks": 2, "beats": {"0": [1, "\\u001b[2J", 0, 0, 0], "1": [-3, "computing", "inf", "nan", -1]}}',
        b'{"ranks": -1}', b'{"ranks": true}',
    ],
)  # fmt: skip
def test_a_broken_file_shows_nothing_wrong(content: bytes, tmp_path: Path) -> None:
    run = followed(tmp_path, 4)
    found = parse_beats(content)
    shown = screen(run, found)
    assert "\x1b[2J" not in shown and "step 3 of 10" in shown
    assert json.dumps(top_json(run, found, "waited for"))


def followed(path: Path, ranks: int) -> FollowedRun:
    layout = {"pipeline": ranks // 4, "data": 2, "shard": 1, "context": 1, "tensor": 2}
    write_run(path / "run", [started(ranks=ranks, layout=layout), *(step(number) for number in (1, 2, 3))])
    run = FollowedRun("run", path / "run")
    while not run.catch_up(1.0):
        pass
    return run


def screen(run: FollowedRun, ranks: list[LiveRank] | None, height: int | None = None, first: int = 0) -> str:
    console = Console(width=120, height=height or 50, file=io.StringIO())
    with console.capture() as shown:
        console.print(top_view(run, ranks, Screen(order="waited for", width=120, height=height, first=first)))
    return shown.get()


def test_a_thousand_ranks_fit_on_a_screen_with_a_summary(tmp_path: Path) -> None:
    run = followed(tmp_path, 1024)
    changed = {"r700": [7, "computing", 0.1, 1.0, 0.99]} | {f"r{rank}": [7, "data", 0.1, 1.0, 0.2] for rank in range(24)}
    ranks = live(beats(1024, **changed))
    shown = screen(run, ranks, height=24)
    assert len(shown.splitlines()) <= 24
    assert "data 24  computing 1,000" in shown and "of 1,024, by waited for" in shown
    rows = [line.split() for line in shown.splitlines() if " pp" in line]
    assert rows[0][:3] == ["700", "350", "pp175"] and len(rows) >= 10
    below = screen(run, ranks, height=24, first=500)
    assert "700" not in [line.split()[0] for line in below.splitlines() if " pp" in line]
    assert screen(run, ranks).count(" pp") == 1024, "without a height, as in a pipe, all are shown"


def test_the_figures_are_those_of_the_page_and_an_ended_run_says_so(tmp_path: Path) -> None:
    run = followed(tmp_path, 4)
    shown = screen(run, live(beats(4)))
    for words in ("step 3 of 10", "loss 4.7000", "promised 2.00 s", "promised 512", "MFU 40.0%", "price $6"):
        assert words in shown, words
    found = top_json(run, None, "rank")
    assert found["live"] is False and found["ranks"] == [] and found["promise"] == {
        "seconds": 2.0, "low": 1.5, "high": 3.0, "tokens_per_second": 512.0, "mfu": 0.4, "total_memory": 160.0,
    }  # fmt: skip
    write_run(tmp_path / "run", [started(), step(10), {"event": "finished", "time": 30.0, "step": 10}])
    over = FollowedRun("run", tmp_path / "run")
    over.catch_up(1.0)
    shown = screen(over, None)
    assert "finished, the run has ended" in shown and "The ranks have ended." in shown and "left" not in shown


def test_heartbeats_are_asked_for_by_a_touch_and_read_once(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    asking = LiveRanks(rundir)
    asking.ask()
    assert not rundir.control.exists(), "a folder that is not there is not made"
    rundir.control.mkdir()
    rundir.beats_file.write_bytes(beats(2))
    asking = LiveRanks(rundir)
    asking.ask()
    assert rundir.top_file.exists() and asking.read() is None, "what was there before may be old"
    rundir.beats_file.with_name("new").write_bytes(beats(4))
    os.replace(rundir.beats_file.with_name("new"), rundir.beats_file)
    found = asking.read()
    assert found is not None and len(found) == 4 and asking.read() is None
