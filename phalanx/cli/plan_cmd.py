"""`phalanx plan`: the best layout of a run on its cluster, what it would cost and why the others would not do; what the smallest
cluster or the largest model would be; and what a plan promised beside what a run measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from phalanx.cli.output import AsJson, console, print_json, write_file
from phalanx.cli.units import memory, money, span
from phalanx.spec.errors import RunError
from phalanx.spec.load import load

if TYPE_CHECKING:
    from phalanx.planning.request import PlanRequest
    from phalanx.planning.search.search import Limits
    from phalanx.planning.solve import What
    from phalanx.spec.plan import Machine
    from phalanx.spec.run import Run

_WIDTH = 100
"""Columns where nobody looks: in a file or a pipe, tables need not be as narrow as rich would make them there."""


def plan(
    run_file: Annotated[Path | None, typer.Argument(help="The run file.", metavar="RUN.toml")] = None,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Settings to change, e.g. cluster.name=h100-1024 layout.tensor=8.")
    ] = None,
    aim: Annotated[Literal["time", "price"], typer.Option(help="What the best layout has least of.")] = "time",
    fits_in: Annotated[
        str | None, typer.Option(metavar="80GiB", help="Memory that a rank may use; left out: the card's.")
    ] = None,
    deadline: Annotated[
        str | None, typer.Option(metavar="30d", help="Longest that the run may take, failures considered.")
    ] = None,
    budget: Annotated[str | None, typer.Option(metavar="$2M", help="Most that the run may cost.")] = None,
    given: Annotated[bool, typer.Option("--given", help="Judge the run file's own layout instead of searching.")] = False,
    free: Annotated[
        bool, typer.Option("--free", help="Search as if the run file gave no layout, and compare its own with the best.")
    ] = False,
    top: Annotated[int, typer.Option(min=0, max=100, help="Runners-up to show.")] = 5,
    solve: Annotated[
        Literal["gpus", "model", "batch"] | None,
        typer.Option(
            help="Answer instead: the smallest cluster for this model, the largest model for this cluster, the batch that pays."
        ),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(metavar="RUN_DIR", help="Show instead what a run took beside what its plan promised.")
    ] = None,
    refit: Annotated[
        bool, typer.Option("--refit", help="With --compare: keep the constants that the run measured, for later plans.")
    ] = False,
    png: Annotated[Path | None, typer.Option(help="Draw memory, step and trade-offs into this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write them as a page to look around in.")] = None,
    json: AsJson = False,
) -> None:
    """Find the best layout of a run on its cluster, before a single GPU is rented: memory, time, price, and why not the others."""
    wide = console if console.is_terminal else Console(highlight=False, width=_WIDTH)
    _refuse(
        run_file, compare, {"--solve": solve, "--given": given, "--free": free, "--refit": refit, "--png": png, "--html": html}
    )
    if compare is not None:
        answer = _compare(wide, compare, refit)
    else:
        assert run_file is not None
        from phalanx.planning.request import PlanRequest

        run, limits = load(run_file, overrides or []), _limits(fits_in, deadline, budget)
        request = PlanRequest(run, _machine(run), aim=aim, limits=limits, given=given, free=free, top=max(10, top))
        answer = _solve(wide, request, solve) if solve is not None else _show(wide, request, top, (png, html))
    if json:
        print_json(answer)


def _machine(run: Run) -> Machine | None:
    """This machine, where the run file names no cluster. It is looked at only then, as GPU drivers take long to answer."""
    from phalanx.planning.machines.hardware import planned

    if planned(run):
        return None
    from phalanx.host.env import visible_gpus
    from phalanx.host.probe import probe

    return probe(visible_gpus())


def _show(wide: Console, request: PlanRequest, top: int, files: tuple[Path | None, Path | None]) -> dict[str, Any]:
    """Shows the plan on the terminal, writes the files that are asked for, and returns the object that --json prints."""
    from phalanx.dashboard.plan_text import show_plan
    from phalanx.planning.planner import plan as plan_request
    from phalanx.planning.planner import scaling

    report = plan_request(request)
    show_plan(wide, report, top)
    png, html = files
    if png is not None or html is not None:
        # Other numbers of devices need further searches, so only the picture and the page have them.
        report = replace(report, scaling=scaling(request, report.best.layout.ranks))
    if png is not None:
        from phalanx.dashboard.plan_picture import draw_plan

        write_file(png, lambda: draw_plan(report, png))
    if html is not None:
        from phalanx.dashboard.plan_page import page

        write_file(html, lambda: html.write_text(page(report), encoding="utf-8"))
    return report.to_json()


def _limits(fits_in: str | None, deadline: str | None, budget: str | None) -> Limits:
    from phalanx.planning.search.search import Limits

    return Limits(
        fits_in=None if fits_in is None else memory("--fits-in", fits_in),
        deadline=None if deadline is None else span("--deadline", deadline) / 86400,
        budget=None if budget is None else money("--budget", budget),
    )


def _solve(wide: Console, request: PlanRequest, what: What) -> dict[str, Any]:
    from phalanx.dashboard.plan_text import show_solution
    from phalanx.planning.planner import solve_report

    solution = solve_report(request, what)
    show_solution(wide, solution)
    return solution.to_json()


def _compare(wide: Console, directory: Path, refit: bool) -> dict[str, Any]:
    from phalanx.dashboard.numbers import short_duration, size
    from phalanx.dashboard.plan_text import show_comparison
    from phalanx.host.env import visible_gpus
    from phalanx.host.machine_profile import write_profile
    from phalanx.host.probe import probe
    from phalanx.planning.feedback.compare_run import after, compare, correction

    machine = probe(visible_gpus())
    comparison = compare(directory, machine)
    if not refit:
        show_comparison(wide, comparison)
        return comparison.to_json()
    constants = correction(comparison, machine)
    refitted = after(comparison, machine, constants)
    show_comparison(wide, comparison, refitted)
    path = write_profile(machine, constants)
    wide.print(
        f"saved to {path}: plans on this machine now promise {short_duration(refitted.seconds)} and {size(refitted.total_memory)} for this run",
        soft_wrap=True,
        markup=False,
    )
    answer = {"constants": constants, "file": str(path), "seconds": refitted.seconds, "memory": refitted.total_memory}
    return comparison.to_json(refitted) | answer


def _refuse(run_file: Path | None, compare: Path | None, options: Mapping[str, Any]) -> None:
    """Options that do not go together."""
    asked = {name for name, value in options.items() if value}
    problems = []
    if run_file is None and compare is None:
        problems.append("phalanx plan needs a run file, such as `phalanx plan run.toml`, or --compare with a run directory.")
    if run_file is not None and compare is not None:
        problems.append(f"--compare {compare} reads the run file that lies there: leave {run_file} out.")
    if compare is None and "--refit" in asked:
        problems.append("--refit keeps what a run measured: name its directory with --compare.")
    if compare is not None and (lost := sorted(asked - {"--refit"})):
        problems.append(
            f"--compare shows a run that is over: {' and '.join(lost)} {'do' if len(lost) > 1 else 'does'} not go with it."
        )
    if "--given" in asked and (lost := sorted(asked & {"--solve", "--free"})):
        problems.append(
            f"--given searches nothing, {' and '.join(lost)} {'do' if len(lost) > 1 else 'does'}: give one of them."
        )
    if "--solve" in asked and (lost := sorted(asked & {"--png", "--html"})):
        problems.append(
            f"--solve prints an answer: {' and '.join(lost)} {'draw' if len(lost) > 1 else 'draws'} a plan, so leave one out."
        )
    files = [Path(options[name]) for name in ("--png", "--html") if options[name]]
    problems += [f"{path}: cannot be written: there is no folder {path.parent}" for path in files if not path.parent.is_dir()]
    if problems:
        raise RunError(problems)
