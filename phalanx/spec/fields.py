"""What a field of the run file carries beside its type: the capability it waits for, and the numbers it accepts.
The dataclasses of this room declare it; `spec/typed` enforces it and `spec/schema` publishes it."""

from __future__ import annotations

from typing import Any


def later(capability: str) -> dict[str, Any]:
    """Metadata of a key whose capability is not built yet: any value but the default is refused by name."""
    return {"later": capability}


def within(
    low: float | None = None, high: float | None = None, *, above: float | None = None, infinite: bool = False
) -> dict[str, Any]:
    """Metadata of a number's accepted range: low ≤ value ≤ high, or above < value; inf only where it has a meaning."""
    return {"low": low, "high": high, "above": above, "infinite": infinite}
