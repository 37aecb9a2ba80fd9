"""What every verb shares: where text goes, the JSON object on the last line, and how errors look."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from phalanx.spec.errors import PhalanxError, RunError

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on the last line.")]

console = Console(highlight=False)
"""What a person reads."""


def print_json(value: dict[str, Any]) -> None:
    """One line, to be read by programs: never wrapped, never coloured."""
    print(json.dumps(value), flush=True)


def write_file(path: Path, write: Callable[[], Any]) -> None:
    """Have a file written that somebody asked for, and say so; what stands in the way is an error of theirs."""
    try:
        write()
    except OSError as error:
        raise RunError([f"{path}: cannot be written: {error.strerror}"]) from None
    console.print(f"wrote {path}", markup=False, soft_wrap=True)


def print_error(error: PhalanxError) -> None:
    """Each problem on a line of its own, on standard error."""
    problems = error.problems if isinstance(error, RunError) else (str(error),)
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    if "--json" in sys.argv[1:]:
        print_json({"error": list(problems)})
