"""`phalanx trace` of real runs, and what it answers to what it cannot do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import Workshop

from phalanx.events.records import ClockAligned


def test_a_slow_data_loader_of_one_rank_is_named_in_words_and_in_the_file(workshop: Workshop) -> None:
    workshop.train(
        "layout.data=2",
        "watch.timeline=true",
        "train.steps=30",
        "--run-dir",
        "run",
        "--chaos",
        "delay rank=1 in=data for=150ms from=3",
    )
    ended = workshop.run("trace", "run", "--steps", "10-12", "-o", "trace.json", "--json")
    assert ended.code == 0, ended
    answer = ended.json
    assert answer["late"][0]["rank"] == 1 and answer["late"][0]["phase"] == "loading"
    assert "for rank 1 in" in answer["answer"][0] and "rank 1 is slow in the data loader" in answer["answer"][0]
    assert answer["answer"][0] in " ".join(ended.err.split())
    events = json.loads((workshop.path / "trace.json").read_text())["traceEvents"]
    steps = {event["name"] for event in events if event["ph"] == "X" and event["name"].startswith("step ")}
    assert steps == {"step 10", "step 11", "step 12"}
    late = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert any(event["name"].startswith("rank 1:") and event["dur"] > 50_000 for event in late)  # of a delay of 150 ms
    missing = workshop.run("trace", "run", "--steps", "90-95")
    assert missing.code == 2 and "which has steps 1 to 30" in missing.err


def test_nodes_compare_their_clocks_while_they_record(workshop: Workshop) -> None:
    """Two nodes on one machine have one clock: the offset found over the control plane is zero within its error."""
    workshop.train("layout.data=2", "cluster.nodes=2", "watch.timeline=true", "train.steps=40", "--run-dir", "run")
    found = [event for event in workshop.events("run") if isinstance(event, ClockAligned)]
    assert {(event.node, event.reference) for event in found} in ({(1, 0)}, {(0, 1)})
    assert all(abs(event.offset) <= event.error < 1.0 for event in found)
    answer = workshop.run("trace", "run", "--json").json
    assert answer["ranks"] == 2 and len(answer["steps"]) == 40


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["empty"], "empty is no run directory: it has no events.jsonl"),
        (["plain"], "plain has no timeline: its run did not record one. Train with watch.timeline=true"),
        (["plain", "--steps", "9-3"], "--steps 9-3: write a range such as 100-102, 100- or a single step."),
        (["plain", "-o", "trace.pb"], "-o trace.pb: the name must end with .json or .json.gz."),
    ],
)
def test_what_cannot_be_traced_is_said(workshop: Workshop, words: list[str], said: str) -> None:
    for name in ("empty", "plain"):
        Path(workshop.path / name).mkdir()
    (workshop.path / "plain" / "events.jsonl").touch()
    ended = workshop.run("trace", *words)
    assert ended.code == 2 and said in " ".join(ended.err.split()), ended
