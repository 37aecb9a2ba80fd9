"""Amounts as people write them on a command line: 80GiB, 30d, $2M. `phalanx plan` and its neighbours read their limits with it."""

from __future__ import annotations

import math
import re

from phalanx.spec.errors import RunError

_BYTES = {
    "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40, "MB": 1e6, "GB": 1e9, "TB": 1e12,
}  # fmt: skip
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_TIMES = {"": 1.0, "k": 1e3, "M": 1e6, "B": 1e9}

_AMOUNT = re.compile(r"([+-]?(?:\d[\d,_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)$")


def memory(option: str, text: str) -> float:
    """Bytes. GB and GiB differ by 7 %, which decides whether a run fits: the unit has to be written out."""
    return _amount(option, text, _BYTES, "80GiB or 80GB")


def span(option: str, text: str) -> float:
    """Seconds."""
    return _amount(option, text, _SECONDS, "30d or 12h")


def money(option: str, text: str) -> float:
    """US dollars."""
    return _amount(option, text.strip().removeprefix("$"), _TIMES, "2e6 or $2M", written=text)


def _amount(option: str, text: str, units: dict[str, float], like: str, written: str | None = None) -> float:
    shown = f'{option} "{text if written is None else written}"'
    found = _AMOUNT.match(text.strip())
    if found is None:
        raise RunError([f"{shown} is not an amount: write it like {like}."])
    number, unit = float(found[1].replace(",", "").replace("_", "")), found[2]
    if unit not in units:
        # Case is forgiven where it cannot mean something else.
        close = [name for name in units if name.lower() == unit.lower()]
        if len(close) != 1:
            known = ", ".join(name for name in units if name)
            lacks = "has no unit" if not unit else f"has the unit {unit}"
            raise RunError([f"{shown} {lacks}: write it like {like}, in one of {known}."])
        unit = close[0]
    if not (math.isfinite(number) and number > 0):
        raise RunError([f"{shown} must be positive and finite: write it like {like}."])
    return number * units[unit]
