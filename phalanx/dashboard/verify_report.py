"""Prints the reports of `phalanx verify`: one line per check, errors of failed ranks, the cost of a step next to theory, and chaos campaigns.

It gets the same values that `--json` prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import NotRequired, TypedDict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from phalanx.dashboard.numbers import duration, size
from phalanx.spec.layout import Layout, SavedLayout

_DEGREES = ("pipeline", "data", "shard", "context", "tensor")


class CheckTable(TypedDict):
    """The JSON of `verification/tolerance.Check`."""

    name: str
    largest: float
    accepted: float | None
    """None: any difference."""
    tensor: str
    step: int | None
    rank: int | None
    judged: bool
    passed: bool


class FailureTable(TypedDict):
    """The JSON of a rank that failed."""

    rank: int | None
    """None: the reference process."""
    error: str
    trace: Sequence[str]


class AccountTable(TypedDict):
    """The JSON of the bytes sent by one rank, by technique and collective, and of its memory."""

    sent: Mapping[str, Mapping[str, int]]
    memory: Mapping[str, int]


class TheoryTable(TypedDict):
    """The JSON of the same by the formulas of each technique."""

    sent: Mapping[str, float]
    memory: Mapping[str, float]
    per_parameter: str
    said: Sequence[str]


class ParityTable(TypedDict):
    """The JSON of `verification/parity.Report`."""

    passed: bool
    layout: SavedLayout
    ranks: int
    steps: int
    precision: str
    because: str
    checks: Sequence[CheckTable]
    first: CheckTable | None
    said: Sequence[str]
    failure: FailureTable | None
    accounts: NotRequired[Sequence[AccountTable]]
    """By rank, if requested; then `theory` is there too."""
    theory: NotRequired[TheoryTable | None]


class FaultTable(TypedDict):
    """The JSON of `verification/fault_outcomes.FaultOutcome`."""

    fault: str
    kind: str
    step: int | None
    noticed: float | None
    recovered: float | None
    steps_lost: int
    said: str
    passed: bool


class VerdictTable(TypedDict):
    """The JSON of one check of a campaign."""

    name: str
    passed: bool
    said: str


class CampaignTable(TypedDict):
    """The JSON of `verification/chaos_campaign.CampaignReport`."""

    passed: bool
    layout: SavedLayout
    ranks: int
    nodes: int
    steps: int
    checks: Sequence[VerdictTable]
    faults: Sequence[FaultTable]
    recoveries: int
    steps_lost: int
    seconds: Mapping[str, float]
    said: Sequence[str]


def layout_words(saved: SavedLayout) -> str:
    """Names a layout, such as "data 2 × tensor 2, sequence"."""
    layout = Layout.from_saved(saved)
    sizes = asdict(layout)
    words = [" × ".join(f"{name} {sizes[name]}" for name in _DEGREES if (sizes[name] or 1) > 1) or "one rank"]
    if layout.shard > 1:
        words.append(f"ZeRO-{layout.zero}")
    if layout.tensor > 1 and layout.sequence:
        words.append("sequence")
    if layout.context > 1:
        words.append(layout.context_method)
    if layout.pipeline > 1:
        words.append(layout.schedule_file or layout.schedule)
    words += [f"{name} {sizes[name]}" for name in ("expert", "expert_tensor") if sizes[name] > 1]
    return ", ".join(words)


def show_report(console: Console, report: ParityTable) -> None:
    """Shows one verification in full."""
    ranks, steps = report["ranks"], report["steps"]
    console.print(
        f"{layout_words(report['layout'])}: {ranks} CPU rank{'s' if ranks > 1 else ''} against one process, {steps} steps, {report['precision']}"
    )
    for sentence in report["said"]:
        console.print(escape(sentence), style="dim", soft_wrap=True)
    if report["failure"]:
        show_failure(console, report["failure"])
    if report["checks"]:
        console.print(_checks(report["checks"]))
        console.print(f"accepted for {report['precision']}: {report['because']}", style="dim", soft_wrap=True)
    if report.get("accounts"):
        show_accounts(console, report)
    if report["passed"]:
        console.print("passed", style="bold green")
    else:
        first = report["first"]
        where = f": look at {first['name']} first ({escape(_where(first))})" if first else ""
        console.print(f"NOT PASSED{where}", style="bold red", soft_wrap=True)


def show_failure(console: Console, failure: FailureTable) -> None:
    who = "the reference process" if failure["rank"] is None else f"rank {failure['rank']}"
    console.print(f"{who}: {escape(failure['error'])}", style="red", soft_wrap=True)
    for line in failure["trace"]:
        console.print(f"  {escape(line)}", style="dim", soft_wrap=True)


def show_line(console: Console, number: int, report: ParityTable) -> None:
    """Shows one verification of many as a line."""
    verdict = "[green]passed[/]" if report["passed"] else "[bold red]NOT PASSED[/]"
    if report["failure"]:
        failure = report["failure"]
        who = "the reference process" if failure["rank"] is None else f"rank {failure['rank']}"
        what = f"{who}: {escape(failure['error'])}"
    else:
        failed = [check for check in report["checks"] if not check["passed"]]
        shown = failed or [check for check in report["checks"] if check["accepted"] != 0]
        what = ", ".join(
            f"{check['name']} {check['largest']:.1e}" + (f" ({_where(check)})" if failed else "") for check in shown
        )
    console.print(f"{number:3d}  {verdict}  {layout_words(report['layout'])}: {what}", soft_wrap=True)


def _checks(checks: Sequence[CheckTable]) -> Table:
    table = Table()
    for title in ("check", "largest relative\ndifference", "where", "accepted", "verdict"):
        table.add_column(title, overflow="fold")
    for check in checks:
        exact = check["accepted"] == 0
        largest = "none" if not check["largest"] else f"{check['largest']:g}" if exact else f"{check['largest']:.1e}"
        verdict = "[green]passed[/]" if check["passed"] else "[bold red]differs[/]"
        if not check["judged"]:
            verdict = "[yellow]not judged[/]"
        accepted = "none" if exact else "any" if not check["judged"] else f"{check['accepted']:.0e}"
        where = escape(_where(check)) if check["largest"] else ""
        table.add_row(check["name"], largest, where, accepted, verdict)
    return table


def _where(check: CheckTable) -> str:
    if check["name"] == "placement":
        return str(check["tensor"])
    step = "before the first step" if check["step"] == 0 else f"step {check['step']}"
    words = [check["tensor"], "" if check["step"] is None else step, "" if check["rank"] is None else f"rank {check['rank']}"]
    return ", ".join(word for word in words if word)


def show_accounts(console: Console, report: ParityTable) -> None:
    """Shows bytes and memory of one step next to theory.

    A column per rank would not fit a terminal: the table has the largest and the smallest value. JSON has every rank.
    """
    theory, accounts = report["theory"], report["accounts"]
    assert theory is not None
    sent = Table(title="bytes sent in one step")
    memory = Table(title=f"memory; theory of the state: {theory['per_parameter']} bytes per parameter")
    for table, titles in ((sent, ("technique", "collective")), (memory, ("kind",))):
        for title in (*titles, "largest", "rank", "smallest", "theory"):
            table.add_column(title)
    kinds = dict.fromkeys((use, name) for account in accounts for use, names in account["sent"].items() for name in names)
    last = {use: name for use, name in kinds}  # theory covers a whole technique: it is in the last line of the technique
    for use, name in kinds:
        cells = _range([account["sent"].get(use, {}).get(name, 0) for account in accounts])
        sent.add_row(use, name, *cells, size(theory["sent"].get(use)) if last[use] == name else "")
    for kind in accounts[0]["memory"]:
        memory.add_row(kind, *_range([account["memory"][kind] for account in accounts]), size(theory["memory"].get(kind)))
    states = [sum(bytes_ for kind, bytes_ in account["memory"].items() if kind != "activations") for account in accounts]
    memory.add_row("state together", *_range(states), size(sum(theory["memory"].values())), style="bold")
    console.print(sent)
    for sentence in theory["said"]:
        console.print(escape(sentence), style="dim", soft_wrap=True)
    console.print(memory)


def _range(values: Sequence[int]) -> tuple[str, str, str]:
    """The largest value, its rank, and the smallest value; the rank is "all" if both look the same."""
    largest, smallest = size(max(values)), size(min(values))
    return largest, "all" if largest == smallest else str(values.index(max(values))), smallest


def show_campaign(console: Console, report: CampaignTable) -> None:
    """Shows a campaign of `phalanx verify --chaos`: the faults, the checks, and the totals."""
    console.print(
        f"{layout_words(report['layout'])}: {report['ranks']} CPU ranks as {report['nodes']} nodes, {report['steps']} steps, "
        f"{len(report['faults'])} faults"
    )
    for sentence in report["said"]:
        console.print(escape(sentence), style="dim", soft_wrap=True)
    console.print(_faults(report["faults"]))
    for line in _kinds(report["faults"]):
        console.print(line, style="dim")
    console.print(_campaign_checks(report["checks"]))
    seconds = report["seconds"]
    console.print(
        f"{report['recoveries']} recoveries, {report['steps_lost']} steps repeated, {duration(seconds['disturbed'])} instead of "
        f"{duration(seconds['undisturbed'])}",
        soft_wrap=True,
    )
    console.print("passed" if report["passed"] else "NOT PASSED", style="bold green" if report["passed"] else "bold red")


def _faults(faults: Sequence[FaultTable]) -> Table:
    table = Table()
    for title in ("fault", "injected\nin step", "detected\nafter", "recovered\nafter", "message"):
        table.add_column(title, overflow="fold")
    for fault in faults:
        step = "not injected" if fault["step"] is None else str(fault["step"])
        message = fault["said"] or ("" if fault["passed"] else "nothing")
        style = "" if fault["passed"] else "red"
        table.add_row(
            escape(fault["fault"]), step, _seconds(fault["noticed"]), _seconds(fault["recovered"]), escape(message), style=style
        )
    return table


def _kinds(faults: Sequence[FaultTable]) -> list[str]:
    """Detection and recovery times for each kind of fault."""
    lines = []
    for kind in dict.fromkeys(fault["kind"] for fault in faults):
        words = []
        of_kind = [fault for fault in faults if fault["kind"] == kind]
        noticed, recovered = [fault["noticed"] for fault in of_kind], [fault["recovered"] for fault in of_kind]
        for title, seconds in (("detected", noticed), ("recovered", recovered)):
            times = [value for value in seconds if value is not None]
            if times:
                words.append(f"{title} after {median(times):.2f} s (median of {len(times)}), {max(times):.2f} s at worst")
        lines += [f"{kind}: {'; '.join(words)}"] if words else []
    return lines


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} s"


def _campaign_checks(checks: Sequence[VerdictTable]) -> Table:
    table = Table()
    for title in ("check", "result", "verdict"):
        table.add_column(title, overflow="fold")
    for check in checks:
        verdict = "[green]passed[/]" if check["passed"] else "[bold red]differs[/]"
        table.add_row(check["name"], escape(check["said"]), verdict)
    return table
