"""The `phalanx` command: one file per verb, put together here, and the only place where errors become exit codes.

0: done. 1: a run failed, or a proof did. 2: it could not start, nothing was begun. 75: stopped on request, saved, can be resumed.
"""

from __future__ import annotations

import sys

import typer

from phalanx._version import __version__
from phalanx.cli import (
    checkpoint,
    data,
    doctor,
    eval,
    export,
    generate,
    import_,
    models,
    schedule,
    schema,
    tokenize,
    train,
    verify,
)
from phalanx.cli.output import print_error
from phalanx.spec.errors import PhalanxError

app = typer.Typer(
    name="phalanx",
    help="Train language models across one to thousands of GPUs from one run file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train")(train.train)
app.command("verify")(verify.verify)
app.command("generate")(generate.generate)
app.command("eval")(eval.eval)
app.add_typer(data.app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("import")(import_.import_)
app.command("export")(export.export)
app.command("tokenize")(tokenize.tokenize)
app.command("models")(models.models)
app.command("schedule")(schedule.schedule)
app.command("doctor")(doctor.doctor)
app.command("schema")(schema.schema)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"phalanx {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    pass


def main() -> None:
    try:
        app()  # exits by itself: 2 for a command line that typer does not understand, else what the verb says
    except PhalanxError as error:
        print_error(error)
        sys.exit(error.exit_code)
