"""The displays, read back from the console they write to."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from phalanx.dashboard.progress import Display, LiveDisplay, Pace, display, sparkline
from phalanx.events.records import (
    CheckpointDamaged,
    Evaluated,
    Event,
    Finished,
    Restored,
    Saved,
    StepSkipped,
    Stopped,
    Warned,
    WeightsLoaded,
    WorkerFailed,
    WorkerStarted,
)

Make = Callable[..., Any]

OTHERS: list[tuple[Event, str]] = [
    (Restored(step=99, path="runs/a/step-99", seconds=0.31), "restored step 99 from step-99 in 0.3 s"),
    (
        StepSkipped(step=7, samples=56, loss=math.nan, grad_norm=math.inf, in_a_row=2),
        "step 7 skipped: loss nan, gradient norm inf (2 in",
    ),
    (Evaluated(step=5, loss=2.4, tokens=100, seconds=1.4), "step 5  held-out loss 2.4000  1.4 s"),
    (WeightsLoaded(path="models/[llama]", seconds=2.5), "loaded initial weights from models/[llama] in 2.5 s"),
    (Saved(step=5, path="runs/a/step-5", bytes=40_000_000, seconds=0.2), "step 5  saved step-5  38.1 MiB in 0.2 s"),
    (
        CheckpointDamaged(path="a/step-6", reason="[red]3[/red] bytes of 5"),
        "step-6 is damaged and was skipped: [red]3[/red] bytes of 5",
    ),
    (Warned(message="disk [almost] full [/]"), "warning: disk [almost] full [/]"),
    (WorkerFailed(rank=2, reason="killed by signal 9"), "rank 2 failed: killed by signal 9"),
    (WorkerFailed(rank=None, reason="no answer"), "a worker failed: no answer"),
    (Stopped(step=130, reason="SIGTERM"), "stopped after step 130: SIGTERM"),
    (Stopped(step=130, reason="SIGTERM", saved=False), "stopped after step 130: SIGTERM; nothing was saved"),
]


def plain(steps: int, log_every: int) -> tuple[Display, Callable[[], list[str]]]:
    file = io.StringIO()
    shown = display(Console(file=file, width=80, force_terminal=False), steps, log_every, live=False)
    return shown, lambda: file.getvalue().splitlines()


def test_plain_step_is_one_line_of_80_columns(step: Make, started: Make) -> None:
    shown, lines = plain(steps=300, log_every=1)
    shown.show(started())
    shown.show(step(119, loss=2.34111, tokens_per_second=12_345.0, time=238.0))
    shown.show(step(120, loss=2.34111, tokens_per_second=12_345.0, time=240.0))
    assert lines()[0] == "training 3.35M parameters on 4 CPU ranks in fp32, 2 × 4 sequences per rank and step"
    assert lines()[1] == "step 119/300  loss 2.3411  12.3k tok/s  mfu 41.2%  norm 0.81  eta –"
    assert lines()[2] == "step 120/300  loss 2.3411  12.3k tok/s  mfu 41.2%  norm 0.81  eta 6 min 00 s"
    assert len(lines()[2]) <= 80


def test_plain_shows_the_first_every_nth_and_the_last(step: Make) -> None:
    shown, lines = plain(steps=47, log_every=20)
    for number in range(3, 48):
        shown.show(step(number))
    assert [int(re.match(r"step +(\d+)/47", line)[1]) for line in lines()] == [3, 20, 40, 47]  # type: ignore[index]


def test_plain_lines_never_wrap() -> None:
    shown, lines = plain(steps=10, log_every=1)
    shown.show(Warned(message="word " * 60))
    assert len(lines()) == 1


@pytest.mark.parametrize(("event", "text"), OTHERS)
@pytest.mark.parametrize("live", [False, True])
def test_other_events_are_lines_in_both_displays(event: Event, text: str, live: bool) -> None:
    file = io.StringIO()
    shown = display(Console(file=file, width=120, force_terminal=live, color_system=None), 300, 1, live=live)
    shown.show(event)
    shown.close()
    assert text in file.getvalue()


def test_some_events_are_not_worth_a_line() -> None:
    shown, lines = plain(steps=10, log_every=1)
    shown.show(WorkerStarted(rank=0, host="here", pid=1, device="cpu"))
    shown.show(Finished(step=10))
    shown.close()
    assert lines() == []


def test_warnings_have_their_colour() -> None:
    file = io.StringIO()
    shown = display(Console(file=file, width=80, force_terminal=True, color_system="standard"), 10, 1, live=False)
    shown.show(StepSkipped(step=7, samples=56, loss=math.nan, grad_norm=1.0, in_a_row=1))
    assert "\x1b[33mstep 7 skipped" in file.getvalue()


def test_lines_on_a_terminal_break_between_words(started: Make) -> None:
    """In a file, every event is one line."""
    texts = {}
    for terminal in (True, False):
        file = io.StringIO()
        display(Console(file=file, width=40, force_terminal=terminal, color_system=None), 10, 1, live=False).show(started())
        texts[terminal] = file.getvalue()
    rows = texts[True].splitlines()
    assert len(rows) > 1 and all(len(row) <= 40 for row in rows)
    assert texts[False].splitlines() == [" ".join(row.strip() for row in rows)]


def last_panel(output: str) -> list[str]:
    """The rows of the terminal's last frame, as a person sees them."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output).rstrip().splitlines()[-4:]


