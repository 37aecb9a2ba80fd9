"""`phalanx simulate`: a whole run with failures, recovered from by the live policy; or one step with links that messages share."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from phalanx.cli.output import AsJson, console, print_json, write_file
from phalanx.spec.errors import RunError
from phalanx.spec.layout import Layout
from phalanx.spec.load import load

if TYPE_CHECKING:
    from phalanx.planning.machines.cluster import Hardware
    from phalanx.planning.search.candidate import Candidate
    from phalanx.planning.simulate.cluster_model import SimulationRequest
    from phalanx.spec.run import Run

_UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d|)", re.ASCII)


Overrides = Annotated[
    list[str] | None, typer.Argument(help="Settings to change, e.g. cluster.name=h100-16384 resilience.spares=8.")
]
Spares = Annotated[
    int | None,
    typer.Option(help="Spare nodes beside those of the layout; left out: resilience.spares, or what the cluster has left."),
]
Interval = Annotated[
    str | None, typer.Option(metavar="5min", help="Time between saves; left out: the run file's, or what the trainer would do.")
]
Keep = Annotated[
    Literal["replicas", "memory", "disk"] | None,
    typer.Option(help="Where the state is found again after a failure; left out: as the live system would have it."),
]
Restart = Annotated[
    str | None, typer.Option(metavar="10min", help="From the decision about a failure to the next step; left out: the plan's.")
]
Stall = Annotated[str | None, typer.Option(metavar="5s", help="That training waits for a save; left out: the plan's.")]
Maintenance = Annotated[
    str | None, typer.Option(metavar="7d/4h", help="Planned pauses: how often, and how long. Left out: none.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Do not try other intervals and numbers of spares.")]
OneStep = Annotated[
    bool, typer.Option("--step", help="Simulate one step instead: who works when, and which messages share links.")
]
Trace = Annotated[Path | None, typer.Option(help="--step: write it into this file, for Perfetto (ui.perfetto.dev).")]


def simulate(
    run_file: Annotated[Path, typer.Argument(help="The run file.", metavar="RUN.toml")],
    overrides: Overrides = None,
    days: Annotated[float | None, typer.Option(help="Days to simulate; left out: until the run's last step.")] = None,
    seed: Annotated[int, typer.Option(help="Of the failures that are drawn.")] = 0,
    runs: Annotated[int, typer.Option(min=1, max=10_000, help="Runs to simulate.")] = 20,
    spares: Spares = None,
    interval: Interval = None,
    keep: Keep = None,
    restart: Restart = None,
    stall: Stall = None,
    repair: Annotated[str, typer.Option(metavar="4h", help="Until a lost node is back, on average.")] = "4h",
    maintenance: Maintenance = None,
    quick: Quick = False,
    step: OneStep = False,
    png: Annotated[Path | None, typer.Option(help="Draw it into this file.")] = None,
    trace: Trace = None,
    json: AsJson = False,
) -> None:
    """Simulate a whole run with the failures of its cluster and the live recovery policy; or, with --step, one step of it."""
    if trace is not None and not step:
        raise RunError(["--trace is of one step: give --step too, or --png for a picture of the whole run."])
    if lost := [path for path in (png, trace) if path is not None and not path.parent.is_dir()]:
        raise RunError([f"{path}: cannot be written: there is no folder {path.parent}" for path in lost])
    from phalanx.planning.simulate.cluster_model import SimulationRequest

    request = SimulationRequest(
        days=days,
        seed=seed,
        runs=runs,
        spares=spares,
        interval=_seconds("--interval", interval),
        keep=keep,
        restart=_seconds("--restart", restart),
        stall=_seconds("--stall", stall),
        repair=_seconds("--repair", repair) or 0.0,
        maintenance=_maintenance(maintenance),
        study=not quick,
    )
    run = load(run_file, overrides or [])
    hardware = _hardware(run)
    option = _option(run, hardware)
    found = _step(run, hardware, option, (png, trace)) if step else _whole(run, hardware, option, request, png)
    if json:
        print_json(found)


def _whole(run: Run, hardware: Hardware, candidate: Candidate, request: SimulationRequest, png: Path | None) -> dict[str, Any]:
    from phalanx.dashboard.simulation_view import draw_run, run_text
    from phalanx.planning.search.search import judge
    from phalanx.planning.simulate.simulation import simulate

    report = simulate(run, hardware, candidate, request, judge)
    console.print("\n".join(run_text(report)), markup=False, soft_wrap=True)
    if png is not None:
        write_file(png, lambda: draw_run(report, png))
    return {"seed": request.seed} | report.to_json()


def _step(run: Run, hardware: Hardware, candidate: Candidate, files: tuple[Path | None, Path | None]) -> dict[str, Any]:
    from phalanx.dashboard.simulation_view import draw_step, step_text, step_trace
    from phalanx.planning.simulate.simulated_step import simulate_candidate

    step, (png, trace) = simulate_candidate(run, hardware, candidate), files
    console.print("\n".join(step_text(step, candidate.seconds)), markup=False, soft_wrap=True)
    if png is not None:
        write_file(png, lambda: draw_step(step, png))
    if trace is not None:
        write_file(trace, lambda: trace.write_text(step_trace(step)))
    exposed = {name: step.split.get(name, 0.0) for name in ("tensor", "context", "expert", "pipeline")}
    # Gradients and shards are exposed after the last micro-batch: the plan knows how long.
    exposed["data"] = candidate.split.get("data", 0.0)
    return {
        "schedule": step.schedule.name,
        "ranks": step.schedule.ranks,
        "stages": step.schedule.stages,
        "micro_batches": step.schedule.micro_batches,
        "seconds": step.seconds,
        "promised": candidate.seconds,
        "bubble": step.bubble,
        "split": step.split,
        "exposed": {name: seconds for name, seconds in exposed.items() if seconds > 0},
    }


def _hardware(run: Run) -> Hardware:
    from phalanx.planning.machines.hardware import hardware, planned

    if planned(run):
        return hardware(run, None)
    from phalanx.host.env import visible_gpus
    from phalanx.host.probe import probe

    return hardware(run, probe(visible_gpus()))


def _option(run: Run, hardware: Hardware) -> Candidate:
    """What is simulated: the run file's layout, or the plan's winner where it has none."""
    from phalanx.planning.planner import search
    from phalanx.planning.search.search import judge

    return search(run, hardware).best if run.layout == Layout() else judge(run, hardware)


def _seconds(option: str, given: str | None) -> float | None:
    """Such as 90s, 5min, 4h, 7d; a number alone is seconds."""
    if given is None:
        return None
    match = _DURATION.fullmatch(given.strip())
    if match is None or not math.isfinite(float(match[1])):
        raise RunError([f'{option} "{given}": give a time such as 90s, 5min, 4h or 7d.'])
    return float(match[1]) * _UNITS[match[2]]


def _maintenance(given: str | None) -> tuple[float, float] | None:
    if given is None:
        return None
    every, between, takes = given.partition("/")
    often, long = (_seconds("--maintenance", every), _seconds("--maintenance", takes)) if between else (None, None)
    if not often or long is None:
        raise RunError([f'--maintenance "{given}": give how often and how long, such as 7d/4h.'])
    return often, long
