"""How a campaign of faults looks to people: a line per fault, a line per check. `phalanx verify --chaos` prints through here; it hands
over plain tables, as its JSON has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.dashboard.numbers import duration
from phalanx.dashboard.verify_report import layout_words


def show_campaign(console: Console, report: Mapping[str, Any]) -> None:
    """The faults, the checks, and what it came to."""
    console.print(
        f"{layout_words(report['layout'])}: {report['ranks']} CPU ranks as {report['nodes']} nodes, {report['steps']} steps, "
        f"{len(report['faults'])} faults"
    )
    for sentence in report["said"]:
        console.print(escape(sentence), style="dim", soft_wrap=True)
    console.print(_faults(report["faults"]))
    for line in _kinds(report["faults"]):
        console.print(line, style="dim")
    console.print(_checks(report["checks"]))
    seconds = report["seconds"]
    console.print(
        f"{report['recoveries']} recoveries, {report['steps_lost']} steps taken again, {duration(seconds['disturbed'])} in place of "
        f"{duration(seconds['undisturbed'])}",
        soft_wrap=True,
    )
    console.print("passed" if report["passed"] else "NOT PASSED", style="bold green" if report["passed"] else "bold red")


def _faults(faults: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    for title in ("fault", "struck in\nstep", "noticed\nafter", "went on\nafter", "what was said"):
        table.add_column(title, overflow="fold")
    for fault in faults:
        step = "not there" if fault["step"] is None else str(fault["step"])
        said = fault["said"] or ("" if fault["passed"] else "nothing")
        style = "" if fault["passed"] else "red"
        table.add_row(
            escape(fault["fault"]), step, _seconds(fault["noticed"]), _seconds(fault["recovered"]), escape(said), style=style
        )
    return table


def _kinds(faults: Sequence[Mapping[str, Any]]) -> list[str]:
    """Detection and recovery by kind, in numbers."""
    lines = []
    for kind in dict.fromkeys(fault["kind"] for fault in faults):
        words = []
        for title, key in (("noticed", "noticed"), ("went on", "recovered")):
            times = [fault[key] for fault in faults if fault["kind"] == kind and fault[key] is not None]
            if times:
                words.append(f"{title} after {median(times):.2f} s (median of {len(times)}), {max(times):.2f} s at worst")
        lines += [f"{kind}: {'; '.join(words)}"] if words else []
    return lines


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _checks(checks: Sequence[Mapping[str, Any]]) -> Table:
    table = Table()
    for title in ("check", "what was found", "verdict"):
        table.add_column(title, overflow="fold")
    for check in checks:
        verdict = "[green]passed[/]" if check["passed"] else "[bold red]differs[/]"
        table.add_row(check["name"], escape(check["said"]), verdict)
    return table
