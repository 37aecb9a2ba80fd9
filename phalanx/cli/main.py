"""The `phalanx` command: registers the verbs and turns errors into exit codes.

0: success. 1: a run or a proof failed. 2: refused before anything started. 75: stopped on request, saved, can be resumed.
130: stopped on request, not saved. 141: the reader of the output has gone away.
"""

from __future__ import annotations

import re
import signal
import sys
from functools import cache
from importlib import import_module
from typing import Any

import typer
import typer.completion

from phalanx._version import __version__
from phalanx.cli.lost_terminal import flush_or_drop, tolerate_lost_readers
from phalanx.cli.output import console, print_error, print_json, wants_json
from phalanx.host.env import shell_completes
from phalanx.spec.errors import PhalanxError, RunError

_VERBS = {
    "init": "init_cmd.init",
    "plan": "plan_cmd.plan",
    "rehearse": "verify_cmd.rehearse",
    "simulate": "simulate_cmd.simulate",
    "train": "train_cmd.train",
    "launch": "launch_cmd.launch",
    "node": "node_cmd.node",
    "runs": "runs_cmd.runs",
    "lr-find": "runs_cmd.lr_find",
    "status": "watch_cmd.status",
    "logs": "watch_cmd.logs",
    "stop": "watch_cmd.stop",
    "watch": "page_cmd.watch",
    "report": "report_cmd.report",
    "trace": "trace_cmd.trace",
    "verify": "verify_cmd.verify",
    "generate": "model_cmd.generate",
    "chat": "chat_cmd.chat",
    "eval": "model_cmd.eval",
    "data": "data_cmd.app",
    "checkpoint": "checkpoint_cmd.app",
    "import": "checkpoint_cmd.import_",
    "export": "checkpoint_cmd.export_hf",
    "tokenize": "data_cmd.tokenize",
    "tokenizer": "tokenizer_cmd.app",
    "models": "list_cmd.models",
    "clusters": "list_cmd.clusters",
    "schedule": "schedule_cmd.schedule",
    "bench": "bench_cmd.app",
    "doctor": "list_cmd.doctor",
    "schema": "list_cmd.schema",
    "completion": "list_cmd.completion",
}
"""Module and function of each verb. Only the called verb is imported: importing all takes longer than a plan."""


_INTERRUPTED = 130
_DASHED_SETTING = re.compile(r"--([a-z_]+(?:\.[a-z_0-9]+)+)(?:=(.*))?")


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
    words = sys.argv[1:]
    console.stderr = wants_json()  # standard output is for the program that reads it
    tolerate_lost_readers(words[0] if words else "")
    if shell_completes():
        typer.completion.completion_init()  # a shell asks what may come next
    try:
        _refuse_settings_as_options(words)
        command = _without_types_of_flags(_app(words[0] if words and words[0] in _VERBS else None))
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # Returns the code of the verb, or what it returns; raises for an invalid command line.
        code = command(standalone_mode=False)
    except PhalanxError as error:
        print_error(error)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except typer.Abort:
        sys.exit(1)
    except Exception as error:
        # Python wraps an interrupt that comes while a class is made.
        if isinstance(error.__cause__ or error.__context__, KeyboardInterrupt):
            sys.exit(_INTERRUPTED)
        if not hasattr(error, "format_message"):  # the errors of the parser, whose class differs between versions of typer
            raise
        _print_usage_error(error)
        sys.exit(getattr(error, "exit_code", 2))
    finally:
        flush_or_drop()
    sys.exit(code if isinstance(code, int) else 0)


def _without_types_of_flags(app: typer.Typer) -> Any:
    """The command of an app. Its help shows a flag by its name alone: "--fresh", not "--fresh <bool>" as some versions of typer do."""

    def forget_types(command: Any) -> None:
        for parameter in command.params:
            if getattr(parameter, "is_flag", False):
                parameter.metavar = ""
        make_help_option = command.get_help_option  # the parser makes this option itself, and only when it is asked for

        def help_option(context: Any) -> Any:
            option = make_help_option(context)
            if option is not None:
                option.metavar = ""
            return option

        command.get_help_option = help_option
        for verb in getattr(command, "commands", {}).values():
            forget_types(verb)

    command = typer.main.get_command(app)
    forget_types(command)
    return command


def _refuse_settings_as_options(words: list[str]) -> None:
    """`--train.steps 5` is a setting with dashes, as other programs write it."""
    for place, word in enumerate(words):
        if (match := _DASHED_SETTING.fullmatch(word)) is not None:
            following = words[place + 1] if place + 1 < len(words) else "VALUE"
            value = match[2] if match[2] is not None else following
            raise RunError(f"{word}: settings have no dashes; write {match[1]}={value}")


def _print_usage_error(error: Any) -> None:
    from typer import rich_utils

    rich_utils.rich_format_error(error)
    if wants_json():
        print_json({"error": [error.format_message()]})
