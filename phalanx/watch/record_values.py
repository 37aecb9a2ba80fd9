"""Reads values of a record that anybody may have written: a value of the wrong type or size becomes a missing one, never an error."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TypeAlias, cast

from phalanx.spec.json_value import Json, JsonObject

Record: TypeAlias = JsonObject
_DECODE = json.JSONDecoder().raw_decode
_EXACT = 1 << 53
"""Integers below it are exact in JavaScript, too."""


def parse(line: bytes) -> Record | None:
    """The record on a line; None if it is no JSON object."""
    try:
        # As json.loads, which would also look for other encodings: a large run has a million lines.
        table, end = _DECODE(line.decode())
        if end != len(line) and not line[end:].isspace():
            table = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return table if isinstance(table, dict) else None


def number(record: Mapping[str, Json], key: str) -> float:
    """A number, or the strings "nan", "inf" and "-inf"; NaN for anything else."""
    value = record.get(key)
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return math.nan
    try:
        return float(value)
    except (ValueError, OverflowError):
        return math.nan


def known(value: float) -> float | None:
    """A number for JSON: None if it is not finite."""
    return value if math.isfinite(value) else None


def whole(record: Mapping[str, Json], key: str) -> int | None:
    """A count or an index; None for anything else."""
    value = record.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _EXACT else None


def count(record: Mapping[str, Json], key: str) -> int:
    """A count; 0 if it is missing."""
    return whole(record, key) or 0


def text(record: Mapping[str, Json], key: str, limit: int = 500) -> str:
    """Text of at most `limit` characters; empty for anything else."""
    return shortened(record.get(key), limit)


def shortened(value: Json, limit: int) -> str:
    if not isinstance(value, str):
        return ""
    clean = value if value.isascii() else value.encode("utf-8", "replace").decode()  # half a surrogate pair cannot be sent
    return clean if len(clean) <= limit else f"{clean[: limit - 1]}…"


def table(record: Mapping[str, Json], key: str) -> JsonObject:
    """A table; empty for anything else."""
    value = record.get(key)
    return cast(JsonObject, value) if isinstance(value, dict) else {}


def entries(record: Mapping[str, Json], key: str, limit: int) -> list[Json]:
    """At most so many elements of a list; empty for anything else."""
    value = record.get(key)
    return list(value[:limit]) if isinstance(value, list) else []


def total(values: Mapping[str, Json]) -> float:
    """The sum of the finite numbers of a table and the tables in it."""
    amount = 0.0
    for key, value in values.items():
        if isinstance(value, dict):
            amount += total(value)
        else:
            each = number(values, key)
            amount += each if math.isfinite(each) else 0.0
    return amount


def numbers_of(record: Mapping[str, Json], key: str, limit: int = 64) -> dict[str, float]:
    """The finite numbers of a table, by name."""
    values = table(record, key)
    pairs = [(shortened(name, 80), number(values, name)) for name in list(values)[:limit]]
    return {name: value for name, value in pairs if math.isfinite(value)}
