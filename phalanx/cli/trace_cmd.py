"""`phalanx trace`: the timeline of a run, as a file for Perfetto and as an answer in words."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import Argument, Option

from phalanx.cli.options import AsJson
from phalanx.cli.output import console, finish
from phalanx.dashboard.numbers import percent, short_duration
from phalanx.spec.errors import RunError

if TYPE_CHECKING:
    from phalanx.watch.late_ranks import Diagnosis

_ENOUGH = 20
"""Steps from which a sentence about most steps can be said. Of fewer, recorded ones around them are read too."""


def trace(
    run_dir: Annotated[Path, Argument(metavar="RUN_DIR", help="Directory of a run with watch.timeline = true.")],
    steps: Annotated[str | None, Option(help="Steps such as 100-102, 100- or 100. Default: all that were recorded.")] = None,
    output: Annotated[
        Path | None, Option("--output", "-o", help="Write a file for ui.perfetto.dev; its name ends with .json or .json.gz.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Say which rank the others wait for, where and why; with -o, write the timeline of all ranks for Perfetto."""
    from phalanx.events.timeline_files import has_timeline
    from phalanx.watch.late_ranks import diagnose
    from phalanx.watch.perfetto_file import write_perfetto
    from phalanx.watch.step_timeline import load_timeline

    first, last = _range(steps)
    if output is not None and not output.name.endswith((".json", ".json.gz")):
        raise RunError(f"-o {output}: the name must end with .json or .json.gz.")
    if not (run_dir / "events.jsonl").is_file():
        raise RunError(f"{run_dir} is no run directory: it has no events.jsonl. `phalanx runs` lists those below a folder.")
    if not has_timeline(run_dir):
        raise RunError(
            f"{run_dir} has no timeline: its run did not record one. Train with watch.timeline=true; a run can be resumed with it."
        )
    chosen = load_timeline(run_dir, first, last)
    if not chosen.steps:
        kept = sorted(load_timeline(run_dir).steps)
        raise RunError(
            f"--steps {steps}: not in the timeline of {run_dir}, which has steps {kept[0]} to {kept[-1]}. watch.timeline_steps sets how "
            f"many are kept."
            if kept
            else f"{run_dir}/timeline: no complete step can be read."
        )
    read = chosen
    if steps is not None and len(chosen.steps) < _ENOUGH:
        read = load_timeline(run_dir, max(0, min(chosen.steps) - _ENOUGH), max(chosen.steps) + _ENOUGH)
    diagnosis = diagnose(read)
    sentences = diagnosis.sentences()
    _print(diagnosis, sentences, chosen.clock_error)
    slices = None
    if output is not None:
        slices = write_perfetto(chosen, output)
        console.print(
            f"wrote {output}: {len(chosen.steps)} steps of {len(chosen.ranks)} ranks, {slices:,} slices. Open it at https://ui.perfetto.dev.",
            markup=False,
            soft_wrap=True,
        )
    finish(json, {"answer": sentences, "file": None if output is None else str(output), "slices": slices, **asdict(diagnosis)})


def _range(steps: str | None) -> tuple[int, int | None]:
    if steps is None:
        return 0, None
    match = re.fullmatch(r"(\d{1,12})(-(\d{1,12})?)?", steps)
    if match is None or (match[3] is not None and int(match[3]) < int(match[1])):
        raise RunError(f"--steps {steps}: write a range such as 100-102, 100- or a single step.")
    first = int(match[1])
    return first, int(match[3]) if match[3] else (None if match[2] else first)


def _print(diagnosis: Diagnosis, sentences: list[str], clock_error: float | None) -> None:
    if diagnosis.steps:
        table = Table(box=None, pad_edge=False)
        for name in ("part of a step", "median rank", "of the step", "slowest rank"):
            table.add_column(name, justify="left" if name == "part of a step" else "right")
        for part in diagnosis.parts:
            slowest = f"{short_duration(part.longest)} (rank {part.slowest})" if diagnosis.ranks > 1 else ""
            table.add_row(part.name, short_duration(part.seconds), percent(part.share), slowest)
        first, last = diagnosis.steps[0], diagnosis.steps[-1]
        console.print(
            f"{len(diagnosis.steps)} steps from {first} to {last} on {diagnosis.ranks} ranks, {short_duration(diagnosis.step_seconds)} each",
            markup=False,
        )
        console.print(table)
    else:
        console.print("No step was recorded by all ranks: there is nothing to compare.")
    if clock_error is None:
        console.print("Clocks of different hosts were not compared: their times are those of each host.")
    elif clock_error:
        console.print(f"Clocks of different hosts agree within {short_duration(clock_error)}.")
    for sentence in sentences:
        console.print(sentence, markup=False, soft_wrap=True)
