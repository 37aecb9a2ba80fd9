"""Who writes what: a rule that every rank evaluates for itself, so that saving needs no planning in common. Knows no tensors.

Ranks that hold the same pieces lay them end to end in one line of bytes and cut it into equal lengths, one for each. A rank so
writes at most one range of rows of each piece, all ranks write the same amount to within a row, and no rank asks another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_LEAST = 512  # bytes that a rank writes of what others hold too


@dataclass(frozen=True, slots=True)
class Copies:
    """The ranks that hold the same piece."""

    key: tuple[str, ...] = ()
    """Names them: pieces with the same key on a rank are held by the same ranks."""
    index: int = 0
    """This rank among them."""
    count: int = 1
    """0: others write it, as this rank's copy only mirrors theirs."""


ALONE = Copies()


def portions(rows: Sequence[tuple[int, int]], copies: Copies) -> list[tuple[int, int]]:
    """Of pieces held by the same ranks, given as (number of rows, bytes of a row): the rows (first, last) that this rank writes."""
    if not copies.count:
        return [(0, 0)] * len(rows)
    total = sum(count * size for count, size in rows)
    # What is not worth sharing is not strewn over the files of thousands of ranks, for each rank that loads would look into them all.
    writers = min(copies.count, -(-total // _LEAST) or 1)
    low, high = (total * min(place, writers) // writers for place in (copies.index, copies.index + 1))
    found, begin = [], 0
    for count, size in rows:
        found.append((_row(low - begin, count, size), _row(high - begin, count, size)))
        begin += count * size
    return found


def _row(byte: int, count: int, size: int) -> int:
    """The first row that begins at a byte or after it; the same for the rank that ends there and for the one that begins."""
    return min(max(-(-byte // size), 0), count) if size else 0
