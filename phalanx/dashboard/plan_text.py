"""A plan on the terminal: the winner and what to paste, its memory and its step in bars, the runners-up, why not the others, and what
was assumed. The CLI and `phalanx.explain` call it with the values that `planning/explain` makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from phalanx.dashboard.numbers import count, dollars, duration, energy, percent, short_duration, size

COLOURS = {
    "parameters": "blue", "gradients": "cyan", "optimizer": "magenta", "activations": "green", "logits": "yellow",
    "gathered": "bright_blue", "buffers": "bright_black", "fixed": "bright_black", "compute": "green", "bubble": "red",
}  # fmt: skip
SHORTHAND = (
    "PP pipeline ranks, v stages of a rank, -zb zero-bubble and -bfs breadth-first order; DP replicas; ZeRO1×128 optimizer states "
    "shared by 128 (ZeRO2: gradients too, FSDP: parameters too); CP context, TP tensor, +SP sequence, EP expert parallelism. "
    "Recompute full 1/2: of every second block."
)
"""How layouts, and what they recompute, are written in short."""
_WIDE = 96
"""Columns from which things stand side by side."""

_REASONS = 10
"""Layouts that are told why not, at least."""


def show_plan(console: Console, told: Mapping[str, Any], top: int = 5) -> None:
    """All of it; `top`: how many runners-up."""
    console.print(_head(told))
    console.print(_winner(console, told))
    bars: list[RenderableType] = [_memory(told), _step(told)]
    console.print(_abreast(bars) if console.width >= _WIDE else Group(*bars))
    _section(console, "why this one", [Text(sentence) for sentence in told["why"]])
    if told["others"] and top:
        shown = [_others(told, top)] if console.width >= _WIDE else _listed_others(told, top)
        _section(console, "runners-up", shown)
    if told["why_not"]:
        _section(console, "why not", [_why_not(told["why_not"], max(_REASONS, 2 * top))])
    if told["placement"].get("lines"):
        _section(console, "placement", [Text(line) for line in told["placement"]["lines"]])
    if told["assumed"]:
        _section(console, "assumed", [_points(told["assumed"])])


def show_solved(console: Console, answer: Mapping[str, Any]) -> None:
    """An answer the other way round: in a sentence, with its plan and what other clusters would change."""
    console.print(Text(answer["sentence"], style="bold green"))
    if answer["tried"]:
        most = max(speed for _, speed in answer["tried"])
        rows = [
            (f"{value:,}", speed, f"{count(speed)} tok/s", "green" if value == answer["value"] else "yellow")
            for value, speed in answer["tried"]
        ]
        console.print(_bars(f"tried, by {answer['what']}", rows, most))
    if answer["what_if"]:
        _section(console, "what if", [Text(change["sentence"]) for change in answer["what_if"]])
    _section(console, "its plan", [])
    show_plan(console, answer["plan"], top=0)


def interval(values: Sequence[float] | None, unit: Any) -> str:
    """4.10 s – 6.02 s; the first unit is left out where both have the same."""
    if not values:
        return ""
    low, high = unit(values[0]), unit(values[1])
    number, _, name = low.partition(" ")
    return f"{number if name and high.split(' ')[1:] == [name] else low} – {high}"


def _head(told: Mapping[str, Any]) -> Text:
    model, cluster, train = told["model"], told["cluster"], told["train"]
    active = f" ({count(model['active'])} active)" if model["active"] < model["parameters"] else ""
    nodes = f" in {cluster['nodes']:,} nodes" if cluster["nodes"] > 1 else ""
    text = Text()
    text.append(f"{model['name']}", style="bold")
    text.append(f", {count(model['parameters'])} parameters{active}, on ")
    text.append(f"{cluster['gpus']:,} × {cluster['gpu']}{nodes}", style="bold")
    text.append(
        f"\n{train['batch']:,} sequences of {train['sequence_length']:,} tokens a step, {train['steps']:,} steps, "
        f"{count(train['tokens'])} tokens\n"
    )
    searched = searched_words(told)
    text.append(searched if told["considered"] > 1 else "the run file's own layout, judged as it stands", style="dim")
    return text


def searched_words(told: Mapping[str, Any]) -> str:
    """How many candidates in what time."""
    one_by_one = f", {told['timed']:,} of them one by one" if 0 < told["timed"] < told["considered"] else ""
    return f"{told['considered']:,} legal layouts judged{one_by_one}, in {short_duration(told['seconds'])} of CPU time"


def _winner(console: Console, told: Mapping[str, Any]) -> Panel:
    best = told["best"]
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column(no_wrap=True, justify="right")
    rows.add_column(style="dim", no_wrap=True)
    rows.add_row("", "", "P10 – P90")
    for name, value, between in promise(best):
        rows.add_row(name, Text(value, style="bold"), between)
    paste = Text(best["toml"], style="cyan")
    inside: RenderableType = _beside(paste, rows) if console.width >= _WIDE else Group(rows, Text(), paste)
    fits = "" if best["fits"] else "  DOES NOT FIT"
    style = "green" if best["fits"] else "red"
    fewer = f" on {best['ranks']:,} of the devices" if best["ranks"] < told["cluster"]["gpus"] else ""
    title = Text(f"{best['name']}{fewer}{fits}", style=f"bold {style}")
    return Panel(inside, title=title, title_align="left", border_style=style, padding=(0, 1))


def promise(option: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What a layout promises: name, value, interval."""
    ranges = option["ranges"]
    rows = [
        ("step", short_duration(option["seconds"]), interval(ranges["seconds"], short_duration)),
        ("speed", f"{count(option['tokens_per_second'])} tok/s", interval(ranges["tokens_per_second"], count)),
        ("MFU", percent(option["mfu"]), interval(ranges.get("mfu"), percent)),
        ("memory", size(option["bytes"]), f"of {size(option['capacity'])}"),
        ("whole run", days(option["days"]), interval(ranges["days"], days)),
    ]
    if option["save_every"] is not None:
        rows += [
            ("goodput", percent(option["goodput"]), f"saving every {duration(option['save_every'])}"),
            ("with failures", days(option["expected_days"]), interval(ranges["expected_days"], days)),
        ]
    rows.append(("device-hours", count(option["gpu_hours"]), interval(ranges["gpu_hours"], count)))
    if option["price"] is not None:
        rows.append(("price", dollars(option["price"]), interval(ranges["price"], dollars)))
    if option["energy"] is not None:
        rows.append(("energy", energy(option["energy"]), interval(ranges["energy"], energy)))
    return rows


