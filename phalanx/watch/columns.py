"""Numeric tables of a run, and their reduction to as many points as a chart has pixels. `run_digest` fills them, the views read them."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from phalanx.spec.json_value import Json

Array: TypeAlias = npt.NDArray[Any]
_FIRST = 64
_FAR = 1 << 62
_DIGITS = 7
"""Significant digits of a point of a chart: more than its pixels can show."""


class Columns:
    """Rows of numbers in columns of fixed types, which take as many bytes as the types say. Rows are added and cut off at the end."""

    def __init__(self, types: Mapping[str, str], first: int = _FIRST):
        """`first`: rows that there is room for at once."""
        self._rows: Array = np.zeros(first, dtype=list(types.items()))
        self._length = 0
        self._apart: dict[str, Array] = {}
        """Columns that were asked for, each in one piece: a pass over one of them is several times as fast as over the rows."""
        self._copied: dict[str, int] = {}
        """Rows that are in it."""

    def append(self, row: tuple[Any, ...]) -> None:
        """Add a row. Raises TypeError, ValueError or OverflowError for a value that its column cannot hold."""
        if self._length == len(self._rows):
            larger = np.zeros(2 * len(self._rows), dtype=self._rows.dtype)
            larger[: self._length] = self._rows
            self._rows = larger
        self._rows[self._length] = row
        self._length += 1

    def cut(self, length: int) -> None:
        """Keep only the first rows."""
        self._length = min(length, self._length)
        self._copied = {name: min(self._length, copied) for name, copied in self._copied.items()}

    def drop_first(self, count: int) -> None:
        """Drop the oldest rows."""
        kept = self._rows[count : self._length].copy()
        self._length = len(kept)
        self._rows[: self._length] = kept
        self._copied.clear()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, name: str) -> Array:
        """One column, as it is now: rows that are added or cut later may or may not show in it."""
        if self._rows.dtype[name].shape:
            wide: Array = self._rows[name][: self._length]
            return wide
        column, copied = self._apart.get(name), self._copied.get(name, 0)
        if column is None or len(column) < self._length:
            column, copied = np.empty(len(self._rows), self._rows.dtype[name]), 0
            self._apart[name] = column
        if copied < self._length:
            column[copied : self._length] = self._rows[name][copied : self._length]
            self._copied[name] = self._length
        return column[: self._length]

    def rows(self, begin: int) -> Array:
        """The rows from an index on, with all columns."""
        return self._rows[begin : self._length]

    @property
    def memory(self) -> int:
        return int(self._rows.nbytes) + sum(int(column.nbytes) for column in self._apart.values())


def last_of_each(keys: Array, size: int) -> Array:
    """Index of the last row with each key below `size`; -1 for a key that no row has."""
    last = np.full(size, -1, dtype=np.int64)
    known = (keys >= 0) & (keys < size)
    last[keys[known]] = np.flatnonzero(known)
    return last


def between(x: Array, low: float | None, high: float | None) -> slice:
    """The rows of increasing `x` from low to high, both included, and one more at each end, so that a line goes to the edge of the chart."""
    if x.dtype.kind == "i":  # a float would make floats of them all first
        low = None if low is None else int(min(max(np.ceil(low), -_FAR), _FAR))
        high = None if high is None else int(min(max(np.floor(high), -_FAR), _FAR))
    begin = 0 if low is None else int(np.searchsorted(x, low, "left")) - 1
    end = len(x) if high is None else int(np.searchsorted(x, high, "right")) + 1
    return slice(max(0, begin), min(len(x), end))


def bucket_starts(count: int, width: int) -> Array:
    """First index of each of at most `width` buckets, which divide `count` rows evenly."""
    return np.unique(np.arange(min(width, count), dtype=np.int64) * count // max(1, min(width, count)))


def reduced(values: Array, starts: Array) -> tuple[Array, Array, Array]:
    """Least, mean and greatest finite value of each bucket; NaN where a bucket has none."""
    values = values.astype(np.float64, copy=False)
    finite = np.isfinite(values)
    if finite.all():
        sizes = np.diff(starts, append=len(values))
        total = np.add.reduceat(values, starts)
        return np.minimum.reduceat(values, starts), total / sizes, np.maximum.reduceat(values, starts)
    values = np.where(finite, values, np.nan)
    count = np.add.reduceat(finite.astype(np.int64), starts)
    total = np.add.reduceat(np.where(finite, values, 0.0), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.fmin.reduceat(values, starts), total / count, np.fmax.reduceat(values, starts)


def numbers(values: Array) -> list[float | None]:
    """The values for JSON, with as many digits as a chart can show; None for NaN and infinity."""
    if values.dtype.kind in "iub":
        return [int(value) for value in values.tolist()]
    values = values.astype(np.float64)
    finite = np.isfinite(values)
    safe = np.where(finite & (values != 0), np.abs(values), 1.0)
    scale = 10.0 ** np.clip(_DIGITS - 1 - np.floor(np.log10(safe)), -250, 250)
    rounded = np.where(finite, np.round(values * scale) / scale, np.nan)
    return [None if value != value else value for value in rounded.tolist()]


def packed(values: Array) -> str:
    """The values as base64 of 32-bit floats, least significant byte first: less to write, to send and to read than decimal digits."""
    return b64encode(values.astype("<f4").tobytes()).decode()


def curve(
    x: Array, columns: Mapping[str, Array], width: int, low: float | None, high: float | None, *, pack: bool = False
) -> dict[str, Json]:
    """Curves over one axis, reduced to `width` points: the last x of each bucket, and mean, least and greatest value of each column.

    Where nothing is reduced, or nothing varies, least and greatest are the mean, and are omitted. `pack`: see `packed`.
    """
    write: Callable[[Array], Json] = packed if pack else numbers
    chosen = between(x, low, high)
    x = x[chosen]
    if not len(x):
        return {"x": [], "rows": 0, "reduced": False, "y": {name: {"mean": []} for name in columns}}
    starts = bucket_starts(len(x), width)
    ends = np.append(starts[1:], len(x)) - 1
    is_reduced = len(starts) < len(x)
    y: dict[str, Json] = {}
    for name, column in columns.items():
        least, mean, greatest = reduced(column[chosen], starts)
        varies = is_reduced and not np.array_equal(least, greatest, equal_nan=True)
        ranges = {"min": write(least), "max": write(greatest)} if varies else {}
        y[name] = {"mean": write(mean)} | ranges
    # Times are sums of many digits: they are rounded to milliseconds, not to significant digits.
    points = numbers(x[ends]) if x.dtype.kind == "i" else [round(value, 3) for value in x[ends].tolist()]
    return {"x": points, "rows": len(x), "reduced": is_reduced, "y": y}
