"""Writes docs/cli.md: every verb with its arguments and options, read from the command itself.

python docs/make_cli.py
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer.main

from phalanx.cli.main import app

FILE = Path(__file__).with_name("cli.md")
_HEAD = """# Commands

`phalanx VERB --help` prints the same. Exit codes: 0 success; 1 a run or a proof failed; 2 refused before anything started; 75 stopped on request, saved, can be
resumed; 130 stopped on request, not saved.

"""


def text() -> str:
    """The page."""
    return _HEAD + "\n".join(
        _verb("phalanx", name, command) for name, command in sorted(typer.main.get_command(app).commands.items())
    )  # type: ignore[attr-defined]


def _verb(parent: str, name: str, command: Any) -> str:
    inner = getattr(command, "commands", {})
    own = "" if inner and not getattr(command, "invoke_without_command", False) else _entry(parent, name, command)
    return own + "".join(_verb(f"{parent} {name}", verb, child) for verb, child in sorted(inner.items()))


def _entry(parent: str, name: str, command: Any) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    words = " ".join(_word(argument) for argument in arguments)
    lines = [
        f"## `{parent} {name}`",
        "",
        f"    {parent} {name} {words}".rstrip() + (" [OPTIONS]" if options else ""),
        "",
        _cell(command.help or ""),
        "",
    ]
    rows = [(_word(argument), _cell(argument.help or "")) for argument in arguments]
    rows += [(", ".join(option.opts + option.secondary_opts), _cell(option.help or "")) for option in options]
    if rows:
        lines += ["| argument | meaning |", "|---|---|", *(f"| `{left}` | {right} |" for left, right in rows), ""]
    return "\n".join(lines) + "\n"


def _word(argument: Any) -> str:
    word = str(argument.metavar or argument.name.upper())
    if "[" in word:  # it says for itself what may be left out
        return word
    word = word.strip("{}") + (" …" if argument.nargs == -1 else "")
    return word if argument.required else f"[{word}]"


def _cell(help: str) -> str:
    return re.sub(r"\s+", " ", help).strip().replace("|", "\\|")


if __name__ == "__main__":
    FILE.write_text(text())
