"""The `phalanx` command: one file per verb, put together here, and the only place where errors become exit codes.

0: done. 1: a run failed, or a proof did. 2: it could not start, nothing was begun. 75: stopped on request, saved, can be resumed.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

import typer

from phalanx._version import __version__
from phalanx.cli.output import print_error
from phalanx.spec.errors import PhalanxError

_VERBS = {
    "plan": "plan_cmd.plan",
    "rehearse": "rehearse_cmd.rehearse",
    "simulate": "simulate_cmd.simulate",
    "train": "train_cmd.train",
    "verify": "verify_cmd.verify",
    "generate": "generate_cmd.generate",
    "eval": "eval_cmd.eval",
    "data": "data_cmd.app",
    "checkpoint": "checkpoint_cmd.app",
    "import": "import_cmd.import_",
    "export": "export_cmd.export",
    "tokenize": "tokenize_cmd.tokenize",
    "models": "models_cmd.models",
    "clusters": "clusters_cmd.clusters",
    "schedule": "schedule_cmd.schedule",
    "bench": "bench_cmd.bench",
    "doctor": "doctor_cmd.doctor",
    "schema": "schema_cmd.schema",
}
"""Each verb, and where it is in this room. Only the one that is called is imported: all of them together take longer than a plan."""


@cache
def _app(only: str | None = None) -> typer.Typer:
    """The command, with all verbs or with one."""
    made = typer.Typer(
        name="phalanx",
        help="Train language models across one to thousands of GPUs from one run file.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    made.callback()(_options)
    for name in _VERBS if only is None else (only,):
        module, _, attribute = _VERBS[name].partition(".")
        verb = getattr(import_module(f"phalanx.cli.{module}"), attribute)
        if isinstance(verb, typer.Typer):
            made.add_typer(verb, name=name)
        else:
            made.command(name)(verb)
    return made


def __getattr__(name: str) -> Any:
    if name == "app":
        return _app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"phalanx {__version__}")
        raise typer.Exit


def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    try:
        # It exits by itself: 2 for a command line that typer does not understand, else what the verb says.
        _app(verb if verb in _VERBS else None)()
    except PhalanxError as error:
        print_error(error)
        sys.exit(error.exit_code)
