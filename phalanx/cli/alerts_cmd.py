"""`phalanx alerts test`: sends a message to the webhook of a run file, as a run would."""

from __future__ import annotations

import time

import typer

from phalanx.cli.options import AsJson, Overrides, RunFile
from phalanx.cli.output import console, finish
from phalanx.host.env import secret
from phalanx.spec.errors import RunError, RunFailed, toml
from phalanx.spec.load import load
from phalanx.watch.sinks.alert_rules import Alert
from phalanx.watch.sinks.alert_sink import message, post

app = typer.Typer(help="Alerts of runs by webhook.", no_args_is_help=True)


@app.callback()
def alerts() -> None:
    """Alerts of runs by webhook: see [watch.alerts] of the run file."""


@app.command("test")
def test(run_file: RunFile, overrides: Overrides = None, json: AsJson = False) -> None:
    """Send a test message to watch.alerts.url of RUN.toml."""
    given = load(run_file, overrides or []).watch.alerts
    if given.url is None:
        raise RunError(f'{run_file}: watch.alerts.url is not set: set it to the address of a webhook, or to "env:NAME".')
    url = secret(given.url)
    if url is None:
        raise RunError(f"watch.alerts.url = {toml(given.url)}: the environment has no such variable: set it.")
    alert = Alert(kind="finished", sentence="This is a test message.", remedy="Nothing to do.", time=time.time())
    try:
        post(url, message(run_file.stem, alert))
    except OSError as error:
        raise RunFailed(f"watch.alerts.url does not take the message: {error}.") from None
    console.print(f"sent; runs of {run_file} report: {', '.join(given.on)}", markup=False, soft_wrap=True)
    finish(json, {"sent": True, "alerts": list(given.on)})
