"""What commit 18aeebb wrote still loads: run files answer with the new names of keys, run directories resume, checkpoints export."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from phalanx.cli.main import app
from phalanx.events.log import read_events
from phalanx.events.records import Evaluated, Event, Restored, Step
from phalanx.spec.errors import RunError
from phalanx.spec.fields import RENAMED_KEYS
from phalanx.spec.load import load

LEGACY = Path(__file__).parents[1] / "legacy"
RUNS = ("learned", "mtp")


def written(name: str) -> str:
    return (LEGACY / f"{name}.toml").read_text()


def with_new_names(text: str) -> str:
    for old, new in RENAMED_KEYS.items():
        text = re.sub(rf"^{old.partition('.')[2]} =", f"{new.partition('.')[2]} =", text, flags=re.M)
    return text


def steps(events: list[Event]) -> dict[int, tuple[float, float, str]]:
    return {event.step: (event.loss, event.grad_norm, event.batch_digest) for event in events if isinstance(event, Step)}


@pytest.mark.parametrize("name", RUNS)
def test_old_key_is_refused_with_its_new_name(name: str) -> None:
    with pytest.raises(RunError) as refused:
        load(LEGACY / f"{name}.toml")
    text, message = written(name), str(refused.value)
    for old, new in RENAMED_KEYS.items():
        if re.search(rf"^{old.partition('.')[2]} =", text, flags=re.M):
            line = next(n for n, row in enumerate(text.splitlines(), 1) if row.startswith(f"{old.partition('.')[2]} ="))
            assert f"{name}.toml:{line}" in message and old in message and new in message


@pytest.mark.parametrize("name", RUNS)
def test_run_directory_resumes_with_the_same_steps(name: str, tmp_path: Path) -> None:
    run_file, run_dir = tmp_path / "run.toml", tmp_path / "run"
    run_file.write_text(with_new_names(written(name)))
    shutil.copytree(LEGACY / name, run_dir)
    before = read_events(run_dir / "events.jsonl")
    # Without layout.data the replicas would fill the machine.
    overrides = ["layout.data=1"] if name == "learned" else []
    command = [sys.executable, "-m", "phalanx", "train", str(run_file), *overrides, "--run-dir", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    after = read_events(run_dir / "events.jsonl")[len(before) :]
    assert [event.step for event in after if isinstance(event, Restored)][:1] == [4]
    expected, resumed = steps(before), steps(after)
    assert sorted(resumed) == [5, 6, 7, 8]
    for step, (loss, norm, digest) in resumed.items():
        assert digest == expected[step][2], f"step {step} reads other tokens"
        # Another kind of processor rounds differently: equal bits are demanded of one machine only.
        assert (loss, norm) == pytest.approx(expected[step][:2], rel=1e-5), f"step {step}"
    assert [e.loss for e in after if isinstance(e, Evaluated)][-1:] == pytest.approx(
        [e.loss for e in before if isinstance(e, Evaluated)][-1:], rel=1e-5
    )


@pytest.mark.parametrize("name", RUNS)
def test_checkpoint_is_verified_inspected_exported_and_generates(name: str, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(LEGACY / name, run_dir)
    runner = CliRunner()
    for words in (
        ("checkpoint", "verify", str(run_dir)),
        ("checkpoint", "inspect", str(run_dir)),
        ("checkpoint", "list", str(run_dir)),
        ("generate", str(run_dir), "the ", "--tokens", "4"),
        ("export", str(run_dir), str(tmp_path / "hf")),
    ):
        result = runner.invoke(app, list(words))
        assert result.exit_code == 0, f"phalanx {' '.join(words)}: {result.output}{result.exception or ''}"
    assert (tmp_path / "hf" / "model.safetensors").exists()