def days(value: float) -> str:
    """54.3 d; short runs in the units that suit them."""
    return f"{value:,.1f} d" if value >= 2 else duration(86400 * value)


def _memory(told: Mapping[str, Any]) -> Group:
    best = told["best"]
    parts = sorted(((name, value) for name, value in best["memory"].items() if value > 0), key=lambda one: -one[1])
    rows = [(told["words"].get(name, name), value, size(value), COLOURS.get(name, "white")) for name, value in parts]
    free = best["capacity"] - best["bytes"]
    rows.append(("free" if free >= 0 else "missing", abs(free), size(abs(free)), "bright_black" if free >= 0 else "bold red"))
    rank = f"pipeline rank {best['fullest']}, the fullest" if best["layout"]["pipeline"] > 1 else "a rank"
    return _bars(f"memory of {rank}", rows, max(best["capacity"], best["bytes"]))


def _step(told: Mapping[str, Any]) -> Group:
    best = told["best"]
    parts = sorted(((name, value) for name, value in best["split"].items() if value > 0), key=lambda one: -one[1])
    rows = [
        (
            told["words"].get(name, name),
            value,
            f"{short_duration(value)} {value / best['seconds']:>6.1%}",
            COLOURS.get(name, "yellow"),
        )
        for name, value in parts
        if value >= 5e-4 * best["seconds"]
    ]
    return _bars(f"a step, {short_duration(best['seconds'])}", rows, best["seconds"])


def _bars(title: str, rows: Sequence[tuple[str, float, str, str]], whole: float) -> Group:
    """Name, value as a part of the whole, value in words, colour."""
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right")
    table.add_column(no_wrap=True)
    for name, value, words, colour in rows:
        table.add_row(name, words, Text(bar(value / whole, 14), style=colour))
    return Group(Text(title, style="bold"), table)


