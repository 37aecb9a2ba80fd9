"""A plan as one page to look around in: hover for values, click a layout to see its promise and what to paste, sort and filter the
candidates, choose whose bars are drawn. `phalanx plan --html` calls it with the values that `planning/explain` makes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from phalanx.dashboard.numbers import count, dollars, percent, short_duration, size
from phalanx.dashboard.plan_page_parts import SCRIPT, STYLE
from phalanx.dashboard.plan_picture import MEMORY, OTHERS, STEP, compared, long_unit, memory_unit, step_unit
from phalanx.dashboard.plan_text import SHORTHAND, days, interval, promise, recomputed, searched_words

_COLUMNS = (
    ("layout", ""),
    ("micro-batch", "sequences that a replica computes at once"),
    ("recompute", "what of the forward pass is computed again in the backward pass, to keep less"),
    ("step", "seconds from one update of the weights to the next"),
    ("P10–P90", "four of five real steps are expected within"),
    ("memory", "of the fullest rank"),
    ("MFU", "model FLOP/s, as a part of what the devices could do at most"),
    ("tokens/s", "of the whole cluster"),
    ("run", "the whole run, failures considered"),
    ("price", "of the whole run, failures considered"),
    ("bubble", "part of the step that pipeline ranks wait for each other"),
    ("exposed", "part of the step that communication takes beyond what computing hides"),
)
"""Of the candidates, each with what it means."""
_EXCHANGE = ("tensor", "context", "expert", "data", "pipeline")


def page(told: Mapping[str, Any]) -> str:
    """The whole file."""
    model, cluster, train, best = told["model"], told["cluster"], told["train"], told["best"]
    title = f"{model['name']} on {cluster['gpus']:,} × {cluster['gpu']}"
    head = (
        f"{count(model['parameters'])} parameters, {train['batch']:,} sequences of {train['sequence_length']:,} tokens a step, "
        f"{train['steps']:,} steps, {count(train['tokens'])} tokens. "
        + (f"{searched_words(told)}." if told["considered"] > 1 else "The run file's own layout, judged as it stands.")
    )
    memory, step = memory_unit(best["bytes"])[0], step_unit(best["seconds"])[0]
    # A text inside a script ends where a tag would end it, so that none may begin.
    data = json.dumps(page_data(told)).replace("<", "\\u003c")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>
<style>{STYLE}</style></head><body>
<h1>{escape(title)}</h1><p class="muted">{escape(head)}</p>
<h2 id="name">{escape(best["name"])}</h2>
<div class="two"><table id="promise">{_rows(promise(best))}</table><div><pre id="toml">{escape(best["toml"])}</pre>
<p><button id="copy">copy for the run file</button></p></div></div>
{_part("why this one", told["why"])}
<div class="two"><div><h2>memory of the fullest rank, {memory}</h2><div id="memory"></div></div>
<div><h2>a step, {step}; thin line: P10–P90</h2><div id="step"></div></div>
<div><h2>what memory buys</h2><div id="trade"></div></div><div><h2>{escape(_cost_title(told))}</h2><div id="cost"></div></div></div>
{_why_not(told["why_not"])}
<h2>all candidates</h2><p class="tools"><input id="filter" type="search" placeholder="filter, such as: TP8 selective" aria-label="filter">
<label><input id="fitting" type="checkbox"> only what fits</label> <span id="many" class="muted"></span></p>
<div class="scroll"><table id="candidates"><thead><tr id="head"></tr></thead><tbody id="body"></tbody></table></div>
<p class="muted">{escape(SHORTHAND)}</p>
{_part("placement", told["placement"].get("lines", ()))}
{_part("assumed", told["assumed"])}
<div id="tip" role="tooltip"></div>
<script type="application/json" id="plan">{data}</script>
<script>{SCRIPT}</script>
</body></html>
"""


def page_data(told: Mapping[str, Any]) -> dict[str, Any]:
    """What the page's program reads: every option once, in the words that the page shows."""
    named = [("winner" if told["considered"] > 1 else "the run file's", told["best"])]
    named += [("runner-up", other) for other in told["others"]]
    named += [(f"why not {one['name']}", one["option"]) for one in told["why_not"] if one["option"] is not None]
    named += [("trade-off", option) for option in told["curve"]]
    named += [(f"{option['ranks']:,} devices", option) for option in told.get("scaling", ())]
    every: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for role, option in named:
        every.setdefault(option["toml"], (role, option))  # under the first of its names
    drawn = [option["toml"] for option in compared(told)]
    places = {toml: place for place, toml in enumerate(every)}
    options = [option for _, option in every.values()]
    return {
        "options": [
            _option(option, role, told["words"]) | {"shown": option["toml"] in drawn} for role, option in every.values()
        ],
        "columns": [{"name": name, "means": means} for name, means in _COLUMNS],
        "capacity": told["best"]["capacity"],
        "capacity_text": size(told["best"]["capacity"]),
        "units": {"memory": memory_unit(told["best"]["bytes"])[1], "step": step_unit(told["best"]["seconds"])[1]},
        "why_not": [None if one["option"] is None else places[one["option"]["toml"]] for one in told["why_not"]],
        "trade": _trade(told, options),
        "cost": _cost(told, options),
    }


