"""Summaries of imaginary runs, against numbers worked out by hand."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from phalanx.dashboard.summary import Summary
from phalanx.events.records import Evaluated, Finished, Restored, Saved, StepSkipped, Stopped, WorkerFailed
from phalanx.spec.plan import Promise

Make = Callable[..., Any]


def rendered(summary: Any, run_dir: Path) -> str:
    file = io.StringIO()
    summary.render(Console(file=file, width=80, force_terminal=False), run_dir)
    return file.getvalue()


def test_run_from_beginning_to_end(tmp_path: Path, step: Make, started: Make) -> None:
    speeds = [10.0, 500.0, 400.0, 600.0]  # the first warms up
    events = [
        started(steps=4, ranks=2),
        *(step(n + 1, tokens_per_second=speed, mfu=speed / 1000) for n, speed in enumerate(speeds)),
        Evaluated(step=2, loss=9.5, tokens=1, seconds=1.0),
        Evaluated(step=4, loss=9.1, tokens=1, seconds=1.0),
        Saved(step=4, path="runs/a/step-4", bytes=1, seconds=1.0),
        Finished(step=4, time=1030.0),
    ]
    summary = Summary(events)
    assert (summary.steps, summary.planned, summary.finished, summary.failure) == (4, 4, True, None)
    assert (summary.first_loss, summary.loss, summary.eval_loss) == (9.99, 9.96, 9.1)
    assert (summary.tokens, summary.tokens_per_second, summary.mfu) == (4000, 500.0, 0.5)
    assert (summary.seconds, summary.ranks, summary.steps_skipped) == (30.0, 2, 0)
    (tmp_path / "loss.png").touch()
    text = rendered(summary, tmp_path)
    for part in (
        "finished 4 steps",
        "9.9900 → 9.9600, held-out 9.1000",
        "500 tokens/s on 2 ranks, MFU 50.0%, 30 s",
        "phalanx generate",
    ):
        assert part in text, part
    assert all(len(row) <= 80 for row in text.splitlines())


def test_resumed_run_counts_each_step_once(step: Make, started: Make) -> None:
    events = [
        started(),
        *(step(n) for n in range(1, 3)),
        StepSkipped(step=3, samples=1, loss=math.nan, grad_norm=1.0, in_a_row=1),
        *(step(n) for n in range(3, 8)),
        WorkerFailed(rank=0, reason="lost power"),
        started(time=5000.0),
        Restored(step=5, path="a", seconds=1.0, time=5001.0),
        *(step(n, tokens_per_second=float(n), mfu=None, time=5000.0 + n) for n in range(6, 10)),
        Stopped(step=9, reason="SIGTERM", time=5020.0),
    ]
    summary = Summary(events)
    assert (summary.steps, summary.tokens, summary.steps_skipped) == (9, 9000, 1)
    assert summary.tokens_per_second == 8.0  # of 7, 8, 9: the last launch without its first step
    assert summary.mfu is None
    assert (summary.seconds, summary.finished, summary.failure) == (20.0, False, None)
    assert "stopped after step 9 of 300" in rendered(summary, Path("runs/a"))


def test_failed_run_says_why(step: Make, started: Make) -> None:
    text = rendered(Summary([started(), step(1), WorkerFailed(rank=1, reason="[oom] killed")]), Path("runs/a b"))
    assert "failed after step 1 of 300" in text
    assert "[oom] killed" in text


def test_only_step_of_a_launch_is_its_speed(step: Make, started: Make) -> None:
    assert Summary([started(), step(1)]).tokens_per_second == 500.0


def test_skipped_last_step_has_been_reached(step: Make, started: Make) -> None:
    skipped = StepSkipped(step=2, samples=1, loss=math.nan, grad_norm=1.0, in_a_row=1)
    assert Summary([started(), step(1), skipped]).steps == 2


@pytest.mark.parametrize("events", [[], ["started"]])
def test_run_without_steps(events: list[str], started: Make) -> None:
    summary = Summary([started() for _ in events])
    assert (summary.steps, summary.loss, summary.tokens_per_second, summary.tokens) == (0, None, None, 0)
    assert "events.jsonl" in rendered(summary, Path("runs/a"))


def test_json_has_no_numbers_that_json_lacks(step: Make, started: Make) -> None:
    events = [started(), step(1, loss=2.0), Evaluated(step=1, loss=math.inf, tokens=1, seconds=1.0)]
    table = Summary(events).to_json(Path("runs/a"))
    assert {"steps", "loss", "eval_loss", "tokens", "tokens_per_second", "mfu", "steps_skipped", "run_dir"} <= table.keys()
    assert json.loads(json.dumps(table, allow_nan=False))["eval_loss"] == "inf"
    assert table["run_dir"] == "runs/a"


def test_sources_and_experts_are_summed_up(tmp_path: Path, step: Make, started: Make) -> None:
    each = {"wiki": {"loss": 2.0, "perplexity": 7.4, "tokens": 1}, "code": {"loss": 1.0, "perplexity": math.inf, "tokens": 1}}
    steps = [step(n, expert_load=3.0 if n <= 10 else 1.25) for n in range(1, 31)]
    summary = Summary([started(), *steps, Evaluated(step=30, loss=1.5, tokens=2, seconds=1.0, sources=each)])
    assert summary.expert_load == 1.25, "what counts is where the run has come to"
    text = rendered(summary, tmp_path)
    assert "wiki 2.0000, code 1.0000" in text and "1.25 × the mean load" in text
    table = json.loads(json.dumps(summary.to_json(tmp_path), allow_nan=False))
    assert table["eval_sources"]["code"] == {"loss": 1.0, "perplexity": "inf", "tokens": 1}
    assert Summary([started(), step(1)]).expert_load is None


def test_the_promise_stands_beside_what_was_measured(tmp_path: Path, step: Make, started: Make) -> None:
    promise = Promise(seconds=1.5, low=1.2, high=1.875, tokens_per_second=650.0, total_memory=2.0 * 2**30, memory={})
    steps = [step(1, seconds=9.0), *(step(n, seconds=2.0, memory=n * 2**30) for n in (2, 3, 4))]
    summary = Summary([started(promise=promise), *steps])
    assert summary.promise is not None
    assert (summary.step_seconds, summary.promise.seconds) == (2.0, 1.5), "the first step warms up"
    assert (summary.memory, summary.promise.total_memory) == (4 * 2**30, 2.0 * 2**30)
    text = rendered(summary, tmp_path)
    assert "2.00 s, promised 1.50 s (1.20 s to 1.88 s), 650 tokens/s" in text
    assert "4.0 GiB, promised 2.0 GiB" in text
    table = summary.to_json(tmp_path)
    assert table["promised_step_seconds"] == 1.5 and table["promised_tokens_per_second"] == 650.0


def test_what_promised_nothing_shows_nothing(step: Make, started: Make) -> None:
    summary = Summary([started(), step(1), step(2)])
    assert (summary.promise, summary.step_seconds) == (None, 2.0)
    assert "promised" not in rendered(summary, Path("runs/a"))
