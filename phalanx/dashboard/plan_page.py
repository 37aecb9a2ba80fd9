"""Writes a plan as one interactive HTML page: hover for values, click a layout for its promise and tables, sort and filter candidates, choose
whose bars are drawn. `phalanx plan --html` calls it.

The page contains plan.css and plan.js and loads nothing: it works from a mail attachment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from phalanx.dashboard.numbers import count, dollars, percent, short_duration, size
from phalanx.dashboard.plan_picture import (
    MEMORY,
    OTHER_COLOR,
    STEP,
    candidates_by_role,
    compared,
    cost_chart,
    long_unit,
    memory_chart,
    memory_unit,
    step_unit,
)
from phalanx.dashboard.plan_text import SHORTHAND, days, interval, promise, savings_label, search_summary
from phalanx.planning.report import MEMORY_LABELS, PART_LABELS, PlanReport, keys_to_change, run_file_tables
from phalanx.planning.search.candidate import Candidate

_COMMUNICATION = ("tensor", "context", "expert", "data", "pipeline")


def page(report: PlanReport) -> str:
    """The whole HTML file."""
    run, hardware, best = report.run, report.hardware, report.best
    title = f"{report.model_name} on {hardware.gpus:,} × {hardware.gpu.name}"
    search = search_summary(report)
    head = (
        f"{count(run.model.parameters())} parameters, {run.batch:,} sequences of {run.train.sequence_length:,} tokens a step, "
        f"{run.steps:,} steps, {count(report.tokens)} tokens. {search[0].upper()}{search[1:]}."
    )
    memory, step, unit = memory_unit(best.bytes)[0], step_unit(best.seconds)[0], long_unit(best.expected_days)[1]
    # A "<" in the data could close the script element.
    data = json.dumps(page_data(report)).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>
<style>{_file("plan.css")}</style></head><body>
<h1>{escape(title)}</h1><p class="muted">{escape(head)}</p>
<h2 id="name">{escape(best.name)}</h2>
<div class="two"><table id="promise">{_rows(promise(best))}</table><div><pre id="toml">{escape(run_file_tables(best))}</pre>
<p><button id="copy">copy for the run file</button></p></div></div>
{_section("why this one", report.why)}
<div class="two"><div><h2>memory of the fullest rank, {memory}</h2><div id="memory"></div></div>
<div><h2>a step, {step}; thin line: P10–P90</h2><div id="step"></div></div>
<div><h2>memory against time</h2><div id="trade"></div></div><div><h2>{unit} against cost</h2><div id="cost"></div></div></div>
{_why_not(report)}
<h2>all candidates</h2><p class="tools"><input id="filter" type="search" placeholder="filter, such as: TP8 selective" aria-label="filter">
<label><input id="fitting" type="checkbox"> only those that fit</label> <span id="count" class="muted"></span></p>
<div class="scroll"><table id="candidates"><thead><tr id="head"></tr></thead><tbody id="body"></tbody></table></div>
<p class="muted">{escape(SHORTHAND)}</p>
{_section("placement", report.placement.lines)}
{_section("assumed", report.assumptions)}
<div id="tip" role="tooltip"></div>
<script type="application/json" id="plan">{data}</script>
<script>{_file("plan.js")}</script>
</body></html>
"""


def _file(name: str) -> str:
    return files("phalanx.dashboard").joinpath(name).read_text(encoding="utf-8")


def page_data(report: PlanReport) -> dict[str, Any]:
    """The JSON that plan.js reads: every candidate once, under the first of its roles."""
    best, roles, drawn = report.best, candidates_by_role(report), [run_file_tables(candidate) for candidate in compared(report)]
    candidates, tables = [candidate for _, candidate in roles.values()], list(roles)
    return {
        "candidates": [_candidate(candidate, role) | {"shown": key in drawn} for key, (role, candidate) in roles.items()],
        "columns": [{"name": name, "help": text} for name, text, *_ in _columns(best)],
        "capacity": best.capacity,
        "capacity_text": size(best.capacity),
        "units": {"memory": memory_unit(best.bytes)[1], "step": step_unit(best.seconds)[1]},
        "why_not": [
            None if other.candidate is None else tables.index(run_file_tables(other.candidate)) for other in report.alternatives
        ],
        "trade": memory_chart(report, candidates),
        "cost": cost_chart(report, candidates),
    }


