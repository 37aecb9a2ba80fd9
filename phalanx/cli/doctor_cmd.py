"""`phalanx doctor`: what this machine has, and what would stop a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.output import AsJson, console, print_json
from phalanx.host.env import visible_gpus
from phalanx.host.probe import probe
from phalanx.launch.health_check import examine


def doctor(
    directory: Annotated[Path, typer.Argument(help="Where runs would be written.")] = Path("."),
    json: AsJson = False,
) -> None:
    """Show what this machine has and what would stop a run; exit code 1 if something would."""
    report = examine(directory, probe(visible_gpus()))
    report.render(console)
    if json:
        print_json(report.to_json())
    if report.problems:
        raise typer.Exit(1)
