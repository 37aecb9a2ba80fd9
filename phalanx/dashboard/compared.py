"""What a plan promised beside what its run measured, as a table. Handed plain values by `phalanx plan --compare`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from phalanx.dashboard.numbers import UNKNOWN, count, instant, percent, size


def show_comparison(console: Console, told: Mapping[str, Any]) -> None:
    """`told`: what `planning.compare.Comparison.to_json` says."""
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column("")
    for name in ("predicted", "measured", "error"):
        table.add_column(name, justify="right", header_style="dim")
    for row in told["rows"]:
        error = UNKNOWN if row["error"] is None else f"{'+' if row['error'] >= 0 else '−'}{percent(abs(row['error']))}"
        style = "" if row["error"] is None or abs(row["error"]) <= 0.2 else "yellow"
        table.add_row(
            Text(row["name"]),
            _shown(row["predicted"], row["unit"]),
            _shown(row["measured"], row["unit"]),
            Text(error, style=style),
        )
    console.print(table)
    for technique, collectives in told["sent"].items():
        parts = ", ".join(f"{size(sent)} by {name}" for name, sent in collectives.items())
        console.print(f"rank 0 sends for {technique}: {parts} a step")


def _shown(value: float | None, unit: str) -> str:
    if value is None:
        return UNKNOWN
    if unit == "s":
        return instant(value)
    return size(value) if unit == "B" else f"{count(value)} {unit}"
