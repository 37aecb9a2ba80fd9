"""Weights & Biases gets the curves of a run, in its offline form."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("wandb", reason="needs the extra wandb")

_BLOCK = 1 << 15
PROGRAM = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from happened import a_step, evaluated, finished, run_started
from phalanx.events.rundir import RunDir
from phalanx.spec.load import loads
from phalanx.watch.sinks.sink import SINKS, SinkSettings
run = loads("[train]\\nbatch = 8\\nsteps = 10\\n[watch]\\nwandb = true\\nwandb_project = 'tests'\\n")
sink = SINKS["wandb"].open(SinkSettings(run=run, rundir=RunDir(Path(sys.argv[1])), warn=print))
sink.receive([run_started(), a_step(1), a_step(2, loss=2.75), evaluated(2)])
sink.receive([finished(2)])
sink.close()
"""


def records(data: bytes) -> Iterator[bytes]:
    """The records of a file of Weights & Biases: the log format of LevelDB after a header of 7 bytes."""
    at, parts = 7, b""
    while at + 7 <= len(data):
        if (left := _BLOCK - at % _BLOCK) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


def test_an_offline_run_holds_config_and_curves(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    tests = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", PROGRAM, str(folder), tests]
    done = subprocess.run(command, env={**os.environ, "WANDB_MODE": "offline"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*-tiny/run-tiny.wandb")
    history: dict[int, dict[str, float]] = {}
    config: dict[str, Any] = {}
    for data in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        if record.HasField("history"):
            values = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            history.setdefault(int(values["_step"]), {}).update(values)
        if record.HasField("run"):
            assert record.run.run_id == "tiny" and record.run.project == "tests"
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
    assert {step: row["train/loss"] for step, row in history.items()} == {1: 3.0, 2: 2.75}
    assert history[2]["eval/loss"] == 2.5 and history[1]["speed/mfu"] == 0.5 and config["train"]["steps"] == 10
