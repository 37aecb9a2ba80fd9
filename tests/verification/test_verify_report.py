"""How the account of a proof looks on an ordinary terminal."""

from __future__ import annotations

import io

from ranks import tiny_run
from rich.console import Console

from phalanx.verification.cases import make_case
from phalanx.verification.parity import Report
from phalanx.verification.step_cost import RankAccount, Theory
from phalanx.verification.tolerance import Check
from phalanx.verification.verify_report import show_accounts, show_line, show_report


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


def test_a_limit_that_follows_from_noise_is_explained() -> None:
    case = make_case(tiny_run("layout.data=2", "optimizer.name=muon", "precision.compute=bf16"), steps=2)
    checks = (
        Check("gradients", 1e-2, 7e-2, "blocks.0.mlp.up.weight", 2),
        Check("parameters", 3e-2, 8e-2, "blocks.1.mlp.down.weight", 2, noise=2e-2),
    )
    report, out = Report(case=case, checks=checks), io.StringIO()
    show_report(Console(file=out, width=200), report)
    show_line(Console(file=out, width=200), 1, report)
    lines = out.getvalue().splitlines()
    explained = [line for line in lines if "times the noise" in line]
    assert len(explained) == 1 and explained[0].startswith(
        "parameters: accepted is 4 times the noise there, which is more than 2e-02."
    )
    assert (
        "differs from itself by 2.0e-02 if its gradients are disturbed by 0.01 of their size, as rounding in bf16 does."
        in explained[0]
    )
    assert lines[-1].endswith("gradients 1.0e-02, parameters 3.0e-02 (noise 2.0e-02)")