def bar(part: float, width: int) -> str:
    """A bar of eighths of a character; what is there at all shows."""
    eighths = max(1, round(8 * width * min(1.0, part))) if part > 0 else 0
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def recomputed(option: Mapping[str, Any]) -> str:
    """What is computed again, and of which part of the blocks: "full 1/2"."""
    every = option["recompute_every"]
    return str(option["recompute"]) + (f" 1/{every}" if every > 1 else "")


def _others(told: Mapping[str, Any], top: int) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    priced = told["best"]["price"] is not None
    for title in ("layout", "micro", "recompute", "step", "", "memory", *(["price"] if priced else [])):
        right = title in ("micro", "step", "", "memory", "price")
        table.add_column(title, no_wrap=title != "layout", justify="right" if right else "left")
    table.add_column("costs more in")
    for place, option in enumerate([told["best"], *told["others"][:top]]):
        behind = option["seconds"] / told["best"]["seconds"] - 1
        table.add_row(
            Text(option["name"]),
            str(option["micro_batch"]),
            recomputed(option) + ("" if option["offload"] == "none" else ", offload"),
            short_duration(option["seconds"]),
            f"{behind:+.1%}" if place else "",
            size(option["bytes"]),
            *([dollars(option["price"])] if priced else []),
            Text(_more(option), style="dim"),
            style="green" if not place else "",
        )
    return table


def _more(option: Mapping[str, Any]) -> str:
    lost = next((one for one in option.get("beside", ()) if one["seconds"] > 0), None)
    return "" if lost is None else f"{lost['words']} +{short_duration(lost['seconds'])}"


def _listed_others(told: Mapping[str, Any], top: int) -> list[RenderableType]:
    """The same where a table would be too wide: two lines for each."""
    lines: list[RenderableType] = []
    for option in told["others"][:top]:
        behind = option["seconds"] / told["best"]["seconds"] - 1
        facts = [f"{short_duration(option['seconds'])} ({behind:+.1%})", size(option["bytes"])]
        facts += [] if option["price"] is None else [dollars(option["price"])]
        facts += [f"micro-batch {option['micro_batch']}", f"recompute {recomputed(option)}"]
        facts += [] if option["offload"] == "none" else ["offload"]
        facts += [f"more: {more}"] if (more := _more(option)) else []
        lines += [Text(option["name"], style="bold"), Padding(Text(", ".join(facts)), (0, 0, 0, 2))]
    return lines


def _why_not(rows: Sequence[Mapping[str, Any]], most: int) -> Group:
    """Reasons, each with the keys that lead there."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows[:most]:
        said = Text(row["reason"])
        if row["option"] is not None and row["option"]["change"]:
            said.append(f"\n{row['option']['change']}", style="dim")
        table.add_row(Text(row["name"], style="bold"), said)
    left = len(rows) - most
    notes = [f"({left} more with --json or --html, or a larger --top)"] if left > 0 else []
    if any(row["option"] is not None and row["option"]["change"] for row in rows[:most]):
        notes.append(
            "keys are what to set where the run file has the winner's tables: phalanx plan RUN.toml --given KEY=VALUE …"
        )
    return Group(table, *(Text(note, style="dim") for note in notes))


def _points(lines: Sequence[str]) -> Table:
    table = Table.grid(padding=(0, 1))
    for line in lines:
        table.add_row(Text("·", style="dim"), Text(line, style="dim"))
    return table


def _abreast(parts: Sequence[RenderableType]) -> Table:
    """Columns of equal width."""
    table = Table.grid(padding=(0, 1), expand=True)
    for _ in parts:
        table.add_column(ratio=1)
    table.add_row(*parts)
    return table


def _beside(left: RenderableType, right: RenderableType) -> Table:
    table = Table.grid(padding=(0, 4))
    table.add_row(left, right)
    return table


def _section(console: Console, title: str, parts: Sequence[RenderableType]) -> None:
    console.print(Rule(Text(title, style="bold"), align="left", style="dim"))
    console.print(Group(*parts))