def test_live_panel_holds_everything_in_80_columns(step: Make, started: Make) -> None:
    file = io.StringIO()
    shown = display(Console(file=file, width=80, force_terminal=True), 300, 1, live=True)
    assert isinstance(shown, LiveDisplay)
    shown.show(started())
    for number in range(1, 121):
        shown.show(step(number))
    shown.show(Evaluated(step=120, loss=2.4012, tokens=1, seconds=1.0, time=1240.0))
    shown.close()
    panel = last_panel(file.getvalue())
    text = "\n".join(panel)
    assert all(len(row) <= 80 - len("^C") for row in panel), "what a terminal shows of Ctrl-C would begin a new line"
    assert "…" not in text
    for part in (
        "step 120/300", "40.0%", "4 min 00 s, 6 min 00 s left", "loss     8.8000", "held-out 2.4012", "500 tok/s",
        "1.24 TFLOP/s", "MFU      41.2%", "norm     0.81", "3.00e-04", "3.0 GiB", "█▇",
    ):  # fmt: skip
        assert part in text, part
    assert "step   1/300" not in file.getvalue()  # steps move the numbers, they do not scroll


@pytest.mark.parametrize("live", [False, True])
def test_odd_values_never_stop_the_display(step: Make, live: bool) -> None:
    file = io.StringIO()
    shown = display(Console(file=file, width=40, force_terminal=live), 0, 0, live=live)
    odd = {"loss": math.nan, "learning_rate": math.inf, "grad_norm": -math.inf, "tokens_per_second": math.nan}
    shown.show(step(0, **odd, mfu=None, flops_per_second=math.inf, memory=-1, seconds=math.nan, time=0.0))
    shown.show(step(1, mfu="nan", time=-5.0))
    shown.close()
    assert "nan" in file.getvalue() or live


def test_display_can_be_closed_before_anything_happened() -> None:
    file = io.StringIO()
    display(Console(file=file, width=80, force_terminal=True), 10, 1, live=True).close()
    assert "waiting for the first step" in file.getvalue()


def test_time_left_counts_what_happens_between_steps(step: Make, started: Make) -> None:
    pace = Pace()
    assert pace.left(10) is None
    pace.add(started(time=0.0))
    pace.add(step(1, seconds=60.0, time=60.0))
    assert pace.left(10) is None  # it may have compiled for a minute
    pace.add(step(2, seconds=2.0, time=65.0))  # three of the five seconds went into an evaluation
    assert pace.left(10) == pytest.approx(8 * 5.0)
    assert pace.elapsed == 65.0
    assert pace.left(2) == 0
    pace.add(started(time=70.0))  # resumed: the first step compiles again
    pace.add(step(3, seconds=60.0, time=130.0))
    assert pace.left(10) is None
    assert pace.left(3) == 0, "the run is complete"


@pytest.mark.parametrize(
    ("values", "bars"),
    [([], ""), ([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 7.0], "▁█"), ([0.0, math.nan, 7.0], "▁ █"), ([math.inf], "")],
)
def test_sparkline(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


def test_sources_and_experts_are_shown_where_there_are_some(step: Make, started: Make) -> None:
    shown, lines = plain(steps=300, log_every=1)
    shown.show(step(120, expert_load=1.2345, tokens_per_second=12_345.0))
    assert "load 1.23" in lines()[0] and len(lines()[0]) <= 80
    each = {"wiki": {"loss": 2.0, "perplexity": 7.389, "tokens": 10}, "code": {"loss": 1.0, "perplexity": 2.718, "tokens": 10}}
    shown.show(Evaluated(step=120, loss=1.5, tokens=20, seconds=1.0, perplexity=4.48, sources=each))
    assert lines()[1:] == [
        "step 120  held-out loss 1.5000  1.0 s",
        "    wiki  loss 2.0000  perplexity 7.39",
        "    code  loss 1.0000  perplexity 2.72",
    ]
    assert "step 120  held-out loss" not in "".join(lines()[2:])
