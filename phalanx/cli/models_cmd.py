"""`phalanx models`: the presets, with what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich.table import Table

from phalanx.cli.output import AsJson, console, print_json
from phalanx.dashboard.numbers import count, size
from phalanx.spec.model import PRESETS
from phalanx.spec.run import TOKENIZER_VOCAB

_STATE = 16  # bytes per parameter in training: weight, gradient and two Adam moments, in fp32


def models(json: AsJson = False) -> None:
    """List the model presets."""
    rows = list(_rows())
    table = Table(box=None, header_style="bold")
    for title in ("preset", "parameters", "active", "GFLOP/token", "training state"):
        table.add_column(title, justify="left" if title == "preset" else "right")
    for row in rows:
        flops = f"{row['flops_per_token'] / 1e9:,.3f}"
        table.add_row(row["name"], count(row["parameters"]), count(row["active"]), flops, size(row["state_bytes"]))
    console.print(table)
    if json:
        print_json({"models": rows})


def _rows() -> list[dict[str, Any]]:
    rows = []
    for name, preset in PRESETS.items():
        spec = replace(preset, vocab=preset.vocab or TOKENIZER_VOCAB["byte"])
        total = spec.parameters()
        rows.append(
            {
                "name": name,
                "parameters": total,
                "active": spec.active_parameters(),
                "flops_per_token": spec.flops_per_token(spec.context),
                "state_bytes": total * _STATE,
            }
        )
    return rows
