"""Views of a run, against values that are computed by hand from its events."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from watch_runs import Record, lines, serving, started, step, write_run
from watch_views import every_view

from phalanx.watch.run_digest import Digest


def views_of(records: list[Record], tmp_path: Path) -> dict[str, Any]:
    digest = Digest()
    digest.feed(lines(records).split(b"\n"))
    return every_view(digest, tmp_path)


def of_rank(rank: int, compute: float) -> list[Record]:
    return [
        {"event": "worker_started", "time": 1.0, "rank": rank, "host": f"node-{rank // 2}", "pid": rank, "device": "cpu"},
        {"event": "step_accounted", "time": 1.0, "step": 2, "rank": rank, "sent": {"data": {"all-reduce": 7}}, "memory": {"parameters": 100 + rank, "activations": 5}, "flops": {"all": 9}},
        {"event": "step_timed", "time": 1.0, "step": 3, "rank": rank, "seconds": 2.0, "parts": {"compute": compute, "data": 2.0 - compute}},
    ]  # fmt: skip


RANKS = [record for rank, compute in enumerate((1.0, 1.9, 1.2, 1.1)) for record in of_rank(rank, compute)]


def test_overview_has_the_figures_of_the_last_steps(tmp_path: Path) -> None:
    views = views_of(
        [
            started(),
            *(step(number, seconds=1.0 + number) for number in range(1, 6)),
            {"event": "evaluated", "time": 10.0, "step": 5, "loss": 4.25},
        ],
        tmp_path,
    )
    figures, header = views["overview"]["figures"], views["header"]
    assert (
        figures["loss"] == pytest.approx(4.5) and figures["first_loss"] == pytest.approx(4.9) and figures["eval_loss"] == 4.25
    )
    assert figures["tokens"] == 5 * 1024 and figures["step_seconds"] == 4.0
    assert views["overview"]["curve"]["x"] == [1, 2, 3, 4, 5]
    assert header["time_left"] == pytest.approx(5 * 2.0)  # five steps to go, one every two seconds
    assert header["elapsed"] == 10.0 and header["price"] == pytest.approx(20.0 * 10.0 / 20.0)  # $20 for 20 s


def test_undone_steps_are_shown_apart(tmp_path: Path) -> None:
    restored = {"event": "restored", "time": 9.0, "step": 2, "path": "memory", "seconds": 0.5}
    views = views_of([started(), step(1), step(2), step(3), step(4), restored, step(3, loss=1.0)], tmp_path)
    assert views["overview"]["curve"]["x"] == [1, 2, 3] and views["overview"]["figures"]["loss"] == 1.0
    assert views["overview"]["undone"]["x"] == [3, 4]


def test_promise_stands_next_to_the_measured_values(tmp_path: Path) -> None:
    views = views_of([started(), *RANKS, *(step(number, seconds=float(number)) for number in range(1, 8))], tmp_path)
    rows = {row["name"]: row for row in views["promise"]["rows"]}
    assert (
        rows["step time"] | {"planned": 2.0, "low": 1.5, "high": 3.0, "measured": 5.0, "count": 5} == rows["step time"]
    )  # of steps 3 to 7
    assert rows["tokens/s"]["low"] == pytest.approx(512.0 * 2.0 / 3.0) and rows["memory of the fullest rank"]["measured"] == 150
    parts = {row["name"]: (row["planned"], row["measured"]) for row in views["promise"]["parts"]}
    # Rank 1 waited least; its parts are scaled from 2 s to the median step of 5 s.
    assert parts["compute"] == (pytest.approx(1.6), pytest.approx(1.9 * 2.5)) and parts["data"] == (
        pytest.approx(0.4),
        pytest.approx(0.1 * 2.5),
    )
    memory = {row["name"]: (row["planned"], row["measured"]) for row in views["promise"]["memory"]}
    assert memory["parameters"] == (100.0, 103.0) and memory["activations"] == (60.0, 5.0)


def test_ranks_are_drawn_along_the_axes_of_the_layout(tmp_path: Path) -> None:
    failure = {
        "event": "failure_noticed",
        "time": 3.0,
        "number": 1,
        "cause": "died",
        "message": "rank 2 died",
        "rank": 2,
        "step": 1,
    }
    views = views_of([started(), *RANKS, step(1), failure], tmp_path)
    ranks = views["ranks"]
    assert [(axis["name"], axis["size"]) for axis in ranks["axes"] if axis["size"] > 1] == [("data", 2), ("tensor", 2)]
    metrics = {metric["name"]: metric["values"] for metric in ranks["metrics"]}
    assert metrics["computing"] == pytest.approx([1.0, 1.9, 1.2, 1.1]) and metrics["waiting for others"] == pytest.approx(
        [1.0, 0.1, 0.8, 0.9]
    )
    assert metrics["memory"] == [105, 106, 107, 108] and metrics["failures"] == [0, 0, 1, 0]
    assert ranks["hosts"] == ["node-0", "node-0", "node-1", "node-1"]
    story = views["rank"]
    assert (
        story["place"] == {"pipeline": 0, "data": 0, "shard": 0, "context": 0, "tensor": 1}
        and story["starts"][0]["host"] == "node-0"
    )


def test_the_pipeline_is_drawn_as_the_schedule_orders_it(tmp_path: Path) -> None:
    layout = started()["layout"] | {"pipeline": 4, "data": 1, "tensor": 1}
    pipeline = views_of([started(layout=layout, accumulation=8)], tmp_path)["pipeline"]
    assert len(pipeline["rows"]) == 4 and all(len(row) == 16 for row in pipeline["rows"])
    assert pipeline["bubble"] == pytest.approx(3 / 11)  # 1F1B: (p - 1) / (m + p - 1)
    own = views_of([started(layout=layout | {"schedule_file": "/etc/passwd"}, accumulation=8)], tmp_path)["pipeline"]
    assert "rows" not in own and "layout.schedule_file" in own["reason"]
    many = views_of([started(layout=layout | {"pipeline": 10_000}, accumulation=10**9)], tmp_path)["pipeline"]
    assert "rows" not in many and "too many" in many["reason"]


def test_time_that_jumps_back_counts_for_nothing(tmp_path: Path) -> None:
    views = views_of([started(1000.0), step(1, 1002.0), step(2, 5.0), step(3, 7.0)], tmp_path)
    assert views["header"]["elapsed"] == 0.0
    times = views["failures"]["progress"]["x"]
    assert times == sorted(times)


def test_runs_are_compared_by_curves_and_run_files(tmp_path: Path) -> None:
    same = "[train]\nbatch = 8\nsteps = 10\n[watch]\npage = true\n"
    write_run(
        tmp_path / "a", [started(), *(step(number) for number in range(1, 6))], same + "[optimizer]\nlearning_rate = 1e-3\n"
    )
    write_run(
        tmp_path / "b",
        [started(), *(step(number, tokens=2048) for number in range(1, 4))],
        same.replace("true", "false") + '[optimizer]\nlearning_rate = 2e-3\nname = "muon"\n',
    )
    with serving(tmp_path) as client:
        both = client.get("/api/compare?run=a&run=b&axis=tokens").json
        assert [run["curve"]["x"] for run in both["runs"]] == [[1024, 2048, 3072, 4096, 5120], [2048, 4096, 6144]]
        assert both["differences"] == [
            {"key": "optimizer.learning_rate", "values": ["0.001", "0.002"]},
            {"key": "optimizer.name", "values": [None, "muon"]},
        ]
        assert client.get("/api/compare?run=a&run=missing").status == 404
        rows = client.get("/api/runs").json["runs"]
        assert {row["name"]: row["step"] for row in rows} == {"a": 5, "b": 3}


def test_a_list_of_runs_needs_only_the_ends_of_their_events(tmp_path: Path) -> None:
    write_run(
        tmp_path / "done",
        [
            started(),
            *(step(number) for number in range(1, 2000)),
            {"event": "evaluated", "time": 9.0, "step": 1999, "loss": 1.5},
            {"event": "finished", "time": 9.0, "step": 1999},
        ],
    )
    write_run(tmp_path / "broken", [started(), step(1), {"event": "worker_failed", "time": 9.0, "rank": 0, "reason": "x"}])
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "run.toml").write_text("")
    with serving(tmp_path) as client:
        rows = {row["name"]: row for row in client.get("/api/runs").json["runs"]}
    assert rows["done"]["eval_loss"] == 1.5
    assert rows["done"]["state"] == "finished" and rows["done"]["step"] == 1999 and rows["done"]["steps"] == 10
    assert rows["broken"]["state"] == "failed" and rows["new"]["state"] == "interrupted" and rows["new"]["loss"] is None
