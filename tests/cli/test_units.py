"""Amounts with units, and what is said about those that cannot be read."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from phalanx.cli.units import memory, money, span
from phalanx.spec.errors import RunError


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (memory, "80GiB", 80 * 2**30),
        (memory, " 80 gb ", 80e9),
        (memory, "0.5TiB", 2**39),
        (memory, "1,024MiB", 2**30),
        (span, "30d", 30 * 86400),
        (span, "12h", 43200),
        (span, "1.5w", 10.5 * 86400),
        (span, "90min", 5400),
        (money, "2e6", 2e6),
        (money, "$2M", 2e6),
        (money, "2,500,000", 2.5e6),
        (money, "$1.5B", 1.5e9),
        (money, "500K", 5e5),
    ],
)
def test_amounts_are_read(read: Callable[[str, str], float], text: str, value: float) -> None:
    assert read("--option", text) == value


@pytest.mark.parametrize(
    ("read", "text", "sentence"),
    [
        (memory, "80", '--option "80" has no unit: write it like 80GiB or 80GB, in one of MiB, GiB, TiB, MB, GB, TB.'),
        (memory, "80G", '--option "80G" has the unit G: write it like 80GiB or 80GB,'),
        (memory, "much", '--option "much" is not an amount: write it like 80GiB or 80GB.'),
        (memory, "-1GiB", '--option "-1GiB" must be positive and finite'),
        (span, "30", '--option "30" has no unit: write it like 30d or 12h, in one of s, min, h, d, w.'),
        (span, "3m", '--option "3m" has the unit m'),
        (money, "$0", '--option "$0" must be positive and finite'),
        (money, "1e999", '--option "1e999" must be positive and finite'),
        (money, "2 euro", '--option "2 euro" has the unit euro: write it like 2e6 or $2M, in one of k, M, B.'),
        (money, "", '--option "" is not an amount'),
    ],
)
def test_others_are_refused_with_the_remedy(read: Callable[[str, str], float], text: str, sentence: str) -> None:
    with pytest.raises(RunError) as refused:
        read("--option", text)
    assert len(refused.value.problems) == 1 and refused.value.problems[0].startswith(sentence)