def _option(option: Mapping[str, Any], role: str, words: Mapping[str, str]) -> dict[str, Any]:
    memory = [
        _piece(name, words.get(name, name), value, size(value), MEMORY) for name, value in option["memory"].items() if value > 0
    ]
    step = [
        _piece(name, words.get(name, name), value, short_duration(value), STEP)
        for name, value in option["split"].items()
        if value > 0
    ]
    return {
        "name": option["name"],
        "role": role,
        "fits": option["fits"],
        "toml": option["toml"],
        "promise": [list(row) for row in promise(option)],
        "memory": {"parts": memory, "end": option["bytes"], "text": size(option["bytes"])},
        "step": {
            "parts": step,
            "end": option["seconds"],
            "low": option["low"],
            "high": option["high"],
            "between": interval(option["ranges"]["seconds"], short_duration),
            "text": short_duration(option["seconds"]),
        },
        "cells": _cells(option),
    }


def _piece(name: str, words: str, value: float, text: str, colours: Mapping[str, str]) -> dict[str, Any]:
    return {"words": words, "value": value, "text": text, "colour": colours.get(name, OTHERS)}


def _cells(option: Mapping[str, Any]) -> list[dict[str, Any]]:
    bubble = option["split"].get("bubble", 0.0) / option["seconds"]
    exposed = sum(option["split"].get(part, 0.0) for part in _EXCHANGE) / option["seconds"]
    saved = recomputed(option) + ("" if option["offload"] == "none" else ", offload")
    values: list[tuple[str, Any]] = [
        (option["name"], option["name"]),
        (str(option["micro_batch"]), option["micro_batch"]),
        (saved, saved),
        (short_duration(option["seconds"]), option["seconds"]),
        (interval(option["ranges"]["seconds"], short_duration), option["low"]),
        (size(option["bytes"]), option["bytes"]),
        (percent(option["mfu"]), option["mfu"] or 0.0),
        (count(option["tokens_per_second"]), option["tokens_per_second"]),
        (days(option["expected_days"]), option["expected_days"]),
        (dollars(option["price"]), option["price"] or 0.0),
        (percent(bubble), bubble),
        (percent(exposed), exposed),
    ]
    return [{"text": text, "sort": sort} for text, sort in values]


def _trade(told: Mapping[str, Any], options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    line = [option["toml"] for option in told["curve"]]
    (memory, large), (step, long) = memory_unit(told["best"]["bytes"]), step_unit(told["best"]["seconds"])
    points = [
        {
            "x": option["bytes"] / large,
            "y": option["seconds"] / long,
            "text": f"{option['name']}\n{size(option['bytes'])}, {short_duration(option['seconds'])} ({interval(option['ranges']['seconds'], short_duration)})",
            "option": place,
            "line": option["toml"] in line,
            "label": "",
        }
        for place, option in enumerate(options)
        if option["ranks"] == told["best"]["ranks"]
    ]
    limit = told["best"]["capacity"] / large
    axes = {"x": f"memory of the fullest rank, {memory}", "y": f"step, {step}", "line": "quickest at this memory"}
    return {"points": points, **axes, "prefix": "", "limit": limit}


def _cost(told: Mapping[str, Any], options: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    key, name, form = (
        ("price", "price, $", dollars) if told["best"]["price"] is not None else ("gpu_hours", "device-hours", count)
    )
    scale, unit = long_unit(told["best"]["expected_days"])
    sizes = [option["toml"] for option in told.get("scaling", ())]
    points = [
        {
            "x": scale * option["expected_days"],
            "y": option[key],
            "text": f"{option['name']} on {option['ranks']:,} devices\n{days(option['expected_days'])}, {form(option[key])}",
            "option": place,
            "line": option["toml"] in sizes,
            "label": f"{option['ranks']:,}" if option["toml"] in sizes else "",
        }
        for place, option in enumerate(options)
        if option[key] is not None
    ]
    axes = {"x": f"{unit} of the run, failures considered", "y": name, "line": "quickest on this many devices"}
    return {
        "points": points,
        **axes,
        "prefix": "$" if key == "price" else "",
        "limit": None,
        "own": f"{told['best']['ranks']:,}",
    }


def _cost_title(told: Mapping[str, Any]) -> str:
    return f"what {long_unit(told['best']['expected_days'])[1]} cost"


def _why_not(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    cells = [(one["name"], one["reason"], (one["option"] or {}).get("change", "")) for one in rows]
    said = "A click shows one at the top, with what to paste; the last column has the keys to set where the run file has the winner's tables."
    return f'<h2>why not</h2><p class="muted">{said}</p><table id="why-not">{_rows(cells)}</table>'


def _part(title: str, lines: Sequence[str]) -> str:
    return f"<h2>{escape(title)}</h2>" + "".join(f"<p>{escape(line)}</p>" for line in lines) if lines else ""


def _rows(rows: Sequence[Sequence[str]]) -> str:
    return "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
