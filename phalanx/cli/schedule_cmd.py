"""`phalanx schedule`: draws a pipeline schedule and reports its bubble."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from phalanx.cli.options import AsJson
from phalanx.cli.output import console, finish, write_file
from phalanx.dashboard.pictures import draw_schedule, schedule_legend, schedule_text
from phalanx.schedules.actions import Schedule, dump, load
from phalanx.schedules.makers import NAMES, make
from phalanx.schedules.timing import Durations, bubble, simulate
from phalanx.spec.errors import RunError, refuse

_MAX_ACTIONS = 200_000
_MAX_COLUMNS = 1000
"""A larger picture is not readable."""


def schedule(
    name: Annotated[str, Argument(metavar="NAME|FILE", help=f"One of {', '.join(NAMES)}, or a CSV file.")],
    ranks: Annotated[
        int | None,
        Option("--ranks", help="Number of pipeline ranks (layout.pipeline), each with one or more stages. Default: 4."),
    ] = None,
    stages: Annotated[int | None, Option(hidden=True)] = None,
    microbatches: Annotated[int | None, Option(help="Micro-batches per step. Default: 8.")] = None,
    stages_per_rank: Annotated[
        int | None, Option(help="Stages per rank (layout.stages). Default: 1 for gpipe and 1f1b, 2 for the others.")
    ] = None,
    times: Annotated[str, Option(metavar="F,I,W", help="Durations of forward, input backward and weight backward.")] = "1,1,1",
    png: Annotated[Path | None, Option(help="Draw the schedule to this file.")] = None,
    csv: Annotated[Path | None, Option(help="Write the schedule to this file, for layout.schedule_file.")] = None,
    json: AsJson = False,
) -> None:
    """Show the actions of each pipeline rank over time, and the fraction of the time in which ranks are idle."""
    if stages is not None:
        raise RunError(
            f"--stages {stages} was the number of pipeline ranks: write --ranks {stages} for layout.pipeline = {stages}, "
            f"or --stages-per-rank {stages} for layout.stages = {stages}."
        )
    chosen = _open(name, ranks, microbatches, stages_per_rank)
    forward, backward, weight = _times(times)
    timeline = simulate(chosen, Durations(forward=float(forward), input=float(backward), weight=float(weight)))
    idle = bubble(timeline)
    lines = [f"{chosen.name}: {chosen.stages} stages on {chosen.ranks} pipeline ranks, {chosen.micro_batches} micro-batches"]
    unit = _common_unit(forward, backward, weight)
    columns = round(timeline.stop / unit)
    too_wide = f"({columns} columns are too many to print; --png draws it)"
    lines += (
        [too_wide] if columns > _MAX_COLUMNS else schedule_text(timeline, unit, console.width if console.is_terminal else None)
    )
    lines.append(schedule_legend(chosen))
    lines.append(f"bubble: {idle:.1%} of the time, if forward, input backward and weight backward take {times}")
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    if png is not None:
        write_file(png, lambda: draw_schedule(chosen, timeline, png))
    if csv is not None:
        write_file(csv, lambda: csv.write_text(dump(chosen)))
    counts = {name: getattr(chosen, name) for name in ("name", "ranks", "stages", "micro_batches")}
    actions = [[str(action) for action in row] for row in chosen.actions]
    finish(json, counts | {"bubble": idle, "length": timeline.stop, "actions": actions})


def _open(name: str, ranks: int | None, microbatches: int | None, per_rank: int | None) -> Schedule:
    if "." not in name and "/" not in name:
        ranks, microbatches = 4 if ranks is None else ranks, 8 if microbatches is None else microbatches
        if ranks * microbatches * (per_rank or 1) > _MAX_ACTIONS:
            raise RunError(f"--ranks {ranks} with --microbatches {microbatches} is more than {_MAX_ACTIONS} actions: use fewer")
        return make(name, ranks, microbatches, per_rank)
    chosen = load(Path(name))
    options = {
        "--ranks": (ranks, chosen.ranks),
        "--microbatches": (microbatches, chosen.micro_batches),
        "--stages-per-rank": (per_rank, len(chosen.stages_of(0))),
    }
    wrong = [
        f"{option} {want}: {name} is for {has}; remove the option"
        for option, (want, has) in options.items()
        if want not in (None, has)
    ]
    refuse(wrong)
    return chosen


def _times(given: str) -> tuple[Fraction, Fraction, Fraction]:
    try:
        forward, backward, weight = (Fraction(part.strip()) for part in given.split(","))
    except (ValueError, ZeroDivisionError):
        raise RunError(f'--times "{given}": give three numbers, such as 1,1,1') from None
    if not all(Fraction(1, 1000) <= time <= 1000 for time in (forward, backward, weight)):
        raise RunError(f'--times "{given}": each must lie between 0.001 and 1000')
    return forward, backward, weight


def _common_unit(*times: Fraction) -> float:
    """The longest time of which all are multiples."""
    denominator = math.lcm(*(time.denominator for time in times))
    return math.gcd(*(time.numerator * denominator // time.denominator for time in times)) / denominator
