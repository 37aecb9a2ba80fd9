"""One problem between keys, and the arithmetic of the remedies. Made by `spec/check` and its two helpers, told by `spec/load`."""

from __future__ import annotations

import math
from typing import NamedTuple


class Finding(NamedTuple):
    """One problem between keys."""

    keys: tuple[str, ...]
    """The keys it rests on, the likeliest mistake first: it is told at that key's line, and not at all if one is unclear."""
    sentence: str
    lapses: bool = False
    """Not told of a resolved file, which no longer needs what its values were once taken from."""


def divisors(number: int) -> list[int]:
    """Numbers that divide this one, smallest first."""
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
