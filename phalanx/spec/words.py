"""How the messages of this room word values, kinds and choices. Called wherever one of its sentences is made."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from typing import Any

from phalanx.spec.dump import toml

_NOUNS = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    dict: "a table",
    list: "a list",
    tuple: "a list",
}
_LONGEST = 60


def cut(text: str) -> str:
    """A text that someone else wrote, shortened where it would drown the sentence."""
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def shown(value: Any) -> str:
    """A value as TOML, inside a sentence."""
    return cut(toml(value))


def noun(value: Any) -> str:
    """What a value is."""
    if isinstance(value, datetime.date | datetime.time):
        return "a date or time"
    return _NOUNS.get(type(value), f"a Python {type(value).__name__}")


def either(choices: Iterable[object]) -> str:
    """Choices as "a, b or c"."""
    *first, last = [str(choice) for choice in choices] or [""]
    return f"{', '.join(first)} or {last}" if first else last
