"""The `phalanx` command: registers the verbs and turns errors into exit codes.

0: success. 1: a run or a proof failed. 2: refused before anything started. 75: stopped on request, saved, can be resumed.
130: stopped on request, not saved. 141: the reader of the output has gone away.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

import typer

from phalanx._version import __version__
from phalanx.cli.lost_terminal import flush_or_drop, tolerate_lost_readers
from phalanx.cli.output import print_error
from phalanx.spec.errors import PhalanxError

_VERBS = {
    "plan": "plan_cmd.plan",
    "rehearse": "verify_cmd.rehearse",
    "simulate": "simulate_cmd.simulate",
    "train": "train_cmd.train",
    "launch": "launch_cmd.launch",
    "node": "node_cmd.node",
    "status": "watch_cmd.status",
    "logs": "watch_cmd.logs",
    "stop": "watch_cmd.stop",
    "verify": "verify_cmd.verify",
    "generate": "model_cmd.generate",
    "eval": "model_cmd.eval",
    "data": "data_cmd.app",
    "checkpoint": "checkpoint_cmd.app",
    "import": "checkpoint_cmd.import_",
    "export": "checkpoint_cmd.export_hf",
    "tokenize": "data_cmd.tokenize",
    "models": "list_cmd.models",
    "clusters": "list_cmd.clusters",
    "schedule": "schedule_cmd.schedule",
    "bench": "bench_cmd.app",
    "doctor": "list_cmd.doctor",
    "schema": "list_cmd.schema",
}
"""Module and function of each verb. Only the called verb is imported: importing all takes longer than a plan."""


@cache
def _app(only: str | None = None) -> typer.Typer:
    """The command with all verbs, or with one."""
    app = typer.Typer(
        name="phalanx",
        help="Train language models across one to thousands of GPUs from one run file.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    app.callback()(_options)
    for name in _VERBS if only is None else (only,):
        module, _, attribute = _VERBS[name].partition(".")
        verb = getattr(import_module(f"phalanx.cli.{module}"), attribute)
        if isinstance(verb, typer.Typer):
            app.add_typer(verb, name=name)
        else:
            app.command(name)(verb)
    return app


def __getattr__(name: str) -> Any:
    if name == "app":
        return _app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _print_version(requested: bool) -> None:
    if requested:
        print(f"phalanx {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    tolerate_lost_readers(verb)
    try:
        # Exits by itself: with 2 for an invalid command line, else with the code of the verb.
        _app(verb if verb in _VERBS else None)()
    except PhalanxError as error:
        print_error(error)
        sys.exit(error.exit_code)
    finally:
        flush_or_drop()
