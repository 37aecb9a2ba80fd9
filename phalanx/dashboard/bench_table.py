"""What `phalanx bench` measured, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from phalanx.dashboard.numbers import flops, short_duration, size


def show(console: Console, rows: Sequence[Mapping[str, Any]], constants: Mapping[str, float]) -> None:
    """Rows as they were measured, then the constants that plans take from them."""
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in ("measured", "of", ""):
        table.add_column(name, style="dim" if name == "of" else "", header_style="dim", justify="left" if name else "right")
    for row in rows:
        table.add_row(row["what"], row["shape"], shown(row["value"], row["unit"]))
    console.print(table)
    drawn = Table(box=None, pad_edge=False, padding=(0, 2))
    drawn.add_column("constant", header_style="dim")
    drawn.add_column("", justify="right")
    for name in sorted(constants):
        drawn.add_row(name, f"{constants[name]:.4g}")
    console.print(drawn)


def shown(value: float, unit: str) -> str:
    """A measured value in its unit."""
    if unit == "FLOP/s":
        return flops(value)
    return short_duration(value) if unit == "s" else f"{size(value)}/s"
