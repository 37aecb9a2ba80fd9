"""A plan on the terminal: everything a person asks about it, in the width there is."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from io import StringIO
from typing import Any

import plans
import pytest
from rich.console import Console

from phalanx.dashboard.numbers import dollars, energy, short_duration
from phalanx.dashboard.plan_text import bar, days, interval, show_plan, show_solution
from phalanx.planning.report import report_of, run_file_tables
from phalanx.planning.search.candidate import SearchResult
from phalanx.planning.solve import SolveReport, WhatIf
from phalanx.spec.layout import Layout


def shown(found: SearchResult | None = None, width: int = 100, **hardware: Any) -> str:
    out = StringIO()
    report = report_of(plans.run(), plans.hardware(**hardware), found or plans.found())
    show_plan(Console(file=out, width=width, highlight=False), report)
    return out.getvalue()


def test_plan_shows_winner_intervals_memory_step_and_reasons() -> None:
    text = shown(width=140)
    lines = [line.strip("│ ") for line in text.splitlines()]

    def row(*words: str) -> bool:
        return any(all(word in line for word in words) for line in lines)

    assert row("llama3-405b", "406B parameters", "16,384 × H100 SXM in 2,048 nodes")
    assert row("374,400 legal layouts evaluated, 20,000 of them one by one, in 750 ms of CPU time")
    assert row("step", "5.00 s", "4.00 – 6.00 s") and row("speed", "3.36M tok/s", "2.80M – 4.19M")
    assert row("MFU", "42.0%", "35.0% – 52.5%") and row("memory", "61.0 GiB", "of 79.6 GiB")
    assert row("goodput", "90.0%", "saving every 5 min 28 s") and row("with failures", "60.0 d", "48.0 – 72.0 d")
    assert row("device-hours", "23.6M") and row("price", "$47.2M", "$37.8M – $56.6M") and row("energy", "30.6 GWh")
    assert row("activations", "36.0 GiB", "█") and row("free", "18.6 GiB") and row("pipeline bubble", "500 ms", "10.0%")
    assert row("PP8 DP2 FSDP128 TP8+SP", "full", "5.60 s", "+12.0%", "45.0 GiB", "$52.9M", "computing +600 ms")
    assert row("driver and fragmentation", "4.0 GiB") and row("layout.shard=64 layout.tensor=16")
    assert row("TP16", "leaves the NVLink island, +38 % exposed communication")
    assert row("Inside a node: tensor groups of 8.") and row("Nothing is known of the switches")
    assert "pipeline rank 0, the fullest" in text


def test_plan_lists_runners_up_on_a_narrow_terminal() -> None:
    lines = [line.strip() for line in shown(width=80).splitlines()]
    place = lines.index("PP8 DP2 FSDP128 TP8+SP")
    assert lines[place + 1].startswith("5.60 s (+12.0%), 45.0 GiB, $52.9M, micro-batch 1, recompute full, more:")
    assert lines[place + 2] == "computing +600 ms"


def test_plan_shows_the_fraction_of_recomputed_blocks() -> None:
    found = plans.found()
    half = replace(found.runners_up[0], recompute_every=2)
    text = shown(replace(found, runners_up=(half,), best=replace(found.best, recompute="full", recompute_every=3)))
    assert "full 1/2" in text and "full 1/3" in text and "recompute_every = 3" in text
    assert "recompute full 1/2" in shown(replace(found, runners_up=(half,)), width=80)


@pytest.mark.parametrize("width", [100, 80, 60, 140])
def test_plan_fits_the_terminal_and_keeps_tables_whole(width: int) -> None:
    lines = shown(width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert any('schedule = "interleaved-1f1b"' in line for line in lines)
    assert any("$37.8M – $56.6M" in line for line in lines)


def test_plan_marks_what_does_not_fit_and_omits_what_is_unknown() -> None:
    alone = plans.option(
        layout=Layout(data=1), capacity=40 * plans.GIB, price=None, energy=None, mfu=None, save_every=None, goodput=1.0
    )
    found = replace(plans.found(), best=alone, runners_up=(), alternatives=(), considered=1, fitting=0, curve=())
    text = shown(found, failures=None)
    assert "one device on 1 of the devices  DOES NOT FIT" in text and "missing" in text and "21.0 GiB" in text
    assert "the run file's own layout" in text and "it does not fit" in text
    assert "price" not in text and "goodput" not in text and "runners-up" not in text and "why not" not in text


def test_plan_tables_are_toml() -> None:
    table = tomllib.loads(run_file_tables(plans.found().best))
    assert table["layout"]["shard"] == 128 and table["memory"] == {"recompute": "none", "offload": "none", "compile": False}


@pytest.mark.parametrize("width", [60, 80, 96, 100, 120])
def test_bars_are_as_long_as_the_terminal_has_room(width: int) -> None:
    found = plans.found()
    split = dict.fromkeys(found.best.split, 0.0) | {"compute": 0.8, "pipeline": 0.2}  # a long bar, and the longest label
    text = shown(replace(found, best=replace(found.best, seconds=1.0, split=split)), width=width)
    row = next(line for line in text.splitlines() if "computing" in line and "80.0%" in line)
    assert "█" in row and "…" not in row


def test_bars_and_numbers() -> None:
    assert [bar(part, 4) for part in (0, 1e-9, 0.25, 0.53125, 1, 7)] == ["", "▏", "█", "██▏", "████", "████"]
    assert [days(value) for value in (54.04, 1.5, 0.01)] == ["54.0 d", "1 d 12 h", "14 min 24 s"]
    assert interval([0.9, 1.2], short_duration) == "900 ms – 1.20 s" and interval([1.0, 1.2], short_duration) == "1.00 – 1.20 s"
    assert interval([1510, 2359], short_duration) == "25 min 10 s – 39 min 19 s" and interval(None, short_duration) == ""
    assert [short_duration(value) for value in (4.977, 0.312, 41e-6, 0.9999, 0.99949, 75.04, 900.0, None)] == [
        "4.98 s", "312 ms", "41.0 µs", "1.00 s", "999 ms", "75.0 s", "15 min 00 s", "–",
    ]  # fmt: skip
    assert (dollars(61.93e6), dollars(None), energy(7.67e13), energy(None)) == ("$61.9M", "–", "21.3 GWh", "–")


def test_solution_shows_its_plan_and_what_would_change() -> None:
    out = StringIO()
    change = WhatIf(name="twice", sentence="With twice the devices: 1.90 × the tokens a second.", faster=1.9)
    solution = SolveReport(
        what="batch",
        value=512,
        sentence="The batch that pays is 512 sequences.",
        tried=((256, 1.5e6), (512, 2.5e6)),
        what_if=(change,),
        plan=report_of(plans.run(), plans.hardware(), plans.found()),
    )
    show_solution(Console(file=out, width=100, highlight=False), solution)
    lines = out.getvalue().splitlines()
    assert lines[0] == "The batch that pays is 512 sequences."
    assert any("512" in line and "2.50M tok/s" in line for line in lines) and any("1.90 × the tokens" in line for line in lines)
    assert any("4.00 – 6.00 s" in line for line in lines)
