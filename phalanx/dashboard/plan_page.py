"""A plan as one page to look around in: hover for values, click a layout to see its promise and what to paste, sort the candidates,
choose whose bars are drawn. `phalanx plan --html` calls it with the values that `planning/explain` makes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from phalanx.dashboard.numbers import count, dollars, instant, percent, size
from phalanx.dashboard.plan_page_parts import SCRIPT, STYLE
from phalanx.dashboard.plan_picture import MEMORY, STEP, long_unit
from phalanx.dashboard.plan_text import days, interval, promise, searched_words

_REST = "#d946ef"
_SHOWN = 6
"""Layouts whose bars are drawn at first."""
_COLUMNS = (
    "layout",
    "",
    "micro-batch",
    "recompute",
    "step",
    "P10–P90",
    "memory",
    "MFU",
    "tokens/s",
    "days",
    "price",
    "bubble",
    "exposed communication",
)


def page(told: Mapping[str, Any]) -> str:
    """The whole file."""
    model, cluster, train = told["model"], told["cluster"], told["train"]
    title = f"{model['name']} on {cluster['gpus']:,} × {cluster['gpu']}"
    head = (
        f"{count(model['parameters'])} parameters, {train['batch']:,} sequences of {train['sequence_length']:,} tokens a step, "
        f"{train['steps']:,} steps, {count(train['tokens'])} tokens. {searched_words(told)}."
    )
    why_not = [(one["name"], one["reason"]) for one in told["why_not"]]
    # A text inside a script ends where a tag would end it, so that none may begin.
    data = json.dumps(page_data(told)).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>
<style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1><p class="muted">{escape(head)}</p>
<h2 id="name">{escape(told["best"]["name"])}</h2>
<div class="two"><table id="promise">{_rows(promise(told["best"]))}</table><div><pre id="toml">{escape(told["best"]["toml"])}</pre>
<p><button id="copy">copy for the run file</button></p></div></div>
<div class="two"><div><h2>memory of the fullest rank</h2><div id="memory"></div></div><div><h2>a step; line below: P10–P90</h2><div id="step"></div></div>
<div><h2>what memory buys</h2><div id="trade"></div></div><div><h2>what days cost</h2><div id="cost"></div></div></div>
<h2>candidates</h2><table id="candidates"><thead><tr id="head"></tr></thead><tbody id="body"></tbody></table>
{_part("why this one", told["why"])}
{f'<h2>why not</h2><table id="why-not">{_rows(why_not)}</table>' if why_not else ""}
{_part("placement", told["placement"].get("lines", ()))}
{_part("assumed", told["assumed"])}
<div id="tip"></div>
<script type="application/json" id="plan">{data}</script>
<script>{SCRIPT}</script>
</body></html>
"""


def page_data(told: Mapping[str, Any]) -> dict[str, Any]:
    """What the page's program reads: every option once, in the words that the page shows."""
    named = [("winner", told["best"]), *(("runner-up", other) for other in told["others"])]
    named += [(f"why not {one['name']}", one["option"]) for one in told["why_not"] if one["option"] is not None]
    named += [("trade-off", option) for option in told["curve"]]
    named += [(f"{option['ranks']:,} devices", option) for option in told.get("scaling", ())]
    every: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for role, option in named:
        every.setdefault(option["toml"], (role, option))  # under the first of its names
    options = [option for _, option in every.values()]
    shown = [
        _option(option, role, told["words"]) | {"shown": place < _SHOWN and role in ("winner", "runner-up")}
        for place, (role, option) in enumerate(every.values())
    ]
    return {
        "options": shown,
        "columns": list(_COLUMNS),
        "capacity": told["best"]["capacity"],
        "capacity_text": size(told["best"]["capacity"]),
        "trade": _trade(told, options),
        "cost": _cost(told, options),
    }


def _option(option: Mapping[str, Any], role: str, words: Mapping[str, str]) -> dict[str, Any]:
    memory = [_piece(name, name, value, size(value), MEMORY) for name, value in option["memory"].items() if value > 0]
    step = [
        _piece(name, words.get(name, name), value, instant(value), STEP) for name, value in option["split"].items() if value > 0
    ]
    return {
        "name": option["name"],
        "role": role,
        "toml": option["toml"],
        "promise": [list(row) for row in promise(option)],
        "memory": {"parts": memory, "end": option["bytes"], "text": size(option["bytes"])},
        "step": {
            "parts": step,
            "end": option["seconds"],
            "low": option["low"],
            "high": option["high"],
            "between": interval(option["ranges"]["seconds"], instant),
            "text": instant(option["seconds"]),
        },
        "cells": _cells(option, role),
    }


def _piece(name: str, words: str, value: float, text: str, colours: Mapping[str, str]) -> dict[str, Any]:
    return {"words": words, "value": value, "text": text, "colour": colours.get(name, _REST)}


def _cells(option: Mapping[str, Any], role: str) -> list[dict[str, Any]]:
    exposed = sum(option["split"].get(part, 0.0) for part in ("tensor", "context", "expert", "data", "pipeline"))
    values: list[tuple[str, Any]] = [
        (option["name"], option["name"]),
        (role, role),
        (str(option["micro_batch"]), option["micro_batch"]),
        (option["recompute"], option["recompute"]),
        (instant(option["seconds"]), option["seconds"]),
        (interval(option["ranges"]["seconds"], instant), option["low"]),
        (size(option["bytes"]), option["bytes"]),
        (percent(option["mfu"]), option["mfu"] or 0.0),
        (count(option["tokens_per_second"]), option["tokens_per_second"]),
        (days(option["expected_days"]), option["expected_days"]),
        (dollars(option["price"]), option["price"] or 0.0),
        (
            percent(option["split"].get("bubble", 0.0) / option["seconds"]),
            option["split"].get("bubble", 0.0) / option["seconds"],
        ),
        (percent(exposed / option["seconds"]), exposed / option["seconds"]),
    ]
    return [{"text": text, "sort": sort} for text, sort in values]


def _trade(told: Mapping[str, Any], options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    line = [option["toml"] for option in told["curve"]]
    points = [
        {
            "x": option["bytes"] / 2**30,
            "y": option["seconds"],
            "text": f"{option['name']}\n{size(option['bytes'])}, {instant(option['seconds'])} ({interval(option['ranges']['seconds'], instant)})",
            "option": place,
            "line": option["toml"] in line,
        }
        for place, option in enumerate(options)
        if option["ranks"] == told["best"]["ranks"]
    ]
    return {"points": points, "x": "memory, GiB", "y": "step, seconds", "prefix": "", "limit": told["best"]["capacity"] / 2**30}


def _cost(told: Mapping[str, Any], options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    key, name, form = ("price", "price", dollars) if told["best"]["price"] is not None else ("gpu_hours", "device-hours", count)
    scale, unit = long_unit(told["best"]["expected_days"])
    sizes = [option["toml"] for option in told.get("scaling", ())]
    points = [
        {
            "x": scale * option["expected_days"],
            "y": option[key],
            "text": f"{option['name']} on {option['ranks']:,}\n{days(option['expected_days'])}, {form(option[key])}",
            "option": place,
            "line": option["toml"] in sizes,
        }
        for place, option in enumerate(options)
        if option[key] is not None
    ]
    return {"points": points, "x": f"{unit}, failures considered", "y": name, "prefix": "$" if key == "price" else ""}


def _part(title: str, lines: Sequence[str]) -> str:
    return f"<h2>{escape(title)}</h2>" + "".join(f"<p>{escape(line)}</p>" for line in lines) if lines else ""


def _rows(rows: Sequence[Sequence[str]]) -> str:
    return "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