def _candidate(candidate: Candidate, role: str) -> dict[str, Any]:
    memory = {name: value for name, value in candidate.memory.items() if value > 0}
    step = {name: value for name, value in candidate.split.items() if value > 0}
    return {
        "name": candidate.name,
        "role": role,
        "fits": candidate.fits,
        "toml": run_file_tables(candidate),
        "promise": [list(row) for row in promise(candidate)],
        "memory": {
            "parts": [_part(name, value, size(value), MEMORY_LABELS, MEMORY) for name, value in memory.items()],
            "end": candidate.bytes,
            "text": size(candidate.bytes),
        },
        "step": {
            "parts": [_part(name, value, short_duration(value), PART_LABELS, STEP) for name, value in step.items()],
            "end": candidate.seconds,
            "low": candidate.low,
            "high": candidate.high,
            "between": interval((candidate.low, candidate.high), short_duration),
            "text": short_duration(candidate.seconds),
        },
        "cells": [{"text": text, "sort": sort} for _, _, text, sort in _columns(candidate)],
    }


def _part(name: str, value: float, text: str, labels: Mapping[str, str], colors: Mapping[str, str]) -> dict[str, Any]:
    return {"label": labels.get(name, name), "value": value, "text": text, "color": colors.get(name, OTHER_COLOR)}


def _columns(candidate: Candidate) -> list[tuple[str, str, str, str | float]]:
    """The columns of the table of candidates: name, help text, the text of this candidate, and the value to sort by."""
    bubble = candidate.split.get("bubble", 0.0) / candidate.seconds
    exposed = sum(candidate.split.get(part, 0.0) for part in _COMMUNICATION) / candidate.seconds
    savings, range_ = savings_label(candidate), interval((candidate.low, candidate.high), short_duration)
    return [
        ("layout", "", candidate.name, candidate.name),
        ("micro-batch", "sequences that a replica computes at once", str(candidate.micro_batch), candidate.micro_batch),
        ("recompute", "what the backward pass computes again, to store fewer activations", savings, savings),
        ("step", "seconds from one update of the weights to the next", short_duration(candidate.seconds), candidate.seconds),
        ("P10–P90", "the range in which four of five real steps are expected", range_, candidate.low),
        ("memory", "of the fullest rank", size(candidate.bytes), candidate.bytes),
        ("MFU", "model FLOP/s as a fraction of the peak of the devices", percent(candidate.mfu), candidate.mfu or 0.0),
        ("tokens/s", "of the whole cluster", count(candidate.tokens_per_second), candidate.tokens_per_second),
        ("run", "duration of the whole run, with failures", days(candidate.expected_days), candidate.expected_days),
        ("price", "of the whole run, with failures", dollars(candidate.price), candidate.price or 0.0),
        ("bubble", "fraction of the step in which pipeline ranks wait for each other", percent(bubble), bubble),
        ("exposed", "fraction of the step for communication that computation does not hide", percent(exposed), exposed),
    ]


def _why_not(report: PlanReport) -> str:
    if not report.alternatives:
        return ""
    cells = [
        (other.name, other.reason, "" if other.candidate is None else keys_to_change(report.best, other.candidate))
        for other in report.alternatives
    ]
    help_text = (
        "Click a row to see the layout at the top with its tables. The last column has the keys to set in a run file that has "
        "the winner's tables."
    )
    return f'<h2>why not</h2><p class="muted">{help_text}</p><table id="why-not">{_rows(cells)}</table>'


def _section(title: str, lines: Sequence[str]) -> str:
    return f"<h2>{escape(title)}</h2>" + "".join(f"<p>{escape(line)}</p>" for line in lines) if lines else ""


def _rows(rows: Sequence[Sequence[str]]) -> str:
    return "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
