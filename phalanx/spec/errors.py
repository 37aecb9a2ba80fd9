"""The errors that a person can fix, and how their messages word values and remedies. Raised in every room, printed by the CLI."""

from __future__ import annotations

import datetime
import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_NOUNS = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    dict: "a table",
    list: "a list",
    tuple: "a list",
}
_MAX_QUOTE = 60
_ESCAPES = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}
_ESCAPED = re.compile(r'[\x00-\x1f"\\\x7f]')


class PhalanxError(Exception):
    """A problem that the user can fix. The CLI prints it without a traceback and exits with `exit_code`."""

    exit_code = 2


RUN_FILE = "RUN.toml"
"""The name of the run file in a command that an error recommends; the command line writes the real one in its place."""


class RunError(PhalanxError):
    """Everything that is wrong with a run, reported before any process starts."""

    def __init__(self, problems: str | Sequence[str]):
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))

    def __reduce__(self) -> tuple[type[RunError], tuple[tuple[str, ...]]]:
        """Makes the error picklable, so that it can cross processes."""
        return RunError, (self.problems,)


def refuse(problems: Sequence[str]) -> None:
    """Raises RunError if there are problems."""
    if problems:
        raise RunError(problems)


class RunFailed(PhalanxError):
    """A run that started and could not continue: a worker crashed, or too many steps were skipped."""

    exit_code = 1


def toml(value: Any) -> str:
    """A value as a run file would write it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int) and value.bit_length() > 64:
        return hex(value)  # Python refuses to print integers of thousands of digits in decimal
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, str):
        return '"' + _ESCAPED.sub(lambda m: _ESCAPES.get(m.group()) or f"\\u{ord(m.group()):04x}", value) + '"'
    if isinstance(value, list | tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {toml(item)}" for name, item in value.items()) + " }"
    return str(value)


def shorten(text: str) -> str:
    """A quoted text, cut where it would drown the sentence."""
    return text if len(text) <= _MAX_QUOTE else text[: _MAX_QUOTE - 1] + "…"


def quote(value: Any) -> str:
    """A value as TOML, shortened, inside a sentence."""
    return shorten(toml(value))


def noun(value: Any) -> str:
    """The type of a value, in words."""
    if isinstance(value, datetime.date | datetime.time):
        return "a date or time"
    return _NOUNS.get(type(value), f"a Python {type(value).__name__}")


def either(choices: Iterable[object]) -> str:
    """Choices as "a, b or c"."""
    *first, last = [str(choice) for choice in choices] or [""]
    return f"{', '.join(first)} or {last}" if first else last


def near(name: str, known: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """Known names spelled almost like this one, best first."""
    return difflib.get_close_matches(name, list(known), n=most, cutoff=cutoff)


def did_you_mean(known: Iterable[str], name: str) -> str:
    """The end of a sentence that has listed the choices already; empty if no known name is near."""
    guesses = near(name, known)
    return f", did you mean {guesses[0]}?" if guesses else ""


def divisors(number: int) -> list[int]:
    """The divisors of a number, smallest first."""
    # The bound keeps absurd numbers from hanging a message; it hides only pairs of divisors that both exceed it.
    small = [d for d in range(1, min(math.isqrt(number), 1 << 16) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def multiples(number: int, unit: int) -> list[int]:
    """The nearest positive multiples of the unit, below and above."""
    below = number // unit * unit
    return [multiple for multiple in (below, below + unit) if multiple]


def around(number: int, legal: list[int]) -> list[int]:
    """The nearest legal values below and above."""
    return [value for value in legal if value <= number][-1:] + [value for value in legal if value > number][:1]


def nearest_divisors(number: int, whole: int) -> str:
    """The divisors of `whole` next to a number that is none, in words."""
    return either(around(number, divisors(whole)))


def nearest_multiples(number: int, unit: int) -> str:
    """The multiples of `unit` next to a number that is none, in words."""
    return either(multiples(number, unit))
