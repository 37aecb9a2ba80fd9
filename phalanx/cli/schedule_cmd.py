"""`phalanx schedule`: a pipeline schedule as a picture, with how much of the time its ranks wait."""

from __future__ import annotations

import math
from fractions import Fraction
from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.output import AsJson, console, print_json, write_file
from phalanx.dashboard.pictures import draw_schedule, schedule_legend, schedule_text
from phalanx.schedules.actions import Schedule
from phalanx.schedules.csv_format import dump, load
from phalanx.schedules.makers import NAMES, make
from phalanx.schedules.timing import Durations, bubble, simulate
from phalanx.spec.errors import RunError

_MOST_ACTIONS = 200_000
_MOST_COLUMNS = 1000
"""Beyond these nobody could read it."""


def schedule(
    name: Annotated[str, typer.Argument(metavar="NAME|FILE", help=f"One of {', '.join(NAMES)}; or a CSV file of your own.")],
    ranks: Annotated[
        int | None, typer.Option("--ranks", "--stages", help="Pipeline ranks, as layout.pipeline; left out: 4.")
    ] = None,
    microbatches: Annotated[int | None, typer.Option(help="Micro-batches of a step; left out: 8.")] = None,
    stages_per_rank: Annotated[
        int | None, typer.Option(help="As layout.stages; left out: 1 for gpipe and 1f1b, 2 for the others.")
    ] = None,
    times: Annotated[
        str, typer.Option(metavar="F,I,W", help="How long forward, input backward and weight backward take.")
    ] = "1,1,1",
    png: Annotated[Path | None, typer.Option(help="Draw it into this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write it into this file, for layout.schedule_file.")] = None,
    json: AsJson = False,
) -> None:
    """Show what each rank of a pipeline does when. --stages counts pipeline ranks; each of them holds one stage or several."""
    found = _find(name, ranks, microbatches, stages_per_rank)
    forward, backward, weight = _times(times)
    timeline = simulate(found, Durations(forward=float(forward), input=float(backward), weight=float(weight)))
    idle = bubble(timeline)
    lines = [f"{found.name}: {found.stages} stages on {found.ranks} pipeline ranks, {found.micro_batches} micro-batches"]
    unit = _together(forward, backward, weight)
    columns = round(timeline.stop / unit)
    lines += (
        schedule_text(timeline, unit)
        if columns <= _MOST_COLUMNS
        else [f"({columns} columns are too many to print; --png draws it)"]
    )
    lines += [
        schedule_legend(found),
        f"idle {idle:.1%} of the time where forward, input backward and weight backward take {times}",
    ]
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    if png is not None:
        write_file(png, lambda: draw_schedule(found, timeline, png))
    if csv is not None:
        write_file(csv, lambda: csv.write_text(dump(found)))
    if json:
        print_json(
            {
                "name": found.name,
                "ranks": found.ranks,
                "stages": found.stages,
                "micro_batches": found.micro_batches,
                "bubble": idle,
                "length": timeline.stop,
                "actions": [[str(action) for action in row] for row in found.actions],
            }
        )


def _find(name: str, ranks: int | None, microbatches: int | None, per_rank: int | None) -> Schedule:
    if "." not in name and "/" not in name:
        ranks, microbatches = 4 if ranks is None else ranks, 8 if microbatches is None else microbatches
        if ranks * microbatches * (per_rank or 1) > _MOST_ACTIONS:
            raise RunError(
                [f"--ranks {ranks} with --microbatches {microbatches} is more than {_MOST_ACTIONS} actions: ask for fewer"]
            )
        return make(name, ranks, microbatches, per_rank)
    found = load(Path(name))
    asked = {
        "--ranks": (ranks, found.ranks),
        "--microbatches": (microbatches, found.micro_batches),
        "--stages-per-rank": (per_rank, len(found.stages_of(0))),
    }
    wrong = [
        f"{option} {want}: {name} is for {has}; leave the option out"
        for option, (want, has) in asked.items()
        if want not in (None, has)
    ]
    if wrong:
        raise RunError(wrong)
    return found


def _times(given: str) -> tuple[Fraction, Fraction, Fraction]:
    try:
        forward, backward, weight = (Fraction(part.strip()) for part in given.split(","))
    except (ValueError, ZeroDivisionError):
        raise RunError([f'--times "{given}": give three numbers, such as 1,1,1']) from None
    if not all(Fraction(1, 1000) <= time <= 1000 for time in (forward, backward, weight)):
        raise RunError([f'--times "{given}": each must lie between 0.001 and 1000'])
    return forward, backward, weight


def _together(*times: Fraction) -> float:
    """The longest time that all are multiples of."""
    below = math.lcm(*(time.denominator for time in times))
    return math.gcd(*(time.numerator * below // time.denominator for time in times)) / below
