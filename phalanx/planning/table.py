"""Equally long columns of integers by name: rows beside each other, joined, picked and put together. `planning/candidates` and
`planning/explore` spell layouts out with them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

Columns = dict[str, npt.NDArray[np.int64]]


def join(columns: Columns, keys: npt.NDArray[np.int64], table: Callable[[int], Columns]) -> Columns:
    """Each row beside every row of the table of its key."""
    kinds, kind = np.unique(keys, return_inverse=True)
    if len(kinds) == 0:
        kinds, kind = np.ones(1, np.int64), np.zeros(0, np.int64)
    tables = [table(int(key)) for key in kinds]
    lengths = np.array([len(next(iter(one.values()))) for one in tables])
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
    counts = lengths[kind]
    rows = np.repeat(np.arange(len(kind)), counts)
    inside = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    place = starts[kind][rows] + inside
    joined = {name: column[rows] for name, column in columns.items()}
    return joined | {name: np.concatenate([one[name] for one in tables])[place] for name in tables[0]}


def pick(columns: Columns, index: Any) -> Columns:
    """Some of the rows."""
    return {name: column[index] for name, column in columns.items()}


def stack(parts: Sequence[Columns]) -> Columns:
    """All rows of all of them."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def columns_of(names: Sequence[str], rows: Sequence[tuple[int, ...]]) -> Columns:
    """Out of rows."""
    table = np.array(rows, dtype=np.int64).reshape(len(rows), len(names))
    return {name: np.ascontiguousarray(table[:, place]) for place, name in enumerate(names)}


def lengths(keys: npt.NDArray[np.int64], count: Callable[[int], int]) -> npt.NDArray[np.int64]:
    """For each key, what is counted for it."""
    kinds, kind = np.unique(keys, return_inverse=True)
    return np.array([count(int(key)) for key in kinds], dtype=np.int64)[kind] if len(kinds) else np.zeros(0, np.int64)


@cache
def divisors(number: int) -> list[int]:
    """In rising order."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
