"""Formats numbers for people: counts, speeds, sizes, durations; and text that a model wrote. All displays and summaries use it.

An unknown or non-finite value becomes a dash, so that a display never stops a run.
"""

from __future__ import annotations

import math
from typing import TypeGuard

UNKNOWN = "–"


def count(value: float | None) -> str:
    """Formats a count with three digits and a letter: 12.3k, 1.24M."""
    return _scaled(value, "kMBT")


def flops(value: float | None) -> str:
    """Formats a speed as 1.24 TFLOP/s."""
    return _scaled(value, "kMGTPE", unit="FLOP/s")


def size(value: float | None) -> str:
    """Formats bytes in binary units: 3.1 GiB."""
    if not _is_finite(value):
        return UNKNOWN
    unit = 0
    while unit < 5 and round(abs(value), 1) >= 1024:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} B" if unit == 0 else f"{value:.1f} {'KMGTP'[unit - 1]}iB"


def duration(value: float | None) -> str:
    """Formats seconds with at most two units: 0.4 s, 41 s, 2 min 05 s, 3 h 12 min, 2 d 03 h."""
    if not _is_finite(value):
        return UNKNOWN
    value = max(0.0, value)
    if value < 9.95:
        return f"{value:.1f} s"
    seconds = round(value)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    minutes = round(value / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    hours = round(value / 3600)
    return f"{hours // 24} d {hours % 24:02d} h"


def percent(value: float | None) -> str:
    """Formats a fraction as 41.2%, or as 4.12% below ten percent."""
    if not _is_finite(value):
        return UNKNOWN
    return f"{100 * value:.1f}%" if abs(value) >= 0.1 else f"{100 * value:.2f}%"


def dollars(value: float | None) -> str:
    """Formats a price as $61.9M."""
    return _scaled(value, "kMBT", sign="$")


def energy(joules: float | None) -> str:
    """Formats joules in watt-hours: 21.3 GWh."""
    return _scaled(None if joules is None else joules / 3600, "kMGT", unit="Wh")


def short_duration(value: float | None) -> str:
    """Formats a short time with three digits: 4.98 s, 312 ms, 41.0 µs; from ten minutes on like `duration`."""
    if not _is_finite(value):
        return UNKNOWN
    if value >= 600:
        return duration(value)
    scale, unit = (1.0, "s") if abs(value) >= 0.9995 else (1e3, "ms") if abs(value) * 1e3 >= 0.9995 else (1e6, "µs")
    return f"{value * scale:.{_decimals(value * scale)}f} {unit}"


def number(value: float | None, digits: int = 4) -> str:
    """Formats a loss or a norm. A non-finite value is shown as it is: nan or inf."""
    if not isinstance(value, int | float):
        return UNKNOWN
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.3g}"


def data_share(trained: int, epoch: int, parameters: int) -> str:
    """How often a run reads its data, and how much of it each parameter gets: "2.5 epochs, 20 tokens per parameter"."""
    return f"{trained / max(1, epoch):.3g} epochs, {trained / max(1, parameters):.3g} tokens per parameter"


def _is_finite(value: float | None) -> TypeGuard[float]:
    # Events of another version may hold text here, such as "nan".
    return isinstance(value, int | float) and math.isfinite(value)


def _decimals(value: float) -> int:
    """Decimals of a number with three digits."""
    return 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0


def _scaled(value: float | None, letters: str, *, sign: str = "", unit: str = "") -> str:
    """Formats a number with three digits and the letter of its power of 1000."""
    if not _is_finite(value):
        return UNKNOWN
    letter, space = "", " " if unit else ""
    for larger in letters:
        if abs(float(f"{value:.3g}")) < 1000:  # 999,960 is 1.00M, not 1000k
            break
        value, letter = value / 1000, larger
    digits = 0 if not letter and value == int(value) else _decimals(value)
    return f"{sign}{value:.{digits}f}{space}{letter}{unit}"


def visible(text: str) -> str:
    """Text with control characters as escapes such as \\x1b, except for line breaks and tabs: a model that has learned little writes any
    byte, and a terminal would obey it."""
    return "".join(char if char.isprintable() or char in "\n\t" else char.encode("unicode_escape").decode() for char in text)
