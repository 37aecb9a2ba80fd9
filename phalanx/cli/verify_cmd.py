"""`phalanx verify`: proves on CPU ranks that a run's layout computes what one device does; or many layouts, one after the other; or
that a run survives faults of every kind."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from phalanx.cli.output import AsJson, console, print_json
from phalanx.dashboard.verify_report import show_campaign, show_line, show_report
from phalanx.spec.errors import RunError
from phalanx.spec.load import load
from phalanx.spec.run import Run

_STEPS = 8


def verify(
    run_file: Annotated[Path, typer.Argument(help="The run file.", metavar="RUN.toml")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, e.g. layout.tensor=2 precision.compute=bf16.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Optimizer steps to compare. Left out: 8; with --chaos 80, or 5 for each fault.")
    ] = None,
    layouts: Annotated[
        str | None,
        typer.Option(help='"all": generated layouts of every kind, over small models of odd sizes, instead of the run\'s.'),
    ] = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Most CPU ranks; with --layouts all exactly so many. Left out: 8.")
    ] = None,
    count: Annotated[int, typer.Option(min=1, help="How many layouts --layouts all tries.")] = 40,
    account: Annotated[
        bool, typer.Option("--account", help="Also show what each rank sends and keeps, beside theory.")
    ] = False,
    chaos: Annotated[
        bool, typer.Option("--chaos", help="Prove instead that a small run of the family survives faults of every kind.")
    ] = False,
    faults: Annotated[
        int | None, typer.Option(min=1, help="With --chaos: so many random faults, not the standard ones.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="With --faults: which ones.")] = 0,
    json: AsJson = False,
) -> None:
    """Prove that parallel training equals one device: losses, gradients and parameters of a small model of RUN.toml's family,
    in its layout on CPU ranks, against one process."""
    if layouts not in (None, "all"):
        raise RunError([f'--layouts {layouts} is not known: give "all", or leave it out to prove the layout of the run file.'])
    if chaos and (layouts or ranks or account):
        raise RunError(
            ["--chaos runs on 4 ranks as 2 nodes, in the run's layout: --layouts, --ranks and --account do not go with it."]
        )
    if faults is not None and not chaos:
        raise RunError([f"--faults {faults} says how many faults --chaos draws: give --chaos too."])
    run = load(run_file, overrides or [])
    if chaos:
        from phalanx.verification import chaos_campaign as campaigns

        planned = campaigns.campaign(run, steps=steps, faults=faults, seed=seed)
        told = campaigns.verify(planned, lambda words: console.print(words, style="dim")).to_json()
        show_campaign(console, told)
        passed = told["passed"]
    elif layouts == "all":
        passed, told = _sweep(run, steps or _STEPS, ranks, count)
    else:
        from phalanx.verification.parity import verify as prove

        told = prove(run, steps=steps or _STEPS, ranks=ranks, account=account).to_json()
        show_report(console, told)
        passed = told["passed"]
    if json:
        print_json(told)
    raise typer.Exit(0 if passed else 1)


def _sweep(run: Run, steps: int, ranks: int | None, count: int) -> tuple[bool, dict[str, Any]]:
    from phalanx.verification.parity import sweep

    reports = []
    for number, report in enumerate(sweep(run, ranks=ranks, steps=steps, count=count), start=1):
        reports.append(report.to_json())
        show_line(console, number, reports[-1])
    passed = [report["passed"] for report in reports]
    console.print(f"{sum(passed)} of {len(passed)} layouts passed", style="bold green" if all(passed) else "bold red")
    return all(passed) and bool(passed), {"passed": all(passed) and bool(passed), "layouts": reports}
