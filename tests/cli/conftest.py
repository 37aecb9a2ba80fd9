"""Fixtures of the command-line tests: a folder for commands, and finished runs that all tests share."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Ended, FinishedRun, FinishedRuns, InProcess, StepLosses, Workshop, losses


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> InProcess:
    """The command line in this process, in a folder of its own: faster than a process, for commands that start none."""
    from phalanx.cli.main import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Ended:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["phalanx", *map(str, arguments)])
        with pytest.raises(SystemExit) as leaving:
            main()
        code = leaving.value.code
        ended = Ended(code if isinstance(code, int) else 1 if code else 0, *capfd.readouterr())
        assert "Traceback" not in ended.err, ended.err
        return ended

    return run


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    made = Workshop(tmp_path / "workshop")
    yield made
    made.close()


@pytest.fixture(scope="session")
def workshop_type() -> type[Workshop]:
    """For folders that several tests share."""
    return Workshop


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FinishedRuns]:
    """Trains the run once per number of ranks for all tests, in one folder."""
    shop = Workshop(tmp_path_factory.mktemp("finished") / "workshop")
    runs: dict[int, FinishedRun] = {}

    def on(ranks: int) -> FinishedRun:
        if ranks not in runs:
            ended = shop.train(f"layout.data={ranks}", "--run-dir", f"ranks-{ranks}")
            runs[ranks] = FinishedRun(shop, ended, shop.path / f"ranks-{ranks}")
        return runs[ranks]

    yield on
    shop.close()


@pytest.fixture(scope="session", name="losses")
def losses_fixture() -> StepLosses:
    return losses
