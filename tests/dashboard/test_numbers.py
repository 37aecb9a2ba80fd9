"""Numbers as people read them, at the edges where rounding changes the unit."""

from __future__ import annotations

import math
from typing import Any

import pytest

from phalanx.dashboard.numbers import count, duration, flops, number, percent, size, visible


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"), (7, "7"), (7.25, "7.25"), (99.96, "100"), (999, "999"), (999.6, "1.00k"), (12_345, "12.3k"),
        (999_499, "999k"), (999_960, "1.00M"), (1.24e6, "1.24M"), (8.03e9, "8.03B"), (15e12, "15.0T"), (1e18, "1000000T"),
    ],
)  # fmt: skip
def test_count(value: float, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(1.24e12, "1.24 TFLOP/s"), (134.4e9, "134 GFLOP/s"), (999.9e12, "1.00 PFLOP/s"), (5, "5 FLOP/s")]
)
def test_flops(value: float, text: str) -> None:
    assert flops(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (3.1 * 2**30, "3.1 GiB"),
        (2**30 - 1, "1.0 GiB"),
        (80 * 2**50, "80.0 PiB"),
    ],
)
def test_size(value: float, text: str) -> None:
    assert size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.04, "0.0 s"), (9.94, "9.9 s"), (9.96, "10 s"), (41.2, "41 s"), (59.7, "1 min 00 s"), (125, "2 min 05 s"),
        (3599.6, "1 h 00 min"), (11_520, "3 h 12 min"), (86_390, "1 d 00 h"), (183_600, "2 d 03 h"), (-3, "0.0 s"),
    ],
)  # fmt: skip
def test_duration(value: float, text: str) -> None:
    assert duration(value) == text


@pytest.mark.parametrize(("value", "text"), [(0.4123, "41.2%"), (0.0312, "3.12%"), (1.0, "100.0%"), (0, "0.00%")])
def test_percent(value: float, text: str) -> None:
    assert percent(value) == text


@pytest.mark.parametrize(("value", "text"), [(2.34111, "2.3411"), (123456.0, "1.23e+05"), (math.nan, "nan"), (math.inf, "inf")])
def test_number_shows_what_is_not_finite(value: float, text: str) -> None:
    assert number(value) == text


@pytest.mark.parametrize("form", [count, flops, size, duration, percent, number])
@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf, "nan"])
def test_nothing_is_too_odd(form: Any, value: Any) -> None:
    assert form(value) in {"–", "nan", "inf", "-inf"}


def test_control_characters_are_shown_not_obeyed() -> None:
    assert visible("a\x1b[2Jb\x07\n\tü\x00") == "a\\x1b[2Jb\\x07\n\tü\\x00"
