"""`phalanx simulate`: a whole run with failures and the live recovery policy, or one step with shared network links."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from typer import Option

from phalanx.cli.options import AsJson, Overrides, RunFile, check_folders, parse_duration
from phalanx.cli.output import console, finish, write_file
from phalanx.cli.plan_cmd import planned_machine
from phalanx.dashboard.simulation_view import draw_run, draw_step, run_text, step_text, step_trace
from phalanx.launch.model_check import measured
from phalanx.planning.machines.cluster import Hardware
from phalanx.planning.machines.hardware import hardware as hardware_of
from phalanx.planning.planner import search
from phalanx.planning.search.candidate import Candidate
from phalanx.planning.search.search import judge
from phalanx.planning.simulate.simulated_step import simulate_candidate
from phalanx.planning.simulate.simulation import SimulationRequest
from phalanx.planning.simulate.simulation import simulate as simulate_run
from phalanx.spec.errors import RunError, refuse
from phalanx.spec.layout import Layout
from phalanx.spec.load import load
from phalanx.spec.run import Run

Spares = Annotated[
    int | None,
    Option(help="Spare nodes. Default: resilience.spares, or the nodes that the layout leaves free."),
]
Interval = Annotated[
    str | None, Option(metavar="5min", help="Time between saves. Default: that of the run file, or of the trainer.")
]
Keep = Annotated[
    Literal["replicas", "memory", "disk"] | None,
    Option(help="Where the state is restored from after a failure. Default: as in the live system."),
]
Restart = Annotated[
    str | None,
    Option(metavar="10min", help="Time from the decision about a failure to the next step. Default: that of the plan."),
]
Stall = Annotated[str | None, Option(metavar="5s", help="Time that training waits for a save. Default: that of the plan.")]
Maintenance = Annotated[str | None, Option(metavar="7d/4h", help="Planned pauses: how often, and how long. Default: none.")]
Quick = Annotated[bool, Option("--quick", help="Do not try other save intervals and numbers of spares.")]
OneStep = Annotated[
    bool, Option("--step", help="Simulate one step instead: when each rank works, and which messages share links.")
]
Trace = Annotated[Path | None, Option(help="With --step: write a trace to this file, for Perfetto (ui.perfetto.dev).")]


def simulate(
    run_file: RunFile,
    overrides: Overrides = None,
    days: Annotated[float | None, Option(help="Days to simulate. Default: until the last step.")] = None,
    seed: Annotated[int, Option(help="Seed of the failures.")] = 0,
    runs: Annotated[int, Option(min=1, max=10_000, help="Number of runs to simulate.")] = 20,
    spares: Spares = None,
    interval: Interval = None,
    keep: Keep = None,
    restart: Restart = None,
    stall: Stall = None,
    repair: Annotated[str, Option(metavar="4h", help="Mean time until a lost node returns.")] = "4h",
    maintenance: Maintenance = None,
    quick: Quick = False,
    step: OneStep = False,
    png: Annotated[Path | None, Option(help="Draw the run or the step to this file.")] = None,
    trace: Trace = None,
    json: AsJson = False,
) -> None:
    """Simulate a whole run with the failures of its cluster and the live recovery policy. With --step, simulate one step."""
    if trace is not None and not step:
        raise RunError("--trace shows one step: add --step, or use --png for a picture of the whole run.")
    refuse(check_folders(png, trace))
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
    machine = planned_machine(run)
    run, hardware = measured(run, machine), hardware_of(run, machine)
    # The run file's layout, or the best one if it has none.
    candidate = search(run, hardware).best if run.layout == Layout() else judge(run, hardware)
    result = _step(run, hardware, candidate, (png, trace)) if step else _whole(run, hardware, candidate, request, png)
    finish(json, result)


def _whole(run: Run, hardware: Hardware, candidate: Candidate, request: SimulationRequest, png: Path | None) -> dict[str, Any]:
    report = simulate_run(run, hardware, candidate, request)
    console.print("\n".join(run_text(report)), markup=False, soft_wrap=True)
    if png is not None:
        write_file(png, lambda: draw_run(report, png))
    return {"seed": request.seed} | report.to_json()


def _step(run: Run, hardware: Hardware, candidate: Candidate, files: tuple[Path | None, Path | None]) -> dict[str, Any]:
    step, (png, trace) = simulate_candidate(run, hardware, candidate), files
    console.print("\n".join(step_text(step, candidate.seconds)), markup=False, soft_wrap=True)
    if png is not None:
        write_file(png, lambda: draw_step(step, png))
    if trace is not None:
        write_file(trace, lambda: trace.write_text(step_trace(step)))
    exposed = {name: step.split.get(name, 0.0) for name in ("tensor", "context", "expert", "pipeline")}
    # Gradients and shards are exposed after the last micro-batch: the plan knows how long.
    exposed["data"] = candidate.split.get("data", 0.0)
    counts = {name: getattr(step.schedule, name) for name in ("ranks", "stages", "micro_batches")}
    times = {name: getattr(step, name) for name in ("seconds", "bubble", "split")}
    waits = {name: seconds for name, seconds in exposed.items() if seconds > 0}
    return {"schedule": step.schedule.name} | counts | times | {"promised": candidate.seconds, "exposed": waits}


def _seconds(option: str, given: str | None) -> float | None:
    return None if given is None else parse_duration(option, given)


def _maintenance(given: str | None) -> tuple[float, float] | None:
    if given is None:
        return None
    interval, slash, length = given.partition("/")
    if not slash or not parse_duration("--maintenance", interval):
        raise RunError(f'--maintenance "{given}": give how often and how long, such as 7d/4h.')
    return parse_duration("--maintenance", interval), parse_duration("--maintenance", length)
