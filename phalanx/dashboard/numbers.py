"""Formats numbers for people: counts, speeds, sizes, durations. All displays and summaries use it.

An unknown or non-finite value becomes a dash, so that a display never stops a run.
"""

from __future__ import annotations

import math
from typing import TypeGuard

UNKNOWN = "–"


def count(value: float | None) -> str:
    """Formats a count with three digits and a letter: 12.3k, 1.24M."""
    return _scaled(value, ("", "k", "M", "B", "T"))


def flops(value: float | None) -> str:
    """Formats a speed as 1.24 TFLOP/s."""
    text = _scaled(value, (" ", " k", " M", " G", " T", " P", " E"))
    return text if text == UNKNOWN else f"{text}FLOP/s"


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
    text = _scaled(value, ("", "k", "M", "B", "T"))
    return text if text == UNKNOWN else f"${text}"


def energy(joules: float | None) -> str:
    """Formats joules in watt-hours: 21.3 GWh."""
    text = _scaled(None if joules is None else joules / 3600, (" ", " k", " M", " G", " T"))
    return text if text == UNKNOWN else f"{text}Wh"


def short_duration(value: float | None) -> str:
    """Formats a short time with three digits: 4.98 s, 312 ms, 41.0 µs; from ten minutes on like `duration`."""
    if not _is_finite(value):
        return UNKNOWN
    if value >= 600:
        return duration(value)
    scale, unit = next(
        ((scale, unit) for scale, unit in ((1.0, "s"), (1e3, "ms")) if abs(value) * scale >= 0.9995), (1e6, "µs")
    )
    value *= scale
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {unit}"


def number(value: float | None, digits: int = 4) -> str:
    """Formats a loss or a norm. A non-finite value is shown as it is: nan or inf."""
    if not isinstance(value, int | float):
        return UNKNOWN
    return f"{value:.{digits}f}" if abs(value) < 1e4 else f"{value:.3g}"


def _is_finite(value: float | None) -> TypeGuard[float]:
    # Events of another version may hold text here, such as "nan".
    return isinstance(value, int | float) and math.isfinite(value)


def _scaled(value: float | None, units: tuple[str, ...]) -> str:
    if not _is_finite(value):
        return UNKNOWN
    unit = 0
    while unit < len(units) - 1 and abs(float(f"{value:.3g}")) >= 1000:  # 999,960 is 1.00M, not 1000k
        value, unit = value / 1000, unit + 1
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    if unit == 0 and value == int(value):
        digits = 0
    return f"{value:.{digits}f}{units[unit]}"
