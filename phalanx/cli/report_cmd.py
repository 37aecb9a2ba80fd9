"""`phalanx report`: one document about a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from phalanx.cli.options import AsJson
from phalanx.cli.output import console, finish
from phalanx.spec.errors import RunError


def report(
    run_dir: Annotated[Path, Argument(metavar="RUN_DIR", help="Directory of the run.")],
    output: Annotated[
        Path, Option("--output", "-o", help="File to write; its name ends with .html, .md or .pdf. Default: report.html.")
    ] = Path("report.html"),
    json: AsJson = False,
) -> None:
    """Write one document with pictures about a run, running or ended: figures, curves, what was promised, what broke. It needs no network."""
    from phalanx.watch.followed_run import FollowedRun
    from phalanx.watch.report_files import write_report
    from phalanx.watch.run_report import report_of

    run = FollowedRun(run_dir.resolve().name, run_dir)
    if not run.rundir.events_file.is_file():
        raise RunError(f"{run_dir} is no run directory: it has no events.jsonl. `phalanx runs` lists those below a folder.")
    while not run.catch_up(1.0):
        pass
    try:
        text = run.rundir.run_file.read_text(errors="replace")
    except OSError:
        text = ""
    write_report(report_of(run, text), output)
    console.print(f"wrote {output}: step {run.digest.last_step:,}, {run.state}", markup=False, soft_wrap=True)
    finish(json, {"file": str(output), "step": run.digest.last_step, "state": run.state})
