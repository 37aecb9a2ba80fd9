"""`phalanx verify` as a person and as a program calls it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.main import app
from phalanx.parallel.sharded_model import ShardedModel

PHALANX = [sys.executable, "-m", "phalanx"]
RUN = """
[model]
dim = 32
layers = 2
heads = 2
ffn = 48

[data]
source = "memory"
documents = ["to be or not to be", "that is the question", "whether tis nobler in the mind to suffer"]

[train]
batch = 4
micro_batch = 1
sequence_length = 16
steps = 100

[layout]
data = 2
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RUN)
    return file


def test_verify_command_passes(run_file: Path) -> None:
    command = [
        *PHALANX,
        "verify",
        str(run_file),
        "layout.data=1",
        "layout.tensor=2",
        "--steps",
        "2",
        "--json",
        "--account",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    table = json.loads(done.stdout)
    assert table["passed"] and table["ranks"] == 2 and table["steps"] == 2 and table["layout"]["tensor"] == 2
    assert [check["name"] for check in table["checks"]][-1] == "parameters"
    assert all(check["largest"] <= check["accepted"] for check in table["checks"])
    for words in ("TP2: 2 CPU ranks against one process", "optimizer.eps", "gradients", "1e-04", "all-reduce", "passed"):
        assert words in done.stderr
    assert table["accounts"][1]["sent"]["tensor"]["all-reduce"] > 0


def test_verify_names_the_tensor_that_differs(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = ShardedModel.finish

    def wrong(self: ShardedModel) -> None:
        finish(self)
        for one in self.owned:
            if one.name == "blocks.1.attention.value.weight" and one.gradient is not None and self.mesh.rank == 1:
                one.gradient += 0.01

    monkeypatch.setattr(ShardedModel, "finish", wrong)
    done = CliRunner().invoke(app, ["verify", str(run_file), "--steps", "1", "--json"])
    assert done.exit_code == 1, done.output
    table = json.loads(done.output.strip().splitlines()[-1])
    assert not table["passed"]
    assert (table["first"]["name"], table["first"]["tensor"], table["first"]["rank"]) == (
        "gradients", "blocks.1.attention.value.weight", 1,
    )  # fmt: skip
    assert "NOT PASSED" in done.output


def test_verify_shows_the_traceback_of_a_failed_rank(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: ShardedModel) -> None:
        if self.mesh.rank == 1:
            raise ArithmeticError("planted")

    monkeypatch.setattr(ShardedModel, "finish", broken)
    done = CliRunner().invoke(app, ["verify", str(run_file), "--steps", "1", "--json"])
    assert done.exit_code == 1
    table = json.loads(done.output.strip().splitlines()[-1])
    assert table["failure"]["rank"] == 1 and table["failure"]["error"] == "ArithmeticError: planted"
    assert any("in broken" in line for line in table["failure"]["trace"])
    assert "rank 1: ArithmeticError: planted" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["layout.tensor=3"], "layout.tensor = 3 does not divide model.heads = 2"),
        (["--layouts", "some"], 'use "all"'),
        (["train.batch=3"], "does not divide among the 2 replicas"),
        (["--device", "cuda"], "--device cuda needs a GPU"),
        (["--device", "tpu"], 'use "cpu" or "cuda"'),
        (["--device", "cuda", "--chaos"], "--device cuda does not apply to --chaos"),
        (["--device", "cuda", "--account"], "--device cuda does not apply to --account"),
    ],
)
def test_verify_refuses_invalid_options(arguments: list[str], words: str, run_file: Path) -> None:
    done = subprocess.run([*PHALANX, "verify", str(run_file), *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert words in done.stderr


def test_verify_layouts_prints_a_line_each(run_file: Path) -> None:
    arguments = ["verify", str(run_file), "--layouts", "all", "--ranks", "2", "--count", "3", "--steps", "1", "--json"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    *lines, last = done.output.strip().splitlines()
    table = json.loads(last)
    assert table["passed"] and len(table["layouts"]) == 3
    assert lines[-1] == "3 of 3 layouts passed"
