"""`phalanx simulate` as it is called."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from phalanx.cli.main import main

RUN = """
model = "llama3-8b"
[train]
batch = 256
sequence_length = 4096
micro_batch = 1
steps = 50000000
[layout]
pipeline = 4
data = 2
shard = 4
tensor = 8
zero = 1
schedule = "zbv"
[cluster]
name = "h100-1024"
gpus = 256
"""


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["phalanx", "simulate", *words])
    with pytest.raises(SystemExit) as end:
        main()
        raise SystemExit(0)
    return int(end.value.code or 0)


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    return "run.toml"


def test_simulate_a_run(run_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    words = (run_file, "--days", "30", "--runs", "4", "--spares", "2", "--maintenance", "7d/1h", "--png", "run.png", "--json")
    assert call(monkeypatch, *words) == 0
    out, shown = capsys.readouterr()
    assert "256 ranks on 32 nodes, 2 spare" in shown and "where the time goes" in shown and "maintenance" in shown
    found: dict[str, Any] = json.loads(out)
    assert found["runs"] == 4 and found["nodes"] == 34 and found["spares"] == 2 and found["simulated_days"] <= 30
    assert 0.9 < found["goodput_p10"] <= found["goodput"] <= found["goodput_p90"] <= 1.0
    assert found["layout"]["schedule"] == "zbv" and sum(found["spent"].values()) == pytest.approx(1.0)
    assert Path("run.png").read_bytes().startswith(b"\x89PNG")
    # The same seed is the same run.
    goodputs = []
    for seed in ("0", "7"):
        assert call(monkeypatch, *words[:9], "--quick", "--json", "--seed", seed) == 0
        goodputs.append(json.loads(capsys.readouterr().out)["goodput"])
    assert goodputs[0] == found["goodput"] != goodputs[1]


def test_simulate_a_step(run_file: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, run_file, "--step", "--png", "step.png", "--trace", "step.json", "--json") == 0
    out, shown = capsys.readouterr()
    found = json.loads(out)
    assert "zbv: 8 stages on 4 pipeline ranks, 32 micro-batches" in shown
    assert set(found["exposed"]) == {"tensor", "pipeline", "data"} and found["exposed"]["tensor"] == found["split"]["tensor"]
    assert found["seconds"] == pytest.approx(sum(found["split"].values())) and found["promised"] == pytest.approx(
        found["seconds"], rel=0.1
    )
    assert Path("step.png").read_bytes().startswith(b"\x89PNG")
    tracks = json.loads(Path("step.json").read_text())["traceEvents"]
    assert sum(one["ph"] == "X" and one["pid"] == 1 for one in tracks) > 4 * 3 * 2 * 32


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--trace", "x.json"], "--trace shows one step: add --step"),
        (["--repair", "soon"], '--repair "soon" is not an amount: write it like 90s, 5min, 4h or 7d.'),
        (["--maintenance", "7d"], "give how often and how long, such as 7d/4h."),
        (["--maintenance", "4h/7d"], "a pause must be shorter than the time between two"),
        (["--days", "0"], "--days 0.0: give a number above 0."),
        (["--days", "nan"], "--days nan: give a number above 0."),
        (["--png", "no/folder.png"], "no/folder.png: cannot be written: there is no folder no"),
        (["--spares", "-1"], "--spares -1: give 0 or more nodes."),
        (["--step", "--png", "no/folder.png"], "no/folder.png: cannot be written"),
    ],
)
def test_simulate_refuses_invalid_options(
    run_file: str, words: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(monkeypatch, run_file, *words) == 2
    assert sentence in capsys.readouterr().err
