"""The figures of runs for Prometheus: correct text, and the numbers that a straightforward look at the events gives."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
from openmetrics import samples
from watch_runs import Record, serving, started, step, write_run

from phalanx.watch.followed_run import RunFolder
from phalanx.watch.open_metrics import CONTENT_TYPE, exposition, metric_families
from phalanx.watch.page_access import Access

EVENTS: list[Record] = [
    started(0.0),
    *(step(number) for number in range(1, 5)),
    {"event": "saved", "time": 8.5, "step": 4, "path": "checkpoints/step-00000004", "bytes": 5000, "seconds": 0.5},
    step(5, expert_load=1.5),
    {"event": "failure_noticed", "time": 11.0, "number": 1, "cause": "died", "message": "rank 1", "rank": 1, "step": 5},
    {"event": "restored", "time": 12.0, "step": 4, "path": "x", "seconds": 0.1},
    step(5, 14.0, loss=4.4),
    {
        "event": "recovered", "time": 14.1, "failures": [1], "action": "restart", "generation": 1, "ranks": 3, "layout": {"data": 3}, "source": "disk", "step": 4,
        "steps_lost": 1, "noticed": 11.0, "decided": 11.1, "restarted": 12.0, "first_step": 14.0, "seconds": 3.0,
    },
    {"event": "step_skipped", "time": 16.0, "step": 6, "samples": 48, "loss": "nan", "grad_norm": "inf", "in_a_row": 1, "reason": "not finite"},
    {"event": "failure_noticed", "time": 17.0, "number": 2, "cause": "made\nup", "message": "?", "rank": 1, "step": 6},
    step(7, 18.0, loss="nan", grad_norm="inf", mfu=None),
    {"event": "evaluated", "time": 18.5, "step": 7, "loss": 4.1, "tokens": 100, "seconds": 0.1, "sources": {"a": {"loss": 4.0}, "b": {"loss": 4.2}}},
    {"event": "straggling", "time": 19.0, "rank": 2, "node": 0, "step": 7, "factor": 2.0, "message": "slow"},
    {"event": "save_failed", "time": 19.5, "step": 7, "path": "x", "reason": "full"},
    {"event": "finished", "time": 20.0, "step": 7},
]  # fmt: skip


def figures(folder: Path, now: float = 30.0) -> dict[str, Any]:
    """Samples of one run by name, or by name and the label besides the run."""
    text = metrics(folder, now)
    found: dict[str, Any] = {}
    for (name, labels), value in samples(text).items():
        others = [label for key, label in labels if key != "run"]
        found[f"{name}:{others[0]}" if others and name != "phalanx_run_info" else name] = value
    return found


def metrics(folder: Path, now: float = 30.0) -> str:
    runs = RunFolder(folder)
    followed = [run for run in map(runs.get, runs.recent()) if run is not None]
    for run in followed:
        while not run.catch_up(1.0):
            pass
    return exposition(followed, lambda: now)


def test_figures_are_those_of_the_events(tmp_path: Path) -> None:
    seen = figures(write_run(tmp_path / "a", EVENTS))
    taken = [event for event in EVENTS if event["event"] == "step"]
    assert seen["phalanx_tokens_processed_total"] == sum(event["tokens"] for event in taken) == 7 * 1024
    assert seen["phalanx_tokens_trained"] == 6 * 1024, "steps 1 to 5 and 7; one of the two records of step 5 was undone"
    expected = {
        "phalanx_step": 7, "phalanx_planned_steps": 10, "phalanx_ranks": 3, "phalanx_parameters": 1000, "phalanx_eval_loss:all": 4.1,
        "phalanx_eval_loss:b": 4.2, "phalanx_tokens_per_second": 512, "phalanx_step_seconds": 2, "phalanx_learning_rate": 1e-3,
        "phalanx_memory_bytes": 150, "phalanx_steps_skipped_total": 1, "phalanx_failures_total:died": 1, "phalanx_failures_total:other": 1,
        "phalanx_failures_total:hung": 0, "phalanx_recoveries_total": 1, "phalanx_lost_seconds_total": 3, "phalanx_lost_steps_total": 1,
        "phalanx_stragglers_total": 1, "phalanx_checkpoints_saved_total": 1, "phalanx_checkpoints_failed_total": 1, "phalanx_checkpoint_step": 4,
        "phalanx_checkpoint_bytes": 5000, "phalanx_checkpoint_timestamp_seconds": 8.5, "phalanx_checkpoint_age_seconds": 21.5,
        "phalanx_promised_step_seconds:expected": 2, "phalanx_promised_step_seconds:p90": 3, "phalanx_launches_total": 1,
        "phalanx_run_state:finished": 1, "phalanx_run_state:running": 0, "phalanx_last_record_timestamp_seconds": 20, "phalanx_rollbacks_total": 0,
    }  # fmt: skip
    assert {name: seen[name] for name in expected} == expected
    assert math.isnan(seen["phalanx_loss"]) and seen["phalanx_grad_norm"] == math.inf
    assert "phalanx_mfu_ratio" not in seen and "phalanx_expert_load_ratio" not in seen, "the last step has none"


def test_counters_never_fall_while_steps_are_undone(tmp_path: Path) -> None:
    before: dict[str, float] = {}
    for length in range(1, len(EVENTS) + 1):
        seen = figures(write_run(tmp_path / "a", EVENTS[:length]))
        for name, value in seen.items():
            if "_total" in name:
                assert value >= before.get(name, 0.0), f"{name} after {EVENTS[length - 1]}"
                before[name] = value
    assert before["phalanx_tokens_processed_total"] == 7 * 1024


def test_every_run_of_a_folder_has_its_label_even_a_hostile_one(tmp_path: Path) -> None:
    names = ["plain", 'quote"d', "back\\slash", "line\nfeed", "ünïcode", "run} 1\n# EOF"]
    for name in names:
        write_run(tmp_path / name, [started(), step(1)])
    write_run(tmp_path / "broken", []).joinpath("events.jsonl").write_bytes(b'{"event": "step", "step": {}}\n\xff\xfe\n[]\n')
    text = metrics(tmp_path)
    steps = {dict(labels)["run"]: value for (name, labels), value in samples(text).items() if name == "phalanx_step"}
    assert steps == dict.fromkeys(names, 1.0)


def test_a_run_that_is_long_over_is_served_when_it_is_named(tmp_path: Path) -> None:
    for name in ("old", "new"):
        write_run(tmp_path / name, [started(), step(1)])
    os.utime(tmp_path / "old" / "events.jsonl", (1.0, 1.0))
    with serving(tmp_path) as client:
        answer = client.get("/metrics")
        assert answer.status == 200 and answer.headers["content-type"] == CONTENT_TYPE
        assert 'run="new"' in answer.body.decode() and 'run="old"' not in answer.body.decode()
        named = client.get("/metrics?run=old").body.decode()
        assert 'run="old"' in named and 'run="new"' not in named
        assert client.get("/metrics?run=../new").status == 404
    os.utime(tmp_path / "new" / "events.jsonl", (1.0, 1.0))
    with serving(tmp_path / "new") as client:
        assert samples(client.get("/metrics").body.decode())["phalanx_step", (("run", "new"),)] == 1.0


def test_metrics_need_the_token_where_the_page_does(tmp_path: Path) -> None:
    write_run(tmp_path / "a", [started(), step(1)])
    with serving(tmp_path, Access("127.0.0.1", "token-of-the-test")) as client:
        assert client.get("/metrics").status == 401
        assert client.get("/metrics", Authorization="Bearer wrong").status == 401
        assert b"phalanx_step{" in client.get("/metrics", Authorization="Bearer token-of-the-test").body


def test_the_parser_of_prometheus_reads_the_same(tmp_path: Path) -> None:
    parser = pytest.importorskip("prometheus_client.openmetrics.parser", reason="needs prometheus_client")
    write_run(tmp_path / "a", EVENTS)
    write_run(tmp_path / 'b"\\\n', [started(), step(1)])
    text = metrics(tmp_path)
    theirs = {
        (sample.name, tuple(sample.labels.items())): float(sample.value)
        for family in parser.text_string_to_metric_families(text)
        for sample in family.samples
    }
    ours = samples(text)
    assert sorted(map(str, theirs.items())) == sorted(map(str, ours.items())) and len(ours) > 60  # as text: NaN equals nothing


def test_the_documentation_names_every_metric_and_no_other() -> None:
    text = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()
    named = set(re.findall(r"phalanx_[a-z0-9_]+", text))
    suffixes = {"counter": "_total", "info": "_info"}
    served = {family.name + suffixes.get(family.kind, "") for family in metric_families().values()}
    assert named == served
