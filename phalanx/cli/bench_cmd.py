"""`phalanx bench`: measures this machine, and keeps what it measured for plans to come."""

from __future__ import annotations

from pathlib import Path

import typer

from phalanx.cli.output import console, print_json


def bench(
    minutes: float = typer.Option(5.0, min=0.2, max=60.0, help="Most time to take."),
    out: Path | None = typer.Option(None, help="File to write; left out: where plans on this machine look for it."),
    json: bool = typer.Option(False, "--json", help="Also print what was measured as one JSON object, on the last line."),
) -> None:
    """Measure this machine: matrix products, attention, memory, links, launches, disk, real steps. Plans then use it."""
    from phalanx.calibration.measure_machine import bench as measure
    from phalanx.dashboard.plan_text import show_bench
    from phalanx.host.env import visible_gpus
    from phalanx.host.machine_profile import profile_file, write_profile
    from phalanx.host.probe import probe

    machine = probe(visible_gpus())
    with console.status("measuring") as status:
        report = measure(machine, Path.cwd(), minutes, status.update)
    path = write_profile(machine, report.constants, report.row_tables(), out)
    show_bench(console, report.rows, report.constants)
    use = "plans on this machine use it from now on" if path == profile_file() else "plans do not look there"
    console.print(f"measured in {report.seconds:.0f} s; saved to {path}: {use}")
    if json:
        print_json(report.to_json() | {"file": str(path)})
