"""What all records of a run have in common. `events/records` lists them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Common to all records."""

    kind: ClassVar[str] = "event"
    time: float = field(default=0.0)
    """Seconds since 1970, filled in when the record is written."""
