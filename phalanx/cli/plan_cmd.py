"""`phalanx plan`: the best layout of a run on its cluster with time, memory and price; the smallest cluster or the largest model;
and a comparison of a plan with a finished run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

from rich.console import Console
from typer import Argument, Option

from phalanx.cli.options import (
    AsJson,
    Hosts,
    Overrides,
    check_folders,
    launcher_settings,
    parse_dollars,
    parse_memory,
    parse_seconds,
)
from phalanx.cli.output import console, finish, write_file
from phalanx.dashboard.numbers import short_duration, size
from phalanx.dashboard.plan_text import show_comparison, show_plan, show_solution
from phalanx.events.rundir import replace_file
from phalanx.host.machine_profile import write_profile
from phalanx.host.probe import this_machine
from phalanx.launch.model_check import measured
from phalanx.planning import feedback, planner
from phalanx.planning.machines.hardware import planned
from phalanx.planning.request import PlanRequest
from phalanx.planning.search.search import Limits
from phalanx.planning.solve import What
from phalanx.spec.errors import refuse
from phalanx.spec.load import load, loads
from phalanx.spec.plan import Machine
from phalanx.spec.run import PARTS, Run

_WIDTH = 100
"""Columns of tables in a file or a pipe, where rich would use 80."""


def plan(
    run_file: Annotated[Path | None, Argument(help="The run file.", metavar="RUN.toml")] = None,
    overrides: Overrides = None,
    aim: Annotated[Literal["time", "price"], Option(help="What the best layout minimizes.")] = "time",
    fits_in: Annotated[
        str | None, Option(metavar="80GiB", help="Memory that a rank may use. Default: that of the device.")
    ] = None,
    deadline: Annotated[str | None, Option(metavar="30d", help="Maximum time of the run, failures included.")] = None,
    budget: Annotated[str | None, Option(metavar="$2M", help="Maximum price of the run.")] = None,
    given: Annotated[bool, Option("--given", help="Evaluate the layout of the run file instead of searching.")] = False,
    free: Annotated[
        bool, Option("--free", help="Search as if the run file had no layout, and compare its layout with the best.")
    ] = False,
    top: Annotated[int, Option(min=0, max=100, help="Number of runners-up to show.")] = 5,
    solve: Annotated[
        Literal["gpus", "model", "batch"] | None,
        Option(
            help="Find the smallest cluster for this model, the largest model for this cluster, or the most efficient batch instead."
        ),
    ] = None,
    compare: Annotated[Path | None, Option(metavar="RUN_DIR", help="Compare a finished run with its plan instead.")] = None,
    refit: Annotated[
        bool, Option("--refit", help="With --compare: store the constants that the run measured, for later plans.")
    ] = False,
    write: Annotated[
        bool, Option("--write", help="Put the layout and what belongs to it into the run file. Comments and other keys stay.")
    ] = False,
    png: Annotated[Path | None, Option(help="Draw memory, step time and trade-offs to this file.")] = None,
    html: Annotated[Path | None, Option(help="Write an interactive page with them to this file.")] = None,
    on: Annotated[
        str | None,
        Option(help="Plan for the machines that are there: asks slurm, ray, or with --hosts the hosts themselves (ssh)."),
    ] = None,
    hosts: Hosts = None,
    json: AsJson = False,
) -> None:
    """Find the best layout of a run on its cluster without using a GPU: memory, time and price, and why the others are worse."""
    wide = console if console.is_terminal else Console(highlight=False, width=_WIDTH, stderr=console.stderr)
    _check_options(
        run_file,
        compare,
        {"--solve": solve, "--given": given, "--free": free, "--refit": refit, "--write": write, "--png": png, "--html": html},
    )
    if compare is not None:
        answer = _compare(wide, compare, refit)
    else:
        assert run_file is not None
        run = load(run_file, [*(overrides or []), *launcher_settings(on, hosts)])
        run, machine, notes = _found(run) if on or hosts else (run, planned_machine(run), ())
        run = measured(run, machine)
        limits = _limits(fits_in, deadline, budget)
        request = PlanRequest(run, machine, aim=aim, limits=limits, given=given, free=free, top=max(10, top))
        answer = _solve(wide, request, solve) if solve is not None else _show(wide, request, top, (png, html))
        if write:
            answer |= {"written": _write(run_file, answer["best"]["toml"])}
        for note in notes:
            wide.print(note, soft_wrap=True, markup=False)
        answer |= {"cluster_notes": list(notes)} if on or hosts else {}
    finish(json, answer)


def planned_machine(run: Run) -> Machine | None:
    """This machine if the run file names no cluster. It is probed only then, because GPU drivers answer slowly."""
    return None if planned(run) else this_machine()


def _found(run: Run) -> tuple[Run, Machine, tuple[str, ...]]:
    """The machines that Slurm, Ray or the hosts themselves report, and the run without keys that describe others."""
    from phalanx.launch.found_cluster import found_cluster

    found = found_cluster(run)
    described = dict.fromkeys(("name", *PARTS))
    run = replace(run, cluster=replace(run.cluster, **described, nodes=found.nodes))  # type: ignore[arg-type]
    return run, found.machine, found.notes


def _show(wide: Console, request: PlanRequest, top: int, files: tuple[Path | None, Path | None]) -> dict[str, Any]:
    """Shows the plan on the terminal, writes the requested files, and returns the object that --json prints."""
    report = planner.plan(request)
    show_plan(wide, report, top)
    png, html = files
    if png is not None or html is not None:
        # Other numbers of devices need further searches, so only the picture and the page have them.
        report = replace(report, scaling=planner.scaling(request, report.best.layout.ranks))
    if png is not None:
        from phalanx.dashboard.plan_picture import draw_plan

        write_file(png, lambda: draw_plan(report, png))
    if html is not None:
        from phalanx.dashboard.plan_page import page

        write_file(html, lambda: html.write_text(page(report), encoding="utf-8"))
    return report.to_json()


def _write(file: Path, tables: str) -> str:
    """Puts the tables of a layout into the run file."""
    from phalanx.spec.edit_file import with_tables

    text = with_tables(file.read_text(encoding="utf-8"), tables)
    loads(text, name=str(file))  # a file that would be refused is not written
    write_file(file, lambda: replace_file(file, text))
    return str(file)


def _limits(fits_in: str | None, deadline: str | None, budget: str | None) -> Limits:
    return Limits(
        fits_in=None if fits_in is None else parse_memory("--fits-in", fits_in),
        deadline=None if deadline is None else parse_seconds("--deadline", deadline) / 86400,
        budget=None if budget is None else parse_dollars("--budget", budget),
    )


def _solve(wide: Console, request: PlanRequest, what: What) -> dict[str, Any]:
    solution = planner.solve_report(request, what)
    show_solution(wide, solution)
    return solution.to_json()


def _compare(wide: Console, directory: Path, refit: bool) -> dict[str, Any]:
    machine = this_machine()
    comparison = feedback.compare(directory, machine)
    if not refit:
        show_comparison(wide, comparison)
        return comparison.to_json()
    constants = feedback.correction(comparison, machine)
    refitted = feedback.after(comparison, machine, constants)
    show_comparison(wide, comparison, refitted)
    path = write_profile(machine, constants)
    wide.print(
        f"saved to {path}: plans on this machine now promise {short_duration(refitted.seconds)} and {size(refitted.total_memory)} for this run",
        soft_wrap=True,
        markup=False,
    )
    answer = {"constants": constants, "file": str(path), "seconds": refitted.seconds, "memory": refitted.total_memory}
    return comparison.to_json(refitted) | answer


def _check_options(run_file: Path | None, compare: Path | None, options: Mapping[str, Any]) -> None:
    """Refuses options that exclude each other."""
    chosen = {name for name, value in options.items() if value}
    problems = []
    if run_file is None and compare is None:
        problems.append("phalanx plan needs a run file, such as `phalanx plan run.toml`, or --compare with a run directory.")
    if run_file is not None and compare is not None:
        problems.append(f"--compare {compare} reads the run file of that run: remove {run_file}.")
    if compare is None and "--refit" in chosen:
        problems.append("--refit stores what a run measured: name its directory with --compare.")
    if compare is not None and (excluded := sorted(chosen - {"--refit"})):
        problems.append(
            f"--compare shows a finished run: {' and '.join(excluded)} {'do' if len(excluded) > 1 else 'does'} not apply."
        )
    if "--given" in chosen and (excluded := sorted(chosen & {"--solve", "--free"})):
        problems.append(
            f"--given does not search, but {' and '.join(excluded)} {'do' if len(excluded) > 1 else 'does'}: use one of them."
        )
    if "--solve" in chosen and "--write" in chosen:
        problems.append("--solve answers another question than which layout is best: remove --write.")
    if "--solve" in chosen and (excluded := sorted(chosen & {"--png", "--html"})):
        problems.append(
            f"--solve prints an answer: {' and '.join(excluded)} {'draw' if len(excluded) > 1 else 'draws'} a plan: remove one of them."
        )
    problems += check_folders(options["--png"], options["--html"])
    refuse(problems)
