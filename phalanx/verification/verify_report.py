"""Prints the reports of `phalanx verify`: one line per check, errors of failed ranks, the cost of a step next to theory, and chaos campaigns."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from phalanx.dashboard.numbers import duration, size
from phalanx.planning.search.candidate import layout_name
from phalanx.verification.chaos_campaign import CampaignReport
from phalanx.verification.fault_outcomes import FaultOutcome
from phalanx.verification.parity import Report
from phalanx.verification.step_cost import RankAccount, Theory
from phalanx.verification.tolerance import MARGIN, ROUNDING, Check


def show_report(console: Console, report: Report) -> None:
    """Shows one verification in full."""
    case = report.case
    ranks, precision = case.layout.ranks, case.plan.compute
    plural = "s" if ranks > 1 else ""
    where = (
        f"{ranks} rank{plural} on {case.gpus} GPU{'s' if case.gpus > 1 else ''}" if case.gpus else f"{ranks} CPU rank{plural}"
    )
    if case.run.engine.name == "xla":
        where = f"XLA on {ranks} virtual device{plural}"
    against = f"{where} against one process, {case.steps} steps, {precision}"
    console.print(f"{layout_name(case.layout)}: {against}")
    _notes(console, case.notes)
    if report.failure:
        console.print(escape(str(report.failure)), style="red", soft_wrap=True)
        for line in report.failure.trace:
            console.print(f"  {escape(line)}", style="dim", soft_wrap=True)
    if report.checks:
        console.print(_checks(report.checks))
        console.print(f"accepted for {precision}: {report.reason}", style="dim", soft_wrap=True)
        _notes(console, [_noise(report, check) for check in report.checks if check.noise is not None])
    if report.accounts and report.theory is not None:
        show_accounts(console, report.accounts, report.theory)
    if report.passed:
        console.print("passed", style="bold green")
    else:
        first = report.first
        where = f": look at {first.name} first ({escape(_where(first))})" if first else ""
        console.print(f"NOT PASSED{where}", style="bold red", soft_wrap=True)


def _noise(report: Report, check: Check) -> str:
    """Why more than the tolerance is accepted."""
    numbers = report.case.numbers
    return (
        f"{check.name}: accepted is {MARGIN:g} times the noise there, which is more than {report.tolerance.of(check.name):.0e}. One "
        f"process differs from itself by {check.noise:.1e} if its gradients are disturbed by {ROUNDING[numbers]:g} of their size, as "
        f"rounding in {numbers} does."
    )


def _notes(console: Console, sentences: Sequence[str]) -> None:
    for sentence in sentences:
        console.print(escape(sentence), style="dim", soft_wrap=True)


def show_line(console: Console, number: int, report: Report) -> None:
    """Shows one verification of many as a line."""
    verdict = "[green]passed[/]" if report.passed else "[bold red]NOT PASSED[/]"
    if report.failure:
        what = escape(str(report.failure))
    else:
        failed = [check for check in report.checks if not check.passed]
        shown = failed or [check for check in report.checks if check.accepted != 0]
        what = ", ".join(f"{check.name} {check.largest:.1e}{_remark(check, failed=bool(failed))}" for check in shown)
    console.print(f"{number:3d}  {verdict}  {layout_name(report.case.layout)}: {what}", soft_wrap=True)


def _remark(check: Check, *, failed: bool) -> str:
    noise = "" if check.noise is None else f"noise {check.noise:.1e}"
    words = ", ".join(word for word in (_where(check) if failed else "", noise) if word)
    return escape(f" ({words})") if words else ""


def _table(*titles: str) -> Table:
    return Table(*(Column(title, overflow="fold") for title in titles))


def _verdict(passed: bool) -> str:
    return "[green]passed[/]" if passed else "[bold red]differs[/]"


def _checks(checks: Sequence[Check]) -> Table:
    table = _table("check", "largest relative\ndifference", "where", "accepted", "verdict")
    for check in checks:
        exact = check.accepted == 0
        largest = "none" if not check.largest else f"{check.largest:g}" if exact else f"{check.largest:.1e}"
        accepted = "none" if exact else f"{check.accepted:.0e}" if check.judged else "any"
        where = escape(_where(check)) if check.largest else ""
        verdict = _verdict(check.passed) if check.judged else "[yellow]not judged[/]"
        table.add_row(check.name, largest, where, accepted, verdict)
    return table


def _where(check: Check) -> str:
    if check.name == "placement":
        return check.tensor
    step = "before the first step" if check.step == 0 else f"step {check.step}"
    words = [check.tensor, "" if check.step is None else step, "" if check.rank is None else f"rank {check.rank}"]
    return ", ".join(word for word in words if word)


def show_accounts(console: Console, accounts: Sequence[RankAccount], theory: Theory) -> None:
    """Shows bytes and memory of one step next to theory. A column per rank would not fit a terminal: the table has the largest and
    the smallest value. JSON has every rank."""
    columns = ("largest", "rank", "smallest", "theory")
    sent = Table("technique", "collective", *columns, title="bytes sent in one step")
    memory = Table("kind", *columns, title=f"memory; theory of the state: {theory.per_parameter} bytes per parameter")
    kinds = dict.fromkeys((use, name) for account in accounts for use, names in account.sent.items() for name in names)
    last = {use: name for use, name in kinds}  # theory covers a whole technique: it is in the last line of the technique
    for use, name in kinds:
        cells = _range([account.sent.get(use, {}).get(name, 0) for account in accounts])
        sent.add_row(use, name, *cells, size(theory.sent.get(use)) if last[use] == name else "")
    for kind in accounts[0].memory:
        memory.add_row(kind, *_range([account.memory[kind] for account in accounts]), size(theory.memory.get(kind)))
    states = [sum(bytes_ for kind, bytes_ in account.memory.items() if kind != "activations") for account in accounts]
    memory.add_row("state together", *_range(states), size(sum(theory.memory.values())), style="bold")
    console.print(sent)
    _notes(console, theory.notes)
    console.print(memory)


def _range(values: Sequence[int]) -> tuple[str, str, str]:
    """The largest value, its rank, and the smallest value; the rank is "all" if both look the same."""
    largest, smallest = size(max(values)), size(min(values))
    return largest, "all" if largest == smallest else str(values.index(max(values))), smallest


def show_campaign(console: Console, report: CampaignReport) -> None:
    """Shows a campaign of `phalanx verify --chaos`: the faults, the checks, and the totals."""
    run, (undisturbed, disturbed) = report.campaign.run, report.seconds
    where = f"{run.layout.ranks} CPU ranks as {run.cluster.nodes} nodes"
    console.print(f"{layout_name(run.layout)}: {where}, {run.steps} steps, {len(report.outcomes)} faults")
    _notes(console, report.campaign.notes)
    console.print(_faults(report.outcomes))
    for line in _kinds(report.outcomes):
        console.print(line, style="dim")
    checks = _table("check", "result", "verdict")
    for verdict in report.verdicts:
        checks.add_row(verdict.name, escape(verdict.message), _verdict(verdict.passed))
    console.print(checks)
    lost = f"{report.recoveries} recoveries, {report.steps_lost} steps repeated"
    console.print(f"{lost}, {duration(disturbed)} instead of {duration(undisturbed)}", soft_wrap=True)
    console.print("passed" if report.passed else "NOT PASSED", style="bold green" if report.passed else "bold red")


def _faults(outcomes: Sequence[FaultOutcome]) -> Table:
    table = _table("fault", "injected\nin step", "detected\nafter", "recovered\nafter", "message")
    for outcome in outcomes:
        step = "not injected" if outcome.step is None else str(outcome.step)
        times = ("" if seconds is None else f"{seconds:.2f} s" for seconds in (outcome.noticed, outcome.recovered))
        message = outcome.message or ("" if outcome.passed else "nothing")
        table.add_row(escape(outcome.fault), step, *times, escape(message), style="" if outcome.passed else "red")
    return table


def _kinds(outcomes: Sequence[FaultOutcome]) -> list[str]:
    """Detection and recovery times for each kind of fault."""
    lines = []
    for kind in dict.fromkeys(outcome.kind for outcome in outcomes):
        words = []
        for title, name in (("detected", "noticed"), ("recovered", "recovered")):
            seconds = [getattr(outcome, name) for outcome in outcomes if outcome.kind == kind]
            if times := [value for value in seconds if value is not None]:
                words.append(f"{title} after {median(times):.2f} s (median of {len(times)}), {max(times):.2f} s at worst")
        lines += [f"{kind}: {'; '.join(words)}"] if words else []
    return lines
