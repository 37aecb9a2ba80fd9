"""How the account of a proof looks on an ordinary terminal."""

from __future__ import annotations

import io

from rich.console import Console

from phalanx.verification.step_cost import RankAccount, Theory
from phalanx.verification.verify_report import show_accounts


def _accounts(ranks: int) -> list[RankAccount]:
    sent = {"shard": {"reduce-scatter": 1000 << 20, "all-gather": 900 << 20}}
    rest = {"gradients": 1 << 20, "optimizer": 2 << 20, "activations": 1023 << 20}
    return [
        RankAccount(sent | ({"pipeline": {"send": 4096}} if rank else {}), {"parameters": (rank + 1) << 20} | rest)
        for rank in range(ranks)
    ]


def test_eight_ranks_fit_a_terminal_of_80_columns() -> None:
    out = io.StringIO()
    memory = {"parameters": 1 << 20, "gradients": 1 << 20, "optimizer": 2 << 20}
    theory = Theory(sent={"shard": 1900 << 20}, memory=memory, per_parameter="2 + 14/4")
    show_accounts(Console(file=out, width=80), _accounts(8), theory)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.getvalue().splitlines() if line.startswith("│")]
    assert ["shard", "reduce-scatter", "1000.0 MiB", "all", "1000.0 MiB", ""] in rows
    assert ["shard", "all-gather", "900.0 MiB", "all", "900.0 MiB", "1.9 GiB"] in rows
    assert ["pipeline", "send", "4.0 KiB", "1", "0 B", "–"] in rows  # the first rank sends nothing
    assert ["parameters", "8.0 MiB", "7", "1.0 MiB", "1.0 MiB"] in rows
    assert ["state together", "11.0 MiB", "7", "4.0 MiB", "4.0 MiB"] in rows
    assert "…" not in out.getvalue()
