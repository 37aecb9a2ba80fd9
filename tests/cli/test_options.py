"""Amounts with units, and what is said about those that cannot be read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phalanx.cli.options import parse_dollars, parse_memory, parse_seconds
from phalanx.spec.errors import RunError


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (parse_memory, "80GiB", 80 * 2**30),
        (parse_memory, " 80 gb ", 80e9),
        (parse_memory, "0.5TiB", 2**39),
        (parse_memory, "1,024MiB", 2**30),
        (parse_seconds, "30d", 30 * 86400),
        (parse_seconds, "12h", 43200),
        (parse_seconds, "1.5w", 10.5 * 86400),
        (parse_seconds, "90min", 5400),
        (parse_dollars, "2e6", 2e6),
        (parse_dollars, "$2M", 2e6),
        (parse_dollars, "2,500,000", 2.5e6),
        (parse_dollars, "$1.5B", 1.5e9),
        (parse_dollars, "500K", 5e5),
    ],
)
def test_amounts_with_units_are_parsed(read: Callable[[str, str], float], text: str, value: float) -> None:
    assert read("--option", text) == value


@pytest.mark.parametrize(
    ("read", "text", "sentence"),
    [
        (
            parse_memory,
            "80",
            '--option "80" has no unit: write it like 80GiB or 80GB, in one of KiB, MiB, GiB, TiB, KB, MB, GB, TB.',
        ),
        (parse_memory, "80G", '--option "80G" has the unit G: write it like 80GiB or 80GB,'),
        (parse_memory, "much", '--option "much" is not an amount: write it like 80GiB or 80GB.'),
        (parse_memory, "-1GiB", '--option "-1GiB" must be positive and finite'),
        (parse_seconds, "30", '--option "30" has no unit: write it like 30d or 12h, in one of s, min, h, d, w.'),
        (parse_seconds, "3m", '--option "3m" has the unit m'),
        (parse_dollars, "$0", '--option "$0" must be positive and finite'),
        (parse_dollars, "1e999", '--option "1e999" must be positive and finite'),
        (parse_dollars, "2 euro", '--option "2 euro" has the unit euro: write it like 2e6 or $2M, in one of k, M, B.'),
        (parse_dollars, "", '--option "" is not an amount'),
    ],
)
def test_invalid_amounts_are_refused_with_the_remedy(read: Callable[[str, str], float], text: str, sentence: str) -> None:
    with pytest.raises(RunError) as refused:
        read("--option", text)
    assert len(refused.value.problems) == 1 and refused.value.problems[0].startswith(sentence)
