"""`phalanx bench` and `phalanx doctor`: measure and examine this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from phalanx.cli.options import AsJson
from phalanx.cli.output import console, print_json
from phalanx.host.probe import this_machine


def bench(
    minutes: Annotated[float, typer.Option(min=0.2, max=60.0, help="Maximum time to take.")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="File to write. Default: the file that plans on this machine read.")] = None,
    json: AsJson = False,
) -> None:
    """Measure matrix products, attention, memory, links, kernel launches, disk and training steps of this machine. Plans use the
    result."""
    from phalanx.calibration.measure_machine import bench as measure
    from phalanx.dashboard.plan_text import show_bench
    from phalanx.host.machine_profile import profile_file, write_profile

    machine = this_machine()
    with console.status("measuring") as status:
        report = measure(machine, Path.cwd(), minutes, status.update)
    path = write_profile(machine, report.constants, report.row_tables(), out)
    show_bench(console, report.rows, report.constants)
    use = "plans on this machine use it from now on" if path == profile_file() else "plans do not read it there"
    console.print(f"measured in {report.seconds:.0f} s; saved to {path}: {use}")
    if json:
        print_json(report.to_json() | {"file": str(path)})


def doctor(
    directory: Annotated[Path, typer.Argument(help="The directory in which runs would be written.")] = Path("."),
    json: AsJson = False,
) -> None:
    """Show what this machine has and what would stop a run. The exit code is 1 if something would."""
    from phalanx.launch.health_check import examine

    report = examine(directory, this_machine())
    report.render(console)
    if json:
        print_json(report.to_json())
    if report.problems:
        raise typer.Exit(1)
