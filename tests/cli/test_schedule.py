"""`phalanx schedule` as it is called."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from phalanx.cli.main import main


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["phalanx", "schedule", *words])
    with pytest.raises(SystemExit) as end:
        main()
        raise SystemExit(0)
    return int(end.value.code or 0)


def test_schedule_is_printed_drawn_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (
        call(monkeypatch, "dualpipev", "--ranks", "4", "--microbatches", "8", "--png", "out.png", "--csv", "out.csv", "--json")
        == 0
    )
    captured = capsys.readouterr()
    shown, lines = captured.err, captured.out.splitlines()
    assert "dualpipev: 8 stages on 4 pipeline ranks, 8 micro-batches" in shown
    assert "rank 3  ·  ·  ·  F0 f0 F1 f1 F2 f2" in shown and "bubble: 5.9% of the time" in shown
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert len(lines) == 1, "JSON alone"
    found = json.loads(lines[0])
    assert (found["ranks"], found["stages"], found["micro_batches"]) == (4, 8, 8)
    assert found["bubble"] == pytest.approx(3 / 51) and found["length"] == 51
    assert found["actions"][3][:4] == ["3F0", "4F0", "3F1", "4F1"]
    # the file is a schedule again
    assert call(monkeypatch, "out.csv", "--json") == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again == {**found, "name": "out.csv"}


def test_schedule_times_change_the_picture(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch, "gpipe", "--ranks", "2", "--microbatches", "1", "--times", "1,0.5,1/2") == 0
    assert capsys.readouterr().out.splitlines()[1:3] == ["rank 0  F0 -- ·  ·  ·  ·  B0 --", "rank 1  ·  ·  F0 -- B0 -- ·  ·"]
    assert call(monkeypatch, "1f1b", "--ranks", "8", "--microbatches", "500") == 0
    assert "(1521 columns are too many to print; --png draws it)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["zvb"], 'there is no pipeline schedule "zvb": use one of gpipe, 1f1b,'),
        (["gpipe", "--ranks", "0"], "a pipeline needs at least 1 rank, not 0"),
        (["gpipe", "--stages", "4"], "--stages 4 was the number of pipeline ranks: write --ranks 4 for layout.pipeline = 4"),
        (["gpipe", "--microbatches", "-3"], "a pipeline needs at least 1 micro-batch, not -3"),
        (["zbv", "--stages-per-rank", "3"], "zbv has 2 stages per rank, not 3"),
        (["gpipe", "--microbatches", "1000000"], "is more than 200000 actions: use fewer"),
        (["gpipe", "--times", "1,2"], '--times "1,2": give three numbers'),
        (["gpipe", "--times", "1,2,-1"], '--times "1,2,-1": each must lie between 0.001 and 1000'),
        (["none.csv"], "none.csv: the schedule cannot be read: No such file or directory"),
        (["bad.csv"], "bad.csv: it has 1 actions"),
        (["good.csv", "--ranks", "3"], "--ranks 3: good.csv is for 1; remove the option"),
        (["gpipe", "--png", "none/out.png"], "none/out.png: cannot be written: No such file or directory"),
    ],
)
def test_schedule_refuses_invalid_input(
    words: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.csv").write_text("0F0\n")
    (tmp_path / "good.csv").write_text("0F0,0B0\n")
    assert call(monkeypatch, *words) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and errors[0].startswith("error: ") and sentence in errors[0]
