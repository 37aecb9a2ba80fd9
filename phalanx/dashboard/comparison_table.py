"""What a plan promised beside what its run measured, as a table. Handed plain values by `phalanx plan --compare`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.dashboard.numbers import UNKNOWN, count, percent, short_duration, size

_OWN = ("compute", "optimizer")
"""Parts of a step in which a rank waits for nobody."""


def show_comparison(console: Console, told: Mapping[str, Any]) -> None:
    """`told`: what `planning.compare.Comparison.to_json` says."""
    again = any("refitted" in row for row in told["rows"])
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("")
    for name in ("predicted", "measured", "error", *(("refitted",) if again else ())):
        table.add_column(name, justify="right", header_style="dim")
    for row in told["rows"]:
        error = UNKNOWN if row["error"] is None else f"{'+' if row['error'] >= 0 else '−'}{percent(abs(row['error']))}"
        style = "" if row["error"] is None or abs(row["error"]) <= 0.2 else "yellow"
        table.add_row(
            Text(row["name"]),
            _shown(row["predicted"], row["unit"]),
            _shown(row["measured"], row["unit"]),
            Text(error, style=style),
            *([_shown(row["refitted"], row["unit"])] if again else []),
        )
    console.print(table)
    if (timed := told["timed"]) is not None:
        console.print(_about(timed), soft_wrap=True, markup=False)
    for technique, collectives in told["sent"].items():
        parts = ", ".join(f"{size(sent)} by {name}" for name, sent in collectives.items())
        console.print(f"rank 0 sends for {technique}: {parts} a step")


def _about(timed: Mapping[str, Any]) -> str:
    """Which step and which rank the parts are of."""
    words = f"parts of a step: in the proportions of step {timed['step']}, which took {short_duration(timed['seconds'])}"
    if timed["ranks"] == 1:
        return words
    own, mean = (sum(parts.get(name, 0.0) for name in _OWN) / timed["seconds"] for parts in (timed["parts"], timed["mean"]))
    return (
        f"{words}, on rank {timed['rank']}, which waited least of {timed['ranks']}: it worked {percent(own)} of that time, "
        f"the ranks {percent(mean)} on average"
    )


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return UNKNOWN
    if unit == "s":
        return short_duration(value)
    return size(value) if unit == "B" else f"{count(value)} {unit}"
